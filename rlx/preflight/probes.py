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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rlx.config.errors import ConfigError
from rlx.config.evaluated import environments, section_of
from rlx.config.pythons import python_of, sources_of
from rlx.config.schema import CommandConfig, EnvConfig, PlayRoot, TrainingRoot
from rlx.descendants import TOKEN, kill_all
from rlx.envs import boot
from rlx.envs.probed import FIELDS, About, Probed, about_from_json, file_digest, packages_digest
from rlx.launch.bound import bound
from rlx.paths import cache_root, write_text
from rlx.plan.environment import DEVICES, inherited
from rlx.process import SUPERVISOR
from rlx.runs.status import describe_returncode

PATIENCE = 5.0  # seconds after which the user is told what is being loaded
SCHEMA = 3  # changes when the meaning of a kept answer changes

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
    known = {each: found for each in wanted if not anew and (found := _kept(each)) is not None}
    by_python: dict[str, list[Identity]] = {}
    for each in wanted:
        if each not in known:
            by_python.setdefault(each[0], []).append(each)
    for python, missing in by_python.items():
        known |= _ask(python, {each: wanted[each] for each in missing})
    problems = [
        f"{section_of(name)}: {probed.problem}.\n  fix: {_offline()}{probed.fix}; launcher.check_envs=false starts without this check"
        for each, (name, _) in wanted.items()
        if (probed := known[each]).problem is not None
    ]
    problems += [problem for cfg in configs for problem in _too_long(cfg, known)]
    if problems:
        raise ConfigError(problems)
    return [{name: known[identity(env)] for name, env in _looked_at(cfg).items()} for cfg in configs]


def _offline() -> str:
    """What to do first if the hub is not asked."""
    return "if it lacks data of the hub, rlx fetch, where there is internet; " if os.environ.get("HF_HUB_OFFLINE") == "1" else ""


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
    if not isinstance(cfg, CommandConfig) or (isinstance(cfg, TrainingRoot) and not (isinstance(cfg, PlayRoot) and cfg.plays)):
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
    return _probed(kept["probed"])


def _probed(fields: Mapping[str, Any]) -> Probed:
    return Probed(**{**fields, "tools": tuple(fields["tools"])})


# asking


def _ask(python: str, wanted: Mapping[Identity, tuple[str, EnvConfig]]) -> dict[Identity, Probed]:
    """Load environments in one process of that Python. If an environment ends the process, another one loads the rest."""
    found: dict[Identity, Probed] = {}
    left = list(wanted)
    while left:
        named = {str(number): each for number, each in enumerate(left)}
        entries = [{"key": key, "name": wanted[each][0]} | asked(wanted[each][1]) for key, each in named.items()]
        answers, loading, ending = _run(python, entries)
        for key, answer in answers.items():
            each = named[key]
            found[each] = _probed(answer["probed"])
            if found[each].problem is None:
                kept = {"probed": asdict(found[each]), "files": answer["files"], "folders": answer["folders"]}
                with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
                    write_text(_file_of(each), json.dumps(kept))
        if len(answers) < len(left):
            each = named[loading] if loading is not None else left[0]
            if loading is not None or python == sys.executable:
                found[each] = Probed(problem=f"loading {each[1]} ended its process: {ending}", fix="correct the environment")
            else:
                key = f"{section_of(wanted[each][0])}.python"
                found[each] = Probed(problem=f"{each[1]} cannot be loaded: {ending}", fix=f"correct {key}={python}")
        left = [each for each in left if each not in found]
    return found


def about_of(env: EnvConfig) -> About:
    """An environment for people: its arguments, data, rewards and tools. It is loaded in a process of its own, in its own Python."""
    python = identity(env)[0]
    entry = {"key": "0", "name": "custom"} | asked(env)
    answers, _, ending = _run(python, [entry], "about")
    if "0" in answers:
        return about_from_json(answers["0"]["about"])
    return About(problem=f"loading {env.id} with {python} failed: {ending}", fix="correct the environment, or that Python")


def _run(python: str, entries: list[dict[str, Any]], module: str = "probe") -> tuple[dict[str, Any], str | None, str]:
    """Answers by key, the key that was being loaded at the end, and how the process ended, with its last line.

    Everything that the environments started ends with the process: it may hold the pipe of the answers, or a port that the run needs.
    """
    environment = inherited(boot.environment(another=python != sys.executable)) | {
        DEVICES: "",
        SUPERVISOR: str(os.getpid()),
        "OMP_NUM_THREADS": "1",
    }
    token = secrets.token_hex(16)
    answers: dict[str, Any] = {}
    loading: str | None = None
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                bound([python, boot.__file__, module], environment),
                env=environment | {TOKEN: token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # no terminal: an environment that asks for a password gets an error instead of waiting
            )
        except OSError as error:
            return {}, None, f"{python} cannot be started here: {error.strerror}"
        assert process.stdin is not None
        assert process.stdout is not None
        reaper = threading.Thread(target=_end_leftovers, args=(process.pid, token), daemon=True)
        reaper.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already; its last line says why
                try:
                    process.stdin.write(json.dumps({"envs": entries}))
                finally:
                    process.stdin.close()
            names = {entry["key"]: entry["name"] for entry in entries}
            with _Patience() as patience:
                for line in process.stdout:
                    message = json.loads(line)
                    if "loading" in message:
                        loading, patience.what = message["loading"], f"loading the environment {names[message['loading']]}"
                    else:
                        answers[message["key"]] = message
                reaper.join()
        finally:
            kill_all([process.pid], token)
            reaper.join()  # before `wait`: until then no other process can have this number
            process.wait()
            process.stdout.close()
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    ending = describe_returncode(process.returncode, service=False)
    return answers, loading if loading not in answers else None, ending + (f"; its last line: {said[-1].strip()}" if said else "")


def _end_leftovers(pid: int, token: str) -> None:
    """Wait until a child has ended, without reaping it, and kill what it has started: its session, and what carries the token."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kill_all([pid], token)


class _Patience:
    """Says what takes long, every `PATIENCE` seconds."""

    def __init__(self) -> None:
        self.what = "importing verifiers"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say, daemon=True)

    def __enter__(self) -> _Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _say(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(PATIENCE):
            print(f"still {self.what}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
