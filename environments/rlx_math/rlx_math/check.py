"""The process that compares answers with math-verify. `rlx_math.checker` starts it as a script.

    stdin: number TAB [reply, answer] as JSON, a line each → a forked child compares → stdout: number TAB true, false, null or "late"

It runs apart from the environment, because math-verify has no limit of its own outside a main thread, and `9^{9^9}` takes for ever.
Each comparison is a child with a limit of memory and of CPU time, which does not depend on what else runs; beyond them it says null. The
kernel keeps both, also while C code runs. A child that gets no CPU or is killed says nothing about the two expressions: "late".
Comparisons run beside each other, so a slow one holds up no other.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import select
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space
WALL = 60  # limit of wall-clock time, in multiples of the CPU time


def equal(reply: str, answer: str) -> bool:
    """Whether math-verify takes two LaTeX expressions for the same value. An expression that it cannot read is equal to nothing."""
    from math_verify import parse, verify

    sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, reply)]
    return all(sides) and verify(sides[0], sides[1], timeout_seconds=None)


def compare(reply: str, answer: str, limit: float) -> tuple[int, int]:
    """Start a comparison. Returns the child's process id and a pipe that gets `true` or `false`, or ends without either."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        return pid, read
    try:
        signal.setitimer(signal.ITIMER_PROF, limit)  # the default action of both alarms ends the process
        signal.setitimer(signal.ITIMER_REAL, WALL * limit)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.write(write, json.dumps(equal(reply, answer)).encode())
    finally:
        os._exit(0)  # an exception (no memory, too deep) leaves the pipe empty


def main() -> None:
    limit, most = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of standard input ends this process
    logging.disable(logging.ERROR)  # math-verify warns that its own time limits are off
    for reply, answer in (("(x + 1)(x - 1)", "x^2 - 1"), ("\\frac{1}{2}", "0.5"), ("(1, 2)", "\\{1, 2\\}")):
        equal(reply, answer)  # imports everything that children need
    gc.freeze()
    running: dict[int, tuple[int, str]] = {}  # pipe: process id and number of the request
    buffer, ended = b"", False
    while not ended:
        ready, _, _ = select.select([*running, *([0] if len(running) < most else [])], [], [])
        for pipe in ready:
            if pipe == 0:
                chunk = os.read(0, 65536)
                buffer, ended = buffer + chunk, not chunk
                continue
            pid, number = running.pop(pipe)
            said = os.read(pipe, 16).decode()
            os.close(pipe)
            _, status = os.waitpid(pid, 0)
            other = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGKILL)
            said = said or json.dumps("late" if other else None)
            print(f"{number}\t{said}", flush=True)
        while b"\n" in buffer and len(running) < most:
            line, _, buffer = buffer.partition(b"\n")
            number, _, texts = line.decode().partition("\t")
            child, pipe = compare(*json.loads(texts), limit)
            running[pipe] = (child, number)
    for child, _ in running.values():
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
