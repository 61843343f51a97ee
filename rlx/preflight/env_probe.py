"""Asks what the environments of one or several configurations are, before anything starts (`rlx.envs.probe`).

Importing verifiers and loading an environment takes seconds, so answers are kept in the user's cache. An answer holds as long as the files
of the environment's package, the other files that it was read from, and the list of installed packages are the same. Problems are not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rlx.config.errors import ConfigError
from rlx.config.eval_envs import environments, section_of
from rlx.config.pythons import python_of, sources_of
from rlx.config.schema import CommandConfig, EnvConfig, PlayRoot, TrainingRoot
from rlx.envs import boot
from rlx.envs.probe_cache import FIELDS, Probed, file_digest, packages_digest
from rlx.paths import cache_root, write_text
from rlx.plan.environment import DEVICES, inherited
from rlx.process import SUPERVISOR
from rlx.process_tree import TOKEN, kill_all
from rlx.runs.status import describe_returncode

SCHEMA = 4  # changes when the meaning of a kept answer changes

Identity = tuple[str, str, str]  # Python, verifiers' name, arguments and what is used of it as JSON


def environments_of(configs: Sequence[CommandConfig], *, anew: bool = False) -> list[dict[str, Probed]]:
    """What the environments of each configuration are, by name. Loads each different environment once. `anew`: even if it is known.

    A configuration that replays recorded batches, or has launcher.check_envs=false, has an empty answer. An environment
    with a Python that only the pods of a cluster have is left out.
    Raises ConfigError with the problems of all of them.
    """
    wanted: dict[Identity, tuple[str, EnvConfig]] = {}
    for cfg in configs:
        for name, env in _looked_at(cfg).items():
            wanted.setdefault(identity(env), (name, env))
    known = {each: (None if anew else _kept(each)) or _load(each, name, env) for each, (name, env) in wanted.items()}
    offline = "if it lacks data of the hub, rlx fetch, where there is internet; " if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    problems = [
        f"{section_of(name)}: {probed.problem}.\n  fix: {offline}{probed.fix}; launcher.check_envs=false starts without this check"
        for each, (name, _) in wanted.items()
        if (probed := known[each]).problem is not None
    ]
    problems += [problem for cfg in configs for problem in _too_long(cfg, known)]
    if problems:
        raise ConfigError(problems)
    return [{name: known[identity(env)] for name, env in _looked_at(cfg).items()} for cfg in configs]


def _too_long(cfg: CommandConfig, known: Mapping[Identity, Probed]) -> Iterator[str]:
    """Environments whose prompts fill the context of the tiny model, which has a token for each character."""
    if cfg.model.warm_start is None:
        return
    for name, env in _looked_at(cfg).items():
        chars = known[identity(env)].prompt_chars
        if chars >= cfg.seq_len:
            yield (
                f"{section_of(name)}: {env.id} is for language models: its prompts have {chars} characters or more, and model.name="
                f"{cfg.model.name} has a token for each, but seq_len={cfg.seq_len}.\n"
                "  fix: a language model, such as model=qwen3_0_6b, or an environment for small models, such as env=sums"
            )


def lines_of(environments: Mapping[str, Probed]) -> list[str]:
    """One line for each environment."""
    return [f"{name}: {probed}" for name, probed in environments.items()]


def _looked_at(cfg: CommandConfig) -> Mapping[str, EnvConfig]:
    if not isinstance(cfg, CommandConfig) or (isinstance(cfg, TrainingRoot) and not (isinstance(cfg, PlayRoot) and cfg.generates_rollouts)):
        return {}
    if not cfg.launcher.check_envs:
        return {}
    return environments(cfg)


def identity(env: EnvConfig) -> Identity:
    """What makes two environments one."""
    return (
        python_of(env.id, env.python) or sys.executable,
        env.id,
        json.dumps(asked(env), sort_keys=True, default=repr),
    )


def asked(env: EnvConfig) -> dict[str, Any]:
    """What loading an environment needs of its configuration."""
    return {field: msgspec.to_builtins(getattr(env, field)) for field in FIELDS}


# the cache


def _file_of(each: Identity) -> Path:
    found = str(sources_of(each[1])) if each[0] == sys.executable else os.environ.get("PYTHONPATH", "")
    caches = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE")
    hub = [os.environ.get(name) for name in caches] if os.environ.get("HF_HUB_OFFLINE") == "1" else []
    text = json.dumps([SCHEMA, *each, found, *hub])  # without the hub, what loads depends on the cache
    return cache_root() / "environments" / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def _kept(each: Identity) -> Probed | None:
    """The answer in the cache, if everything that it was made from is unchanged."""
    try:
        kept = json.loads(_file_of(each).read_text())
    except (OSError, ValueError):
        return None
    if any(file_digest(path) != digest for path, digest in kept["files"].items()):
        return None
    if any(packages_digest(path) != digest for path, digest in kept["folders"].items()):
        return None
    return msgspec.convert(kept["probed"], Probed)


# asking


def _load(each: Identity, name: str, env: EnvConfig) -> Probed:
    """Load an environment in a process of its own, and keep what it is in the cache."""
    python, env_id, _ = each
    answer, ending = _run(python, {"key": "0", "name": name} | asked(env))
    if answer is None:
        fix = "correct the environment" if python == sys.executable else f"correct the environment, or {section_of(name)}.python={python}"
        return Probed(problem=f"{env_id} cannot be loaded: {ending}", fix=fix)
    found = msgspec.convert(answer["probed"], Probed)
    if found.problem is None:
        kept = {"probed": asdict(found), "files": answer["files"], "folders": answer["folders"]}
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            write_text(_file_of(each), json.dumps(kept))
    return found


def about_of(env: EnvConfig) -> Probed:
    """An environment for people: its arguments, data, rewards and tools. It is loaded in a process of its own, in its own Python."""
    return _load(identity(env), "custom", env)


def _run(python: str, entry: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The answer about an environment, if there is one, and how its process ended, with its last line.

    Everything that the environment started ends with the process: it may hold a port that the run needs.
    """
    print(f"loading the environment {entry['name']}", file=sys.stderr, flush=True)  # which may take long
    environment = inherited(boot.environment(another=python != sys.executable)) | {
        DEVICES: "",
        SUPERVISOR: str(os.getpid()),
        "OMP_NUM_THREADS": "1",
    }
    token = secrets.token_hex(16)
    # Files, no pipes: what the environment has started may hold them open.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as messages, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        try:  # a session of its own has no terminal: an environment that asks for a password gets an error instead of waiting
            process = subprocess.Popen(
                [python, boot.__file__, "probe"],
                env=environment | {TOKEN: token},
                stdin=subprocess.PIPE,
                stdout=messages,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            return None, f"{python} cannot be started here: {error.strerror}"
        try:
            process.communicate(json.dumps({"envs": [entry]}))
        finally:
            kill_all([process.pid], token)
            process.wait()
        messages.seek(0)
        errors.seek(0)
        answers = [answer for answer in map(json.loads, messages) if "loading" not in answer]
        said = [line for line in errors if line.strip()]
    ending = describe_returncode(process.returncode, service=False)
    return next(reversed(answers), None), ending + (f"; its last line: {said[-1].strip()}" if said else "")
