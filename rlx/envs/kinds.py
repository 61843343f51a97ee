"""Which kind of environment a name stands for: classic (`load_environment`), a v1 taskset (a `Taskset` in `__all__`), or one of ours."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Literal

from rlx.config.pythons import shipped
from rlx.config.signatures import OWN_KINDS, module_of

Kind = Literal["classic", "v1", "function", "program", "gateway"]


def kind_of(env_id: str) -> Kind:
    """The kind of the environment `env_id`: a module's name, or `owner/name[@version]`. Imports its module.

    A package that offers both kinds is classic, unless the installed verifiers has only v1 (from 0.4 on).
    Raises ValueError, with a sentence for people, if no such package is installed or if it is no environment, and what importing it raises.
    """
    if env_id in OWN_KINDS:
        return OWN_KINDS[env_id]  # type: ignore[return-value]
    module = module_of(env_id)
    if importlib.util.find_spec("verifiers") is None:
        what = "rlx" if shipped(module) else env_id
        raise ValueError(f"{env_id} needs verifiers, and this Python ({sys.executable}) has none. Install it: rlx env install {what}")
    # verifiers takes its own taskset before a package of the same name, which may be what the taskset imports (textarena)
    own = (_folder("verifiers") / "v1" / "tasksets" / module / "__init__.py").is_file()
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if own:
            return "v1"
        if error.name != module:
            raise
        raise ValueError(
            f"the environment {env_id!r} is not installed: there is no module {module} in this Python ({sys.executable}). "
            "Install it with rlx env install FOLDER|PACKAGE"
        ) from error
    exported = [getattr(found, name, None) for name in getattr(found, "__all__", ())]
    bases = [base for one in exported if inspect.isclass(one) for base in one.__mro__]
    v1 = own or any((base.__module__, base.__name__) == ("verifiers.v1.taskset", "Taskset") for base in bases)
    if callable(getattr(found, "load_environment", None)) and (has_classic() or not v1):
        return "classic"
    if v1:
        return "v1"
    raise ValueError(
        f"the module {module} ({found.__file__ or ', '.join(found.__path__)}) is no verifiers environment: it has no function "
        "load_environment (classic), and its __all__ names no Taskset class (v1)"
    )


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
