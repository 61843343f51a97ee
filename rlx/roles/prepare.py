"""The prepare role: makes the initial model before a run, or finds it in the cache, and writes its path to `initial_model.txt`.

    hash the recipe → cached? → environments' rows → demonstrations → supervised training → folder in the cache → initial_model.txt

The recipe is everything that determines what the model learns: the `model.warm_start` section; the environments with their arguments,
weights and code; and the code that makes the tokenizer, the demonstrations and the model. If the model is cached, neither torch nor
verifiers is imported.

With `model.gguf` it makes a plain model folder of that file instead. The recipe is then the file's digest.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlx
from rlx.config.chat_format import template_path
from rlx.config.load import load_command
from rlx.config.schema import CommandConfig, Config, EnvConfig, PlayRoot, SftRoot
from rlx.heartbeat import Heartbeat
from rlx.lock import try_lock
from rlx.paths import COMPLETE, RunPaths, cache_root, write_text
from rlx.process import die_with_parent, keep_freed_memory, say_full_disk
from rlx.stacks import answer
from rlx.waiting import wait_for

if TYPE_CHECKING:
    from rlx.envs.answers import Conversation
    from rlx.policy.chat import Chat
    from rlx.types import TrainingSample

log = logging.getLogger("rlx.prepare")
CODE = (
    "models/tiny.py",
    "data/demonstrations.py",
    "data/masks.py",
    "data/supervised.py",
    "train/warm_start.py",
    "envs/answers.py",
    "policy/chat.py",
)
"""Files under `rlx/`; a change in one of them gives another model."""
SAY_EVERY = 10  # optimizer steps between two log lines
LOCK_TIMEOUT = 1800.0  # seconds to wait for another run that makes the same model


def main() -> int:
    """Prepare the initial model of a run. Returns the exit code."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    paths = RunPaths(parser.parse_args().run_dir)
    if paths.initial_model.exists() and (Path(paths.initial_model.read_text().strip()) / COMPLETE).exists():
        log.info("an earlier attempt has prepared %s", paths.initial_model.read_text().strip())
        return 0
    config = load_command(paths.root)
    heartbeat = Heartbeat(paths, "prepare")
    answer(paths, "prepare")
    heartbeat.beat("looking for a cached model")
    model = find_or_make(config, heartbeat)
    write_text(paths.initial_model, f"{model}\n")
    return 0


def find_or_make(config: CommandConfig, heartbeat: Heartbeat) -> Path:
    """The folder of the initial model. If several runs want the same model at once, one makes it and the others wait."""
    what = recipe(config)
    folder = model_folder(config.model.name, what)
    if not (folder / COMPLETE).exists():
        with locked(folder, heartbeat):
            if not (folder / COMPLETE).exists():
                make(config, what, folder, heartbeat)
                return folder
    log.info("the model is cached: %s", folder)
    return folder


def recipe(config: CommandConfig) -> dict[str, Any]:
    """Everything that determines what the model learns, as values for JSON."""
    if config.model.gguf is not None:
        with Path(config.model.gguf).expanduser().open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        return {"gguf": content, "dtype": config.model.dtype, "code": digest([Path(rlx.__path__[0]) / "models/gguf.py"])}
    assert config.model.warm_start is not None, "the plan has this role only for models that rlx makes"
    return {
        "warm_start": dataclasses.asdict(config.model.warm_start),
        "context_length": config.model.context_length,
        "chat_template": config.model.chat_template and digest([template_path(config.model.chat_template)]),
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "envs": {
            name: {"id": env.id, "args": env.args, "weight": env.weight, "code": environment_digest(env.id)}
            for name, env in envs_of(config).items()
        },
        "code": digest([Path(rlx.__path__[0]) / name for name in CODE]),
    }


def envs_of(config: CommandConfig) -> Mapping[str, EnvConfig]:
    """The environments whose examples the model learns first; none before supervised training, whose own rows train it."""
    return config.envs if isinstance(config, PlayRoot) and not isinstance(config, SftRoot) else {}


def model_folder(name: str, what: dict[str, Any]) -> Path:
    """Where the model of a recipe is kept: `models/tiny-0123456789ab` in the cache."""
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    return cache_root().absolute() / "models" / f"{Path(name).name}-{key}"


def environment_digest(environment_id: str) -> str:
    """Digest of the Python files of an environment's module; empty if there is none. The module is not imported."""
    spec = importlib.util.find_spec(environment_id.rpartition("/")[2].replace("-", "_"))
    if spec is None or spec.origin is None:
        return ""
    folders = spec.submodule_search_locations or []
    return digest(sorted(file for folder in folders for file in Path(folder).rglob("*.py")) or [Path(spec.origin)])


def digest(files: Sequence[Path]) -> str:
    """Digest of the files' bytes, in the given order."""
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]


