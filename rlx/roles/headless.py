"""The headless role: some engines of a server whose head is elsewhere (`hardware.data_parallel_local`).

    import vLLM → join the head → wait for the initial model → start the engines → keep them until told to stop, or until one is gone

It has no address of its own: requests and orders come from the head's vLLM. If it ends, the head ends, and the other way round.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from rlx.config.load import load_play
from rlx.config.schema import PlayRoot
from rlx.heartbeat import SERVING, WAITING_FOR_MODEL, Heartbeat, wait_for_model
from rlx.inference.server.arguments import engine_arguments, environment
from rlx.inference.server.parts import Part, meeting_file
from rlx.parallel.rendezvous import TOKEN
from rlx.paths import RunPaths
from rlx.process import die_with_parent, end_at_once, host_name, importing
from rlx.stacks import answer
from rlx.waiting import WaitTimeout
from rlx.weights.hub import fetch

log = logging.getLogger("rlx.headless")
LOOK = 0.5  # seconds between two looks at the engines
HEAD_GONE = 1.0  # seconds in which the engines' failure may turn out to be the head's: they end if others do


def main() -> int:
    """Keep the engines. Returns the exit code: 1 if an engine or the head is gone, 143 or 130 after a signal to stop."""
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)  # vLLM's engine processes
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))  # the engines die with this process
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    options = parser.parse_args()
    paths, config = RunPaths(options.run_dir), load_play(options.run_dir)
    others = config.hardware.parts_of_server - 1
    if others == 0:
        print("hardware.data_parallel_local leaves no engine for another process", file=sys.stderr)
        return 1
    replica, part = options.replica // others, options.replica % others + 1
    heartbeat = Heartbeat(paths, f"headless_{options.replica}")
    answer(paths, heartbeat.name)

    heartbeat.beat("importing vLLM")
    os.environ |= environment(config, os.environ)
    with importing():
        import rlx.inference.server.start  # noqa: F401  (the heavy imports)

    waiting, patience = f"waiting for inference_{replica}", config.inference.startup_timeout
    name = f"{heartbeat.name} on {host_name()}"
    try:
        head = Part.join(meeting_file(paths, replica), part, name, os.environ.get(TOKEN, ""), patience, lambda: heartbeat.beat(waiting))
    except WaitTimeout as error:
        print(error, file=sys.stderr)
        return 1
    model = wait_for_model(paths, patience, lambda: heartbeat.beat(WAITING_FOR_MODEL))
    return keep(config, replica, part, fetch(model, heartbeat), head, heartbeat)


def keep(config: PlayRoot, replica: int, part: int, model: Path, head: Part, heartbeat: Heartbeat) -> int:
    """Start the engines and watch them. Returns the exit code, after the reason was printed and told to the head."""
    from rlx.inference.server.start import headless_engines

    arguments = engine_arguments(config, str(model), replica, head.meeting, part)
    engines = headless_engines(arguments, cpu=config.hardware.device == "cpu")
    gone: list[str] = []
    head.lost = gone.append
    loading, began = f"loading {model}", time.monotonic()
    while not (gone or engines.finished_procs()):
        if head.serving:
            heartbeat.beat(SERVING)
        elif time.monotonic() - began < config.inference.startup_timeout:
            heartbeat.beat(loading)
        time.sleep(LOOK)
    since = time.monotonic()
    while not gone and time.monotonic() - since < HEAD_GONE:
        time.sleep(LOOK)
    ended = ", ".join(f"{name} (exit code {code})" for name, code in engines.finished_procs().items())
    why = gone[0] if gone else f"its engine process ended: {ended}; its own message is in the log of {heartbeat.name}"
    head.leave(why)
    print(why, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    end_at_once(main)
elif __name__ == "__mp_main__":  # an engine process that vLLM spawned because it could not fork
    from rlx.inference.server.rendezvous import leave_no_files

    die_with_parent()
    leave_no_files()
