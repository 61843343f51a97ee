"""The researcher's own code in a run's record: modules behind `_target_` that are not rlx's, reward functions, environments, option files.

    provenance.json  "own": {"my_losses": {"path": "/home/me/my_losses.py", "code": "3f9a2c1b04d5e6f7", "copy": "code/my_losses.py"}}
                     "options": {"loss/mine.yaml": {…, "copy": "conf/loss/mine.yaml"}}
    run.dir/code/    the copies of modules, which `reproduce.sh` runs
    run.dir/conf/    the copies of the user's own option files (`--config-dir`); `config.yaml` has their values

Packages from an index are known by name and version (`packages`, `pythons`); those of environments are recorded here all the same.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from rlx.config.chat_format import TEMPLATES, template_path
from rlx.config.eval_envs import environments
from rlx.config.instantiate import all_nodes_of
from rlx.config.pythons import python_of, shipped, sources_of
from rlx.config.schema import CommandConfig
from rlx.config.signatures import OWN_KINDS, READABLE, module_of
from rlx.paths import RunPaths

FOLDER, OPTIONS = "code", "conf"
KINDS = ("own", "options")
Copy = Callable[[Path, Path], object]
NO_OPTIONS: Mapping[str, Path] = MappingProxyType({})
MAX_COPIED_BYTES = 32 << 20  # bytes of a package that are copied; a larger one is only hashed
INSTALLED = {"site-packages", "dist-packages"}


def record(paths: RunPaths, places: Iterable[tuple[str, Path, str]], copy: Copy | None) -> dict[str, dict[str, Any]]:
    """What the record says of each file or folder. Of one that cannot be read, its path alone.

    `places`: the name, the place, and the name of the copy in the run directory. `copy`: writes a file's copy; None: nothing is copied.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, place, target in places:
        found[name] = {"path": str(place), "code": None, "copy": None}
        with contextlib.suppress(OSError):
            files = files_of(place)
            found[name]["code"] = digest_of(place.parent, files)
            if copy is not None and sum(file.stat().st_size for file in files) <= MAX_COPIED_BYTES:
                for file in files:
                    to = paths.root / target / file.relative_to(place)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    copy(file, to)
                found[name]["copy"] = target
    return found


def all_of(
    paths: RunPaths, cfg: CommandConfig, options: Mapping[str, Path], copy_option: Copy | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """The records of modules and of option files. `options`: the user's own option files, by their names below a `--config-dir`.

    `copy_option`: writes the copy of an option file, which may hold a secret; None: nothing is copied, no module either.
    """
    own = [(name, place, f"{FOLDER}/{place.name}") for name, place in modules(cfg)]
    of_options = [(name, place, f"{OPTIONS}/{name}") for name, place in options.items()]
    return {"own": record(paths, own, None if copy_option is None else shutil.copy), "options": record(paths, of_options, copy_option)}


def modules(cfg: CommandConfig) -> Iterator[tuple[str, Path]]:
    """Names and files, or folders, of the modules and packages, and of those of the user's that they import."""
    found = dict(_named(cfg))
    waiting = list(found.values())
    for place in waiting:  # grows
        for name in _imported(place):
            if name not in found and (own := _place(name, beside=place.parent)) is not None:
                found[name] = own
                waiting.append(own)
    yield from found.items()


def _named(cfg: CommandConfig) -> Iterator[tuple[str, Path]]:
    """What the configuration names."""
    named = [target for node, _ in all_nodes_of(cfg).values() for target in _targets(node)]
    played = environments(cfg)
    named += [str(env.args["reward"]) for env in played.values() if env.id in OWN_KINDS and env.args.get("reward")]
    for name in dict.fromkeys(target.partition(".")[0] for target in named):
        if (place := _place(name)) is not None:
            yield name, place
    for file in dict.fromkeys(part for env in played.values() for part in env.harness.command if is_file(part)):
        if not Path(file).is_relative_to("/usr") and Path(file).parent.name != "bin":  # an interpreter is no code of the user's
            yield Path(file).stem, Path(file).absolute()
    template = template_path(cfg.model.chat_template or "")
    if template.is_file() and template.parent != TEMPLATES:
        yield template.name, template.absolute()
    for env in {env.id: env for env in played.values()}.values():
        module = module_of(env.id)
        if module.partition(".")[0] not in READABLE and shipped(module) is None:
            place = sources_of(env.id, python_of(env.id, env.python))
            if place is not None and place.exists():
                yield module, place


def _targets(value: Any) -> Iterator[str]:
    """The targets of a node and of the nodes among its values."""
    if isinstance(value, Mapping):
        yield from [str(value["_target_"])] if "_target_" in value else []
        for inner in value.values():
            yield from _targets(inner)


def _imported(place: Path) -> Iterator[str]:
    """The top names of what the Python files of a module or package import, at whatever place."""
    for file in () if INSTALLED & {*place.parts} else files_of(place):
        nodes: Iterable[ast.AST] = ()
        with contextlib.suppress(SyntaxError, ValueError, OSError):  # whoever imports it says so
            nodes = ast.walk(ast.parse(file.read_bytes())) if file.suffix == ".py" else ()
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def is_file(part: str) -> bool:
    """Whether a part of a command names a file; it may be a whole script."""
    return len(part) < 256 and Path(part).is_file()


def _place(module: str, beside: Path | None = None) -> Path | None:
    """The file or folder of a module of the user's: in the folder of the one that imports it, or where this Python finds it."""
    if module in READABLE or module in sys.stdlib_module_names or shipped(module) is not None:
        return None
    for file in () if beside is None else (beside / f"{module}.py", beside / module / "__init__.py"):
        if file.is_file():
            return file if file.stem == module else file.parent
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not (spec.submodule_search_locations or spec.origin):
        return None
    place = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
    named_so = spec.origin is None and not any(place.glob("*.py"))  # any folder here may be called like a package that is not installed
    return None if named_so or INSTALLED & {*place.parts} else place


def files_of(place: Path) -> list[Path]:
    """A file alone, or all files of a package but hidden ones (.git, .env) and those that come from running it."""
    if not place.is_dir():
        return [place]
    parts = ((file, file.relative_to(place).parts) for file in place.rglob("*"))  # the package may lie in a .venv
    return sorted(file for file, own in parts if not any(part.startswith((".", "__pycache__")) for part in own) and file.is_file())


def digest_of(root: Path, files: Iterable[Path]) -> str:
    """A hash of the names of files below `root` and of their contents."""
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0".encode())
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    return digest.hexdigest()


def recorded(provenance: Mapping[str, Any], kinds: Sequence[str] = KINDS) -> dict[str, str]:
    """Digests by module or option file, of a run's newest attempt. Empty for runs of before there was such a record."""
    return {name: str(each["code"]) for kind in kinds for name, each in newest(provenance).get(kind, {}).items()}


def newest(provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of a run's newest attempt."""
    return [provenance, *provenance.get("later_attempts", [])][-1]


def changed(paths: RunPaths, cfg: CommandConfig, options: Mapping[str, Path]) -> list[str]:
    """What of the own code is not what it was when the run last started: `code of my_losses: 3f9a… → 77ab…`."""
    if not paths.provenance.is_file():
        return []
    before, now = recorded(json.loads(paths.provenance.read_text())), recorded(all_of(paths, cfg, options))
    return [f"code of {name}: {before[name]} → {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