@contextmanager
def locked(folder: Path, heartbeat: Heartbeat) -> Iterator[None]:
    """Hold the lock of a model folder. The kernel releases it if the holder dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (path := folder.with_name(f".{folder.name}.lock")).open("w") as file:
        waiting = "waiting for another run that makes the same model"
        take = partial(try_lock, file.fileno(), path)
        wait_for(take, f"another run that makes {folder}", LOCK_TIMEOUT, poll=0.1, tick=lambda: heartbeat.beat(waiting))
        yield


def make(config: CommandConfig, what: dict[str, Any], folder: Path, heartbeat: Heartbeat) -> None:
    """Make the model and move its complete folder into the cache. The caller holds the lock."""
    for left_behind in [*folder.parent.glob(f".{folder.name}.tmp-*"), folder]:  # of a process that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.tmp-") as name:
        unfinished = Path(name) / "model"
        if config.model.gguf is not None:
            from rlx.models.gguf import convert

            with heartbeat.during(f"reading {config.model.gguf}"):
                convert(Path(config.model.gguf).expanduser(), unfinished, config.model.dtype)
        else:
            train(config, unfinished, heartbeat)
        write_text(unfinished / COMPLETE, json.dumps(what, indent=1))
        os.replace(unfinished, folder)
    log.info("the model is made: %s", folder)


def train(config: CommandConfig, folder: Path, heartbeat: Heartbeat) -> None:
    """Train the tiny model on the environments' examples and save it in `folder`."""
    assert config.model.warm_start is not None
    settings = replace(config.model.warm_start, steps=config.model.warm_start.steps * len(envs_of(config)))

    heartbeat.beat("loading environments")
    examples = examples_of(config)
    heartbeat.beat("importing torch")
    keep_freed_memory()
    from rlx.data.conversations import RowError
    from rlx.models import tiny
    from rlx.policy.chat import load_chat
    from rlx.policy.templates import read_template, refusal
    from rlx.train.warm_start import warm_start

    tokenizer = tiny.build_tokenizer(config.model.context_length, settings.tool_calls)
    if config.model.chat_template is not None:
        tokenizer.chat_template = read_template(config.model.chat_template)
    chat = load_chat(tokenizer, config.model)
    if text := refusal(config.model.name, chat, {name: tools_of(conversations) for name, conversations in examples.items()}):
        raise ValueError(text)
    demonstrations = []
    for name, conversations in examples.items():
        try:
            said = samples_of(name, conversations, chat)
        except RowError as error:
            raise ValueError(f"envs.{name}: a demonstration cannot be trained on: {error}") from error
        short = [sample for sample in said if len(sample.token_ids) <= config.model.context_length]
        if not short:
            shortest = min(len(sample.token_ids) for sample in said)
            raise ValueError(
                f"envs.{name}: the shortest of {len(said)} demonstrations has {shortest} tokens, more than "
                f"model.context_length={config.model.context_length}; raise model.context_length"
            )
        log.info("%s: %d demonstrations; skipped %d that are too long", name, len(short), len(said) - len(short))
        demonstrations += short

    phase = "warm start"

    def report(step: int, loss: float) -> None:
        nonlocal phase
        if step % SAY_EVERY == 0 or step in (1, settings.steps):
            phase = f"warm start {step}/{settings.steps} loss {loss:.2f}"
            log.info(phase)
        heartbeat.beat(phase, step)

    if demonstrations:
        model = warm_start(settings, demonstrations, config.model.context_length, report)
    else:
        model = tiny.build_model(settings, config.model.context_length)  # of `rlx sft`: its own rows train it
    tiny.save(model, tokenizer, folder)


def samples_of(env: str, conversations: Sequence[Conversation], chat: Chat) -> list[TrainingSample]:
    """The samples of an environment's conversations, marked as `rlx sft` marks its rows. Raises RowError."""
    from rlx.data.conversations import Conversation as Messages
    from rlx.data.masks import mark, to_sample

    said = [Messages(messages=[*c.prompt, *c.played], first=len(c.prompt), tools=c.tools) for c in conversations]
    return [to_sample(part, env=env) for conversation in said for part in mark(conversation, chat)]


def tools_of(conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    """The functions that the conversations of an environment offer, each once."""
    return list({tool["function"]["name"]: tool for conversation in conversations for tool in conversation.tools or ()}.values())


def examples_of(config: CommandConfig) -> dict[str, list[Conversation]]:
    """What a teacher says, by environment. Each environment gets its share of `num_examples`."""
    if not isinstance(config, PlayRoot) or not envs_of(config):
        return {}
    from rlx.data.demonstrations import choose, counts_by_weight
    from rlx.envs.answers import answer_text, conversations
    from rlx.envs.kinds import kind_of
    from rlx.envs.load import load_one, settings_of

    settings = config.model.warm_start
    assert settings is not None
    counts = counts_by_weight(settings.num_examples, {name: env.weight for name, env in envs_of(config).items()})
    found = {}
    for name, env in envs_of(config).items():
        if counts[name] == 0:
            continue
        trained = env if isinstance(config, Config) else replace(env, split="train")  # the model is the same for every command
        environment = load_one(name, trained, settings_of(config, env))
        if kind_of(env.id) == "v1" and all(answer_text(environment, row) is None for row in environment.rows):
            raise ValueError(
                f"envs.{name}: the warm start (model.warm_start) learns from answers, and no task of the v1 taskset {env.id} has a field "
                "`answer` with a text; choose a model that is trained already"
            )
        rows = choose(environment.rows, counts[name], settings.seed)
        found[name] = conversations(environment, rows, settings.teacher_error, settings.seed)
    return found


if __name__ == "__main__":
    sys.exit(say_full_disk(main))
