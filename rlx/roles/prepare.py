"""The prepare role: makes the initial model before a run, or finds it in the cache, and writes its path to `initial_model.txt`.

    hash the recipe → cached? → environments' rows → demonstrations → `rlx sft` → folder in the cache → initial_model.txt

The warm start is a run of `rlx sft` in a temporary directory: its configuration (`rlx.config.warm_start`) and its trainer. The recipe
is everything that determines what the model learns (`rlx.train.warm_start`). If the model is cached, neither torch nor verifiers is
imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.load import load_command, to_yaml
from rlx.config.schema import CommandConfig, PlayRoot
from rlx.config.warm_start import supervised
from rlx.heartbeat import AtWork, Heartbeat
from rlx.lock import FileLock
from rlx.metrics import read_metrics
from rlx.paths import COMPLETE, RunPaths, listed_with_folder, write_text
from rlx.polling import wait_for
from rlx.process import die_with_parent
from rlx.stack_dump import answer
from rlx.train.warm_start import envs_of, model_folder, recipe

if TYPE_CHECKING:
    from rlx.envs.demonstrations import DemoConversation
    from rlx.policy.chat import Chat

log = logging.getLogger("rlx.prepare")
SAY_EVERY = 10  # optimizer steps between two log lines
FOLLOW = 0.1  # seconds between two looks at the trainer of the warm start
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
    if not listed_with_folder(folder / COMPLETE):
        with locked(folder, heartbeat) as alone:
            if not listed_with_folder(folder / COMPLETE):
                make(config, what, folder, heartbeat, alone=alone)
                return folder
    log.info("the model is cached: %s", folder)
    return folder


@contextmanager
def locked(folder: Path, heartbeat: Heartbeat) -> Iterator[bool]:
    """Hold the lock of a model folder. The kernel releases it if the holder dies. Yields whether it also keeps other hosts out."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(FileLock(folder.with_name(f".{folder.name}.lock"))) as lock:
        waiting = "waiting for another run that makes the same model"
        wait_for(lock.exclusive, f"another run that makes {folder}", LOCK_TIMEOUT, poll=0.1, tick=lambda: heartbeat.beat(waiting))
        yield lock.sees_other_hosts


def make(config: CommandConfig, what: dict[str, Any], folder: Path, heartbeat: Heartbeat, *, alone: bool = True) -> None:
    """Make the model and move its complete folder into the cache. The caller holds the lock.

    If it is not `alone`, on a file system without locks, another host may make the same model meanwhile. The first one stays.
    """
    for left_behind in folder.parent.glob(f".{folder.name}.tmp-*") if alone else ():  # of a process that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    if not listed_with_folder(folder / COMPLETE):
        shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.tmp-") as name:
        unfinished = Path(name) / "model"
        train(config, unfinished, heartbeat)
        write_text(unfinished / COMPLETE, json.dumps(what, indent=1))
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not listed_with_folder(folder / COMPLETE):
                raise
    log.info("the model is made: %s", folder)


def train(config: CommandConfig, folder: Path, heartbeat: Heartbeat) -> None:
    """Make the tiny model in `folder`: random weights, which `rlx sft` trains on the environments' examples if there are any.

    The trainer role runs in the directory of such a run, as a process of this one. It loads its libraries while rows are made here.
    """
    run, paths = RunPaths(folder.with_name("sft")), heartbeat.paths
    if not (envs := envs_of(config)):
        build(config, {}, folder, heartbeat)
        return
    assert isinstance(config, PlayRoot)
    rows = run.root / "demonstrations.jsonl"
    cfg = supervised(config, rows, run.root, len(envs))
    write_text(run.config, to_yaml(cfg))
    with started([sys.executable, "-m", "rlx.roles.trainer", "--run-dir", str(run.root)]) as trainer:
        from rlx.envs.demonstrations import demonstrations_of
        from rlx.envs.pool import FIRST_LOAD

        initial = run.root / "initial"
        loading, limit = "loading environments", FIRST_LOAD * len(envs)
        # The trainer looks for this process in its own run, and waits as long as it is at work.
        with heartbeat.during(loading, limit=limit), Heartbeat(run, "prepare").during(loading, limit=limit):
            examples = demonstrations_of(config, envs)
        said = build(config, examples, initial, heartbeat)
        if config.started_servers:  # they start meanwhile, and get the trained weights when these are there
            shutil.copytree(initial, paths.untrained_model.with_suffix(".writing"), dirs_exist_ok=True)
            paths.untrained_model.with_suffix(".writing").rename(paths.untrained_model)
        write_text(rows, "".join(json.dumps(conversation.row) + "\n" for conversation in said))
        write_text(run.initial_model, f"{initial}\n")
        follow(trainer, run, cfg.max_steps, heartbeat)
    os.replace(run.weights_of(cfg.max_steps), folder)


