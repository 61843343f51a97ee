"""The process of a role that plays environments, around the role's own work: how it begins, what it loads, how it is stopped and ends.

Its work is one asyncio loop, which SIGTERM and SIGINT cancel.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from rlx.config.schema import PlayRoot
from rlx.envs.base import Local
from rlx.envs.load import check_chat, load_environments, load_tokenizer, wait_loaded
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.policy.chat import Chat
from rlx.polling import LEFT, Preempted
from rlx.process import die_with_parent, end_at_once, keep_event_loop_free, set_cpu_threads, sigterm_is_a_notice
from rlx.stack_dump import answer

C = TypeVar("C", bound=PlayRoot)


def begin(name: str, doc: str | None, read: Callable[[Path], C]) -> tuple[C, RunPaths, Heartbeat]:
    """Set up the process of the role `name`, whose command line is `--run-dir DIR`. A signal to stop ends the process at once.

    `read`: reads the configuration of the run directory.
    """
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)  # otherwise a line for every request
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    config, paths = read(run_dir), RunPaths(run_dir)
    set_cpu_threads(config.hardware.cpu_threads)
    heartbeat = Heartbeat(paths, name)
    answer(paths, name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))  # before the loop runs there is nothing to clean up
    return config, paths, heartbeat


def load(config: PlayRoot, paths: RunPaths, heartbeat: Heartbeat, *, endpoint: bool = False) -> tuple[dict[str, Local], Chat | None]:
    """The environments, and the chat format of the run's model; None if an `endpoint` plays, which has its own.

    Raises ValueError if the chat format loses the tools of an environment, and what loading an environment raises.
    """
    envs = load_environments(config, heartbeat.beat, paths.latest_logs)
    chat = None if endpoint else load_tokenizer(config, paths, heartbeat.beat)
    wait_loaded(envs, heartbeat.beat)
    if chat is not None:
        check_chat(envs, config, chat)
    heartbeat.beat("reading the data sets")
    return envs, chat


def run_until_stopped(work: Coroutine[Any, Any, None], paths: RunPaths) -> int:
    """Run the role's work in an event loop, to its end or until a signal cancels it. Returns the exit code; raises the work's error."""
    keep_event_loop_free()
    stopped: list[int] = []

    async def stoppable() -> None:
        running = asyncio.ensure_future(work)

        def stop(number: int) -> None:
            if number == signal.SIGTERM and sigterm_is_a_notice():
                paths.ask_to_give_way()
            else:
                stopped.append(number)
                running.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await running

    try:
        uvloop.run(stoppable())
    except asyncio.CancelledError:
        return 128 + stopped[0] if stopped else 1
    except Preempted:
        return LEFT
    return 0


def end(main: Callable[[], int], name: str, plain: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Run the role's `main` and end the process with its exit code; 1 after an error, which is then the last line of the log.

    `plain`: errors whose message says it all, so no traceback is logged.
    """

    def said() -> int:
        try:
            return main()
        except Exception as error:
            if isinstance(error, plain):
                print(error, file=sys.stderr)
            else:
                logging.getLogger(f"rlx.{name}").exception("the %s failed", name)
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1

    end_at_once(said)
