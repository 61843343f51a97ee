"""The signature of a `_target_`, read without importing torch where possible.

A target from rlx or torch is read from its source. That takes milliseconds; importing torch takes seconds, and a wrong key should be
reported at once. Any other target is imported, so that a mistake in a user's own module shows before a run starts. The tests import
every shipped target and compare both results.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

from rlx.config.errors import ConfigError
from rlx.config.loss_traits import ATTRIBUTE, Declared, declares
from rlx.config.validate import closest

READABLE = ("rlx", "torch")  # packages whose source is read
SIMPLE: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode = FunctionNode | ast.ClassDef


def locate(path: str) -> Callable[..., Any]:
    """The function or class at a dotted path, imported. Raises ConfigError."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's own module can raise anything on import
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise ConfigError(f"{module_name} cannot be imported: {kind}{error}.") from error
    target = getattr(module, name, None)
    if not callable(target):
        raise ConfigError(_no_such(module_name, name, [n for n in vars(module) if not n.startswith("_")]))
    return target


def signature_of(path: str) -> inspect.Signature:
    """Parameters of a target with types and defaults, without `self`. Raises ConfigError when there is no such target."""
    if path.partition(".")[0] in READABLE:
        module, _, name = path.rpartition(".")
        if (found := _signature(_find(module, name))) is not None:
            return found
    target = locate(path)
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    signature = inspect.signature(target)
    return signature.replace(parameters=[p.replace(annotation=hints.get(p.name, Any)) for p in signature.parameters.values()])


def declared_by(path: str) -> Declared | None:
    """What a target declares about itself; None when there is no such target, or when its module must be imported first."""
    module, _, name = path.rpartition(".")
    if path.partition(".")[0] == "rlx":
        return _declared_in_source(module, name)
    target = getattr(sys.modules.get(module), name, None)
    return None if target is None else getattr(target, ATTRIBUTE, Declared())


@functools.cache
def _declared_in_source(module: str, name: str) -> Declared | None:
    try:
        node = _find(module, name)
    except ConfigError:  # the check of targets reports it
        return None
    for call in node.decorator_list if node is not None else ():
        if isinstance(call, ast.Call) and _is_declaration(call):
            return Declared(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg})
    return Declared()


def _is_declaration(decorator: ast.expr) -> bool:
    """Whether it is `@declares(…)`, which does not change the target's signature."""
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == declares.__name__


OWN_KINDS = {"rlx.envs.function": "function", "rlx.envs.program": "program", "rlx.envs.outside": "gateway"}
"""The environments that are modules of rlx and need no verifiers, by their ids: a reward function, programs, programs elsewhere."""


def module_of(environment: str) -> str:
    """The module of an environment: `owner/my-env@0.1.0` is `my_env`."""
    return environment.rpartition("/")[2].partition("@")[0].replace("-", "_")


def is_installed(module: str) -> bool:
    """Whether a module can be found. Does not import it."""
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _no_such(module: str, name: str, names: list[str]) -> str:
    near = closest(name, names, 1)
    return f"{module} has no function or class {name}." + (f" Did you mean {module}.{near[0]}?" if near else "")


def _source(module: str) -> Path:
    """The file of a module, found without importing its packages. Raises ConfigError."""
    top, *rest = module.split(".")
    package = importlib.util.find_spec(top)
    assert package is not None
    assert package.origin is not None, "it is one of READABLE"
    inside = Path(package.origin).parent.joinpath(*rest)
    for file in (inside.with_suffix(".py"), inside / "__init__.py"):
        if file.is_file():
            return file
    raise ConfigError(f"there is no module {module}.")


def _find(module: str, name: str) -> DefinitionNode | None:
    """The definition of `name` in the source of its module, or of the module it is imported from; None if `name` is assigned.

    Raises ConfigError when there is no such module or name.
    """
    file = _source(module)
    names = []
    for node in _statements(file.read_text()):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(_imported(node, module, file), alias.name)
        if isinstance(node, FunctionNode | ast.ClassDef):
            names.append(node.name)
            if node.name == name:
                return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return None
    raise ConfigError(_no_such(module, name, names))


@functools.lru_cache(maxsize=256)
def _statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _imported(node: ast.ImportFrom, module: str, file: Path) -> str:
    """The absolute name of the module in a `from … import` statement."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _signature(node: DefinitionNode | None) -> inspect.Signature | None:
    """The signature of a definition; None if the source does not show it (decorated, inherited, assigned)."""
    if node is None or not all(map(_is_declaration, node.decorator_list)):
        return None
    if isinstance(node, ast.ClassDef):
        constructor = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        whole = None if constructor is None else _signature(constructor)
        return whole and whole.replace(parameters=list(whole.parameters.values())[1:])
    P, a = inspect.Parameter, node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    listed = [
        *((arg, P.POSITIONAL_OR_KEYWORD, default) for arg, default in zip(plain, defaults, strict=True)),
        *([(a.vararg, P.VAR_POSITIONAL, None)] if a.vararg else []),
        *((arg, P.KEYWORD_ONLY, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)),
        *([(a.kwarg, P.VAR_KEYWORD, None)] if a.kwarg else []),
    ]
    return inspect.Signature([P(arg.arg, kind, default=_value(default), annotation=_type(arg.annotation)) for arg, kind, default in listed])


def _value(default: ast.expr | None) -> Any:
    if default is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)  # only for error messages


def _type(node: ast.expr | None) -> Any:
    """The type of an annotation, if a configuration value can have it; otherwise Any."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            return SIMPLE.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right])
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _union([inner, ast.Constant(None)])
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return _union(members)
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inner):
            return list[_type(inner)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="tuple" | "Tuple"), slice=ast.Tuple(elts=members)):
            return tuple[tuple(map(_type, members))]  # type: ignore[misc]
    return Any


def _union(nodes: list[ast.expr]) -> Any:
    """A union without the types that a configuration cannot hold, such as a tensor; Any if none remains."""
    kinds = [kind for kind in map(_type, nodes) if kind is not Any]
    return Union[tuple(kinds)] if any(kind is not type(None) for kind in kinds) else Any  # noqa: UP007