def build(
    config: CommandConfig, examples: Mapping[str, list[DemoConversation]], folder: Path, heartbeat: Heartbeat
) -> list[DemoConversation]:
    """Write the tiny model with random weights. Returns the examples that it can learn.

    Raises ValueError if it could learn none of an environment.
    """
    heartbeat.beat("importing torch")
    from rlx.models import tiny
    from rlx.policy.chat import load_chat
    from rlx.policy.templates import read_template, refusal

    settings, length = config.model.warm_start, config.model.context_length
    assert settings is not None
    tokenizer = tiny.build_tokenizer(length, settings.tool_calls)
    if config.model.chat_template is not None:
        tokenizer.chat_template = read_template(config.model.chat_template)
    keeps = isinstance(config, PlayRoot) and config.orchestrator.trajectory_strategy == "interleaved"
    chat = load_chat(tokenizer, config.model, keeps_tokens=keeps)
    if text := refusal(config.model.name, chat, {name: tools_of(conversations) for name, conversations in examples.items()}):
        raise ValueError(text)
    learned = [conversation for name, conversations in examples.items() for conversation in fitting(name, conversations, chat, length)]
    tiny.save(tiny.build_model(settings, length), tokenizer, folder)
    return learned


def fitting(env: str, conversations: Sequence[DemoConversation], chat: Chat, length: int) -> list[DemoConversation]:
    """The demonstrations of an environment of which a sample fits into `length` tokens.

    Raises ValueError if none is so short, or if one cannot be trained on.
    """
    from rlx.data.conversations import Conversation as Messages
    from rlx.data.conversations import RowError
    from rlx.data.masks import mark

    shortest, kept = sys.maxsize, []
    for c in conversations:
        try:
            parts = mark(Messages(messages=[*c.prompt, *c.played], first=len(c.prompt), tools=c.tools), chat)
        except RowError as error:
            raise ValueError(f"envs.{env}: a demonstration cannot be trained on: {error}") from error
        shortest = min(shortest, here := min(map(len, parts)))
        if here <= length:  # the trainer leaves out its other samples
            kept.append(c)
    if kept:
        if left_out := len(conversations) - len(kept):
            log.info("%s: %d demonstrations; left out %d that are too long", env, len(kept), left_out)
        return kept
    raise ValueError(
        f"envs.{env}: the shortest of {len(conversations)} demonstrations has {shortest} tokens, more than "
        f"model.context_length={length}; raise model.context_length"
    )


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this block."""
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def follow(trainer: subprocess.Popen[bytes], run: RunPaths, steps: int, heartbeat: Heartbeat) -> None:
    """Report the trainer's steps and heartbeats as this process's own until it has ended. Exits with its code if it failed."""
    working = AtWork(run, "trainer")
    phase, step, read = "starting the warm start", 0, 0
    heartbeat.beat(phase, step)
    while True:
        code = trainer.poll()
        for record, after in read_metrics(run.metrics, read):
            step, read = record["step"] + 1, after
            if step % SAY_EVERY == 0 or step in (1, steps):
                phase = f"warm start {step}/{steps} loss {record['loss/nll']:.2f}"
                log.info(phase)
        if working():  # a hung trainer makes this process silent, so `launcher.heartbeat_timeout` bounds both
            heartbeat.beat(phase, step)
        if code is not None:
            break
        time.sleep(FOLLOW)
    if code != 0:
        log.error("the trainer of the warm start ended with code %d; its output is above, its keys are in model.warm_start", code)
        sys.exit(max(code, 1))


def tools_of(conversations: Sequence[DemoConversation]) -> list[dict[str, Any]]:
    """The functions that the conversations of an environment offer, each once."""
    return list({tool["function"]["name"]: tool for conversation in conversations for tool in conversation.tools or ()}.values())


if __name__ == "__main__":
    sys.exit(main())
