"""Loads the environments of a configuration in a process of its own and says what they are, before a run starts anything.

    PYTHON rlx/envs/boot.py probe < {"envs": [{"key": "0", "name": "math", "id": "rlx-math", "args": {}, "split": "train"}]}

answers on its standard output, one JSON object a line: `{"loading": "0"}`, then `{"key": "0", "probed": {…}, "files": {…}, "folders": {…}}`
with the fields of `Probed`, and what the answer depends on. Everything that an environment prints goes to the standard error.
The caller is `rlx.preflight.env_probe`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from rlx.config.eval_envs import section_of
from rlx.config.pythons import sources_of
from rlx.config.schema import EnvConfig
from rlx.config.signatures import OWN_KINDS, module_of
from rlx.envs import describe
from rlx.envs.errors import in_one_line
from rlx.envs.kinds import kind_of, load_one
from rlx.envs.probe_cache import FIELDS, Probed, file_digest, packages_digest
from rlx.envs.wire import Settings
from rlx.json_values import CodecError, to_json
from rlx.process import die_with_parent

LOOKED_AT = 64  # examples whose prompts are measured
MOST_FILES = 2000  # that an answer depends on


def probe(name: str, config: EnvConfig) -> Probed:
    """Load one environment and look at it. Never raises because of the environment. Call it on the main thread."""
    found: dict[str, Any] = {}
    began = time.monotonic()
    try:
        kind = kind_of(config.id)
        found = {"kind": kind, **describe.source(config.id, kind)}
        if config.id in OWN_KINDS and not config.args:
            return Probed(**found)  # described, and not to be played
        env: Any = load_one(name, config, Settings(timeout=60.0))
        found["seconds"] = round(time.monotonic() - began, 3)
        if len(env.rows) == 0:
            return Probed(**found, problem=f"{config.id} has no examples", fix=f"check {section_of(name)}.args, or the environment's data")
        to_json(dict(env.rows[0]))
        env.rehearse()
        found |= describe.loaded(kind, env)
        found["kind"] = f"{kind} in {box}" if (box := getattr(env, "sandbox", "")) else kind
        found["prompt_chars"] = min(_chars(env.rows[place].get("prompt")) for place in range(min(len(env.rows), LOOKED_AT)))
        return Probed(**found)
    except CodecError as error:
        problem = f"a checkpoint cannot hold the examples of {config.id}. The first: {error}"
        return Probed(**found, problem=problem, fix="change the environment")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem, fix = why(name, config.id, error)
        return Probed(**found, problem=problem, fix=fix)


def _chars(prompt: Any) -> int:
    """Characters of a prompt: a `str`, or the texts of messages."""
    if isinstance(prompt, str):
        return len(prompt)
    contents = [message.get("content") for message in prompt or () if isinstance(message, Mapping)]
    return sum(len(content) for content in contents if isinstance(content, str))


def why(name: str, env_id: str, error: BaseException) -> tuple[str, str]:
    """The problem that an exception shows (a sentence of our own, or its causes with the line of the environment's code), and its fix."""
    own, module = f"envs.{name}", module_of(env_id)
    fix = f"correct {section_of(name)}.args, or the environment"
    if isinstance(error, ImportError) and error.name == module:
        return f"{env_id} is not installed: there is no module {module}", "rlx env install FOLDER|PACKAGE"
    if str(error).startswith(own):
        return str(error).removeprefix(f"{own}: ").rstrip("."), fix
    return f"loading {env_id} failed: {in_one_line(error, sources_of(env_id))}", fix


# what an answer depends on


def files_of(env_id: str) -> dict[str, str]:
    """Digests of the files that an answer depends on: the environment's package, and imported modules that are not installed packages."""
    installed = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), f"{sys.base_prefix}/lib")
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    found = {file for file in loaded if isinstance(file, str) and not file.startswith(installed)}
    if (sources := sources_of(env_id)) is not None:
        below = sources.rglob("*") if sources.is_dir() else [sources]
        found |= {str(path) for path in below if path.is_file() and "__pycache__" not in path.parts}
    return {file: file_digest(file) for file in sorted(found)[:MOST_FILES]}


def answer(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one entry of a request."""
    config = msgspec.convert({key: entry[key] for key in FIELDS if key in entry}, EnvConfig)
    probed = probe(entry["name"], config)
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
