"""Loads the environments of a configuration in a process of its own and says what they are, before a run starts anything.

    python -m rlx.envs.probe < {"envs": [{"key": "0", "name": "math", "id": "rlx-math", "args": {}, "split": "train"}]}

answers on its standard output, one JSON object a line: `{"loading": "0"}`, then `{"key": "0", "probed": {…}, "files": {…}, "folders": {…}}`
with the fields of `Probed`, and what the answer depends on. Everything that an environment prints goes to the standard error.
The caller is `rlx.preflight.probes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rlx.config.evaluated import section_of
from rlx.config.pythons import shipped, sources_of
from rlx.config.schema import EnvConfig
from rlx.config.signatures import module_of
from rlx.envs.errors import chain, in_one_line
from rlx.envs.kinds import kind_of
from rlx.envs.load import load_one
from rlx.envs.probed import FIELDS, Probed, file_digest, packages_digest
from rlx.envs.wire import Settings
from rlx.plain import CodecError, to_json
from rlx.process import die_with_parent

LOOKED_AT = 64  # examples whose prompts are measured
MOST_FILES = 1000  # of an environment's package that a digest covers
WRAPPED = ("Could not import", "Failed to load environment")  # how verifiers begins an error around the package's own


def probe(name: str, config: EnvConfig) -> Probed:
    """Load one environment and look at it. Never raises because of the environment. Call it on the main thread."""
    began = time.monotonic()
    try:
        kind = kind_of(config.id)
        env = load_one(name, config, Settings(timeout=60.0))
        seconds = time.monotonic() - began
        rows = env.rows
        if len(rows) == 0:
            return Probed(problem=f"{config.id} has no examples", fix=f"check {section_of(name)}.args, or the environment's data")
        first = dict(rows[0])
        to_json(first)
        try_first(env, first)
        return Probed(
            kind=f"{kind} in {box}" if (box := getattr(env, "sandbox", "")) else kind,
            examples=len(rows),
            tools=_tools_of(env),
            scores_groups=env.scores_groups,
            prompt_chars=min(_chars(rows[place].get("prompt")) for place in range(min(len(rows), LOOKED_AT))),
            seconds=round(seconds, 3),
        )
    except CodecError as error:
        return Probed(problem=f"a checkpoint cannot hold the examples of {config.id}. The first: {error}", fix="change the environment")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return why(name, config.id, error)


def try_first(env: Any, row: dict[str, Any]) -> None:
    """Let a classic environment read its first example, as at the begin of an episode; start a v1 environment's servers once.

    Raises verifiers' refusal.
    """
    if (rehearse := getattr(env, "rehearse", None)) is not None:
        rehearse()
        return
    from rlx.envs.verifiers_client import EpisodeClient
    from rlx.envs.verifiers_group import routed

    player, own = routed(env.env, row)
    asyncio.run(player.init_state(own, EpisodeClient(None), "policy", {}))  # type: ignore[arg-type]


def _chars(prompt: Any) -> int:
    """Characters of a prompt: a `str`, or the texts of messages."""
    if isinstance(prompt, str):
        return len(prompt)
    contents = [message.get("content") for message in prompt or () if isinstance(message, Mapping)]
    return sum(len(content) for content in contents if isinstance(content, str))


def _tools_of(env: Any) -> tuple[str, ...]:
    return tuple(str(tool["function"]["name"]) for tool in env.tools)


def why(name: str, env_id: str, error: BaseException) -> Probed:
    """The problem that an exception shows, in the package's own words."""
    inner = next((each for each in chain(error) if not str(each).startswith(WRAPPED)), error)
    text = in_one_line(inner, sources_of(env_id))
    module = module_of(env_id)
    if isinstance(inner, ImportError):
        if inner.name == module:
            what, fix = f"{env_id} is not installed: there is no module {module}", "rlx env install FOLDER|PACKAGE"
        elif inner.name == "verifiers":
            what = f"{env_id} needs verifiers, and this Python ({sys.executable}) has none"
            fix = f"rlx env install {'rlx' if shipped(module) else env_id}"
        else:
            what = f"{env_id} is installed, but something that it imports is not: {text}"
            fix = f"install what is missing into this Python ({sys.executable})"
        return Probed(problem=what, fix=fix)
    if isinstance(inner, KeyError) and (columns := _columns(inner)):
        text += f". Its data set has the columns {', '.join(columns)}; verifiers reads `prompt`, or makes it from `question`"
    correct = f"correct {section_of(name)}.args, or the environment"
    if isinstance(inner, ValueError | RuntimeError) and str(inner).startswith(f"envs.{name}: "):  # a sentence of our own
        fix = "change what it names, or choose another environment" if isinstance(inner, ValueError) else correct
        return Probed(problem=str(inner).removeprefix(f"envs.{name}: ").rstrip("."), fix=fix)
    return Probed(problem=f"loading {env_id} failed: {text}", fix=correct)


def _columns(error: KeyError) -> list[str]:
    """The columns of the data set in which a column was looked for: that of the innermost frame which has one; empty if none has."""
    found: list[str] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "os":
            return []  # what is missing is a variable of the environment
        for value in frame.f_locals.values():
            if type(value).__module__ == "datasets.arrow_dataset" and type(value).__name__ == "Dataset":
                found = [column for column in value.column_names if column != "example_id"]  # verifiers adds it
    return found


# what an answer depends on


def files_of(env_id: str) -> dict[str, str]:
    """Digests of the files that an answer depends on: the environment's package, and imported modules that are not installed packages."""
    installed = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), f"{sys.base_prefix}/lib")
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    found = {file for file in loaded if isinstance(file, str) and not file.startswith(installed)}
    sources = sources_of(env_id)
    if sources is not None:
        found |= {str(path) for path in _below(sources)}
    return {file: file_digest(file) for file in sorted(found)[: 2 * MOST_FILES]}


def _below(sources: Path) -> Iterable[Path]:
    if not sources.is_dir():
        return [sources]
    files = (path for path in sorted(sources.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [path for _, path in zip(range(MOST_FILES), files, strict=False)]


def config_of(entry: Mapping[str, Any]) -> EnvConfig:
    """The configuration that an entry of a request has."""
    return msgspec.convert({key: entry[key] for key in FIELDS if key in entry}, EnvConfig)


def answer(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one entry of a request."""
    probed = probe(entry["name"], config_of(entry))
    folders = {path: packages_digest(path) for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}}
    return {"key": entry["key"], "probed": asdict(probed), "files": files_of(entry["id"]), "folders": folders}


def answer_requests(answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Answer the request on the standard input, one entry after the other, and end the process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for entry in request["envs"]:
        print(json.dumps({"loading": entry["key"]}), file=answers, flush=True)
        print(json.dumps(answer(entry)), file=answers, flush=True)
    os._exit(0)  # threads of an environment must not keep the process alive


def main() -> None:
    """Answer the request on the standard input."""
    answer_requests(answer)


if __name__ == "__main__":
    main()
