"""Which kind of environment a name stands for: classic (`load_environment`), a v1 taskset (a `Taskset` in `__all__`), or our function.

The answer is read from the package's source, in milliseconds and without running it. Only a package whose source does not show it
(names that are computed, star imports) is imported.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

from rlx.config.signatures import FUNCTION

Kind = Literal["classic", "v1", "function"]

DEPTH = 8  # imports and base classes that are followed from a name to its definition


class Unclear(ValueError):
    """The source does not show the kind. Importing the package does."""


def kind_of(env_id: str, *, importing: bool = True) -> Kind:
    """The kind of the environment `env_id`: a module's name, or `owner/name[@version]`.

    A package that offers both kinds is classic, unless the installed verifiers has only v1 (from 0.4 on).
    `importing`: import the package if its source does not show the kind; otherwise raise Unclear.
    Raises ValueError, with a sentence for people, if no such package is installed or if it is no environment.
    """
    if env_id == FUNCTION:
        return "function"
    module = module_of(env_id)
    if not module.isidentifier():
        raise ValueError(f"{env_id!r} is not the name of an environment: write the name of an installed module, or owner/name")
    found = _read(module)
    own = (_folder("verifiers") / "v1" / "tasksets" / module / "__init__.py").is_file()
    if found is None:
        if own:
            return "v1"
        raise ValueError(
            f"the environment {env_id!r} is not installed: there is no module {module}. "
            f"Install it into this Python ({sys.executable}), for example with rlx env install FOLDER"
        )
    classic, v1 = found
    if classic and has_classic():
        return "classic"
    if own:  # verifiers takes its own taskset before a package of the same name, which may be what the taskset imports (textarena)
        return "v1"
    if classic is None or v1 is None:
        if not importing:
            raise Unclear(f"the source of {module} does not show whether it is a classic environment or a v1 taskset; importing it does")
        classic, v1 = _ask(importlib.import_module(module))
    if classic and (has_classic() or not v1):
        return "classic"
    if v1:
        return "v1"
    if (spec := importlib.util.find_spec(module)) is not None and spec.origin is None:
        (folder, *_) = spec.submodule_search_locations or [""]
        raise ValueError(
            f"Python takes the folder {folder} for the module {module}, and it has no code of its own. If {module} is installed, this "
            "folder hides it: start from another folder, or rename it"
        )
    raise ValueError(
        f"the module {module} is no verifiers environment: it has no function load_environment (classic), "
        f"and its __all__ names no Taskset class (v1)"
    )


def module_of(env_id: str) -> str:
    """The module of an environment: `owner/my-env@0.1.0` is `my_env`."""
    return env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


@functools.cache
def version_of(env_id: str) -> str | None:
    """The version of the installed package that has the environment; None if it is no package (a file on the path)."""
    module = module_of(env_id)
    for name in (module.replace("_", "-"), *importlib.metadata.packages_distributions().get(module, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@functools.cache
def has_classic() -> bool:
    """Whether the installed verifiers runs classic environments (0.3 does, 0.4 does not)."""
    return (_folder("verifiers") / "legacy").is_dir()


def _folder(package: str) -> Path:
    """The folder of a top-level package; an empty path's name if it is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else Path("/nonexistent")


def _read(module: str) -> tuple[bool | None, bool | None] | None:
    """(has load_environment, exports a Taskset) from the source; None within it: not clear. None: no such module."""
    loaded = sys.modules.get(module)
    spec = None
    with contextlib.suppress(ValueError):  # a module without a specification, made by hand
        spec = importlib.util.find_spec(module)
    if spec is None:
        return None if loaded is None else _ask(loaded)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None, None
    file = Path(spec.origin)
    names = _exported(file)
    classic: bool | None = _define(file, "load_environment") is not None
    if not classic and _is_dynamic(file):
        classic = None
    if names is None:  # without __all__, verifiers finds no taskset
        return classic, None if _define(file, "__all__") is not None or (not classic and _is_dynamic(file)) else False
    kinds = [_is_taskset(file, name, DEPTH) for name in names]
    return classic, True if True in kinds else None if None in kinds else False


def _ask(module: ModuleType) -> tuple[bool, bool]:
    """(has load_environment, exports a Taskset) of an imported module."""
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", ())]
    bases = [base.__name__ for one in exported if inspect.isclass(one) for base in one.__mro__ if base.__module__ == "verifiers.v1.taskset"]
    return callable(getattr(module, "load_environment", None)), "Taskset" in bases


@functools.cache
def _body(file: Path) -> tuple[ast.stmt, ...]:
    """The statements of a file, those under `if` and `try` included. Empty if it is not Python."""

    def flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in statements:
            yield node
            if isinstance(node, ast.If | ast.Try):
                yield from flat([*node.body, *node.orelse, *getattr(node, "finalbody", [])])

    try:
        with uncollected():
            return tuple(flat(ast.parse(file.read_text()).body))
    except (SyntaxError, UnicodeDecodeError):
        return ()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage within this. CPython 3.11 refuses good source (SystemError) if a finaliser raises while its tree is made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _is_dynamic(file: Path) -> bool:
    """Whether the module may have names that its source does not show: a star import, or `__getattr__`."""
    return any(
        (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
        or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        for node in _body(file)
    )


def _exported(file: Path) -> list[str] | None:
    """The names in `__all__`; None if there is none, or if it is computed."""
    for node in _body(file):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                return [str(name) for name in ast.literal_eval(node.value)]  # type: ignore[attr-defined]
            except (ValueError, TypeError):
                return None
    return None


def _define(file: Path, name: str) -> ast.stmt | None:
    """The statement that gives the module this name: a definition, an assignment or an import."""
    for node in _body(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return node
        if isinstance(node, ast.ImportFrom | ast.Import) and any((alias.asname or alias.name) == name for alias in node.names):
            return node
    return None


def _is_taskset(file: Path, name: str, depth: int) -> bool | None:
    """Whether `name` of the module `file` is a subclass of v1's Taskset; None if its source does not show it."""
    node = _define(file, name)
    if depth == 0 or node is None:
        return None
    if isinstance(node, ast.Assign):
        if isinstance(node.value, ast.Name):
            return _is_taskset(file, node.value.id, depth - 1)
        return False if isinstance(node.value, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Lambda) else None
    if isinstance(node, ast.ImportFrom):
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if node.module and node.module.partition(".")[0] == "verifiers" and not node.level:
            return original.endswith("Taskset")  # verifiers names its own so
        source = _module_file(file, node)
        return None if source is None else _is_taskset(source, original, depth - 1)
    if not isinstance(node, ast.ClassDef):
        return False
    unclear = False
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(plain, ast.Attribute):
            if plain.attr.endswith("Taskset"):
                return True
        elif isinstance(plain, ast.Name):
            known = plain.id == "Taskset" or _is_taskset(file, plain.id, depth - 1)
            if known:
                return True
            unclear = unclear or known is None
    return None if unclear else False


def _module_file(file: Path, node: ast.ImportFrom) -> Path | None:
    """The file of the module in `from … import` in `file`, found without importing anything."""
    parts = node.module.split(".") if node.module else []
    if node.level:
        base = file.parent
        for _ in range(node.level - 1):
            base = base.parent
    elif parts:
        try:
            spec = importlib.util.find_spec(parts[0])
        except ValueError:
            return None
        if spec is None or spec.origin is None:
            return None
        base, parts = Path(spec.origin).parent, parts[1:] if spec.submodule_search_locations else []
        if not spec.submodule_search_locations:
            return Path(spec.origin) if spec.origin.endswith(".py") else None
    place = base.joinpath(*parts)
    return next((one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()), None)
