"""The recipe of the model that rlx makes before a run: everything that determines what it learns, and so where the cache has it.

    the keys of `model`  +  the run of `rlx sft` as values  +  environments with their files  +  the code that computes  →  hash  →  folder

The code is that of the two roles of a warm start, and of the rooms in `COMPUTES`. The other rooms carry results, or hold settings, which
the recipe has as values. Imports neither torch nor verifiers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.config.chat_format import template_path
from rlx.config.pythons import python_of, sources_of
from rlx.config.schema import CommandConfig, Config, EnvConfig, PlayRoot, SftRoot
from rlx.config.warm_start import supervised
from rlx.paths import cache_root

OF_ENVS = ("id", "args", "weight", "num_tasks", "split")  # keys of an environment that decide what its demonstrations are
OF_THE_RUN = (
    "data",
    "loss",
    "max_steps",
    "optim",
    "orchestrator",
    "scheduler",
    "seq_len",
    "trainer",
)  # sections of `rlx sft` that decide what is learned
ROLES = ("roles/prepare.py", "roles/trainer.py")  # the processes of a warm start
COMPUTES = ("data", "envs", "kernels", "losses", "models", "parallel", "policy", "train")  # rooms whose code decides it, too
LARGE = 2**26  # bytes; a larger file of an environment is not read for the recipe
PACKAGE = Path(__file__).parent.parent  # rlx/


def recipe(config: CommandConfig) -> dict[str, Any]:
    """Everything that determines what the model learns, as values for JSON."""
    assert config.model.warm_start is not None, "the plan has this role only for models that rlx makes"
    return {
        "warm_start": dataclasses.asdict(config.model.warm_start),
        "context_length": config.model.context_length,
        "chat_template": config.model.chat_template and digest([template_path(config.model.chat_template)]),
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "renderer": config.model.renderer,
        "envs": {
            name: {key: getattr(env, key, None) for key in OF_ENVS}
            | ({} if isinstance(config, Config) else {"split": "train"})  # the rows that `rlx.envs.demonstrations` takes then
            | {"code": environment_digest(env)}
            for name, env in envs_of(config).items()
        },
        "run": of_the_run(config),
        "code": digest(code()),
    }


def envs_of(config: CommandConfig) -> Mapping[str, EnvConfig]:
    """The environments whose examples the model learns first; none before supervised training, whose own rows train it, and none for a
    benchmark on random tokens."""
    if not isinstance(config, PlayRoot) or isinstance(config, SftRoot) or getattr(config, "bench_target", None) in ("trainer", "inference"):
        return {}
    return config.envs


def model_folder(name: str, what: dict[str, Any]) -> Path:
    """Where the model of a recipe is kept: `models/tiny-0123456789ab` in the cache."""
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    return cache_root().absolute() / "models" / f"{Path(name).name}-{key}"


def environment_digest(env: EnvConfig) -> str:
    """Digest of the files of an environment's package, its data included; empty if there is none. The package is not imported.

    Caches are left out: `__pycache__`, and what is hidden.
    """
    source = sources_of(env.id, python_of(env.id, env.python))
    if source is None or not source.is_dir():
        return digest([source]) if source is not None and source.is_file() else ""
    found = hashlib.sha256()
    for name in sorted(file.relative_to(source) for file in source.rglob("*")):
        if (source / name).is_file() and not any(part == "__pycache__" or part.startswith(".") for part in name.parts):
            found.update(f"{name.as_posix()}\0{_content(source / name)}\0".encode(errors="surrogateescape"))
    return found.hexdigest()[:16]


def _content(file: Path) -> str:
    """What stands for the content of a file; of a large one its size and its time, because reading it would delay every start."""
    try:
        stat = file.stat()
        if stat.st_size > LARGE:
            return f"{stat.st_size} bytes of {stat.st_mtime_ns}"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:  # another process has just deleted it, or nobody may read it
        return "unreadable"


def digest(files: Sequence[Path]) -> str:
    """Digest of the files' bytes, in the given order."""
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]


def of_the_run(config: CommandConfig) -> dict[str, Any]:
    """The values of the run of `rlx sft` that trains the model; empty if it keeps its random weights."""
    if not (envs := envs_of(config)):
        return {}
    assert isinstance(config, PlayRoot)
    run = dataclasses.asdict(supervised(config, Path("rows"), Path("run"), len(envs)))
    return {key: run[key] for key in OF_THE_RUN}


def code() -> list[Path]:
    """The files whose change may change what the model learns, in the order of their names."""
    rooms = [file for room in COMPUTES for file in (PACKAGE / room).rglob("*.py")]
    return sorted([*rooms, *(PACKAGE / role for role in ROLES)])
