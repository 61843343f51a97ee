"""How soon `rlx view` shows a run of 100,000 rollouts, and how much memory it takes.

    python benchmarks/view.py                       390 steps of 256 rollouts with about 4,000 characters each, three times
    python benchmarks/view.py --results             the same as one results.jsonl of an evaluation

It makes the run directory, starts the command in a pseudo-terminal, and measures the seconds from its start until the first list is
drawn and until the status line counts all rollouts, then the seconds to open the newest and the last rollout of the list, and the
highest resident memory of the process. Reading is warm: the files were just written.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import zstandard

from rlx.paths import RunPaths

DEADLINE = 120.0


def lines_of(step: int, count: int, characters: int, rng: random.Random) -> list[bytes]:
    """Rollouts of one step in groups of eight, of two environments, some of them failed."""
    words = ["the", "sum", "of", "seven", "and", "five", "is", "therefore", "twelve", "so", "we", "carry", "one", "\n"]
    found = []
    for i in range(count):
        failed = rng.random() < 0.02
        text = " ".join(rng.choices(words, k=characters // 5))
        record = {
            "env": ("sums", "reverse_text")[i // 8 % 2],
            "example_id": rng.randrange(2000),
            "group": step * count // 8 + i // 8,
            "member": i % 8,
            "prompt": [{"role": "user", "content": f"{i} + {step} ="}],
            "completion": [] if failed else [{"role": "assistant", "content": text}],
            "reward": None if failed else rng.random(),
            "rewards": {} if failed else {"correct": rng.random()},
            "advantage": None if failed else rng.gauss(0, 1),
            "versions": [] if failed else [max(0, step - 1), step],
            "num_tokens": 0 if failed else rng.randrange(20, 900),
            "num_turns": 1,
            "status": "timeout" if failed else "ok",
            "stop": "timeout" if failed else "stop",
            "truncated": False,
            "error": "it took too long" if failed else None,
            "seconds": 1.5,
        }
        found.append(json.dumps(record).encode() + b"\n")
    return found


def make(root: Path, steps: int, per_step: int, characters: int, kind: str) -> None:
    """A run directory, or one evaluation's results."""
    rng, paths = random.Random(0), RunPaths(root)
    root.mkdir(parents=True, exist_ok=True)
    if kind == "results":
        folder = paths.evaluation_of("sums", "model", 0)
        folder.mkdir(parents=True)
        with (folder / "results.jsonl").open("wb") as file:
            for step in range(steps):
                file.writelines(lines_of(step, per_step, characters, rng))
        return
    paths.config.touch()
    paths.rollouts.mkdir()
    for step in range(steps):
        lines = lines_of(step, per_step, characters, rng)
        paths.rollouts_of(step).write_bytes(zstandard.ZstdCompressor(level=3).compress(b"".join(lines)))


class Terminal:
    """A command in a pseudo-terminal of 120 × 40."""

    def __init__(self, command: list[str]) -> None:
        self.started = time.perf_counter()
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
        os.close(slave)
        self.seen = b""

    def until(self, pattern: str) -> float:
        """Seconds since the start until the pattern is printed, after the last one that was waited for."""
        while not (found := re.search(pattern.encode(), self.seen)):
            if time.perf_counter() - self.started > DEADLINE:
                raise TimeoutError(f"{pattern!r} was not printed in {DEADLINE:g} s; the last output: {self.seen[-500:]!r}")
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 1 << 16)
        self.seen = self.seen[found.start() :]
        return time.perf_counter() - self.started

    def press(self, keys: bytes) -> float:
        """Type, and return the time. Forgets what was printed before."""
        self.seen = b""
        os.write(self.master, keys)
        return time.perf_counter() - self.started

    def peak(self) -> float:
        """The highest resident memory so far, in MB."""
        (line,) = [
            line for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")
        ]
        return int(line.split()[1]) / 1024

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def measure(root: Path, total: int) -> dict[str, float]:
    """One start of the command."""
    terminal = Terminal([sys.executable, "-m", "rlx.cli", "view", str(root)])
    try:
        first = terminal.until("[1-9][0-9,]* rollouts")
        everything = terminal.until(f"{total:,} rollouts")
        began = terminal.press(b"\r")
        newest = terminal.until("rollout 1 of") - began
        terminal.press(b"q")
        terminal.until("filter")
        began = terminal.press(b"r")  # sorts 100,000 rows
        terminal.until("▼|▲")
        ordered = time.perf_counter() - terminal.started - began
        return {"first list": first, "all counted": everything, "open": newest, "sort": ordered, "peak MB": terminal.peak()}
    finally:
        terminal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=390)
    parser.add_argument("--per-step", type=int, default=256)
    parser.add_argument("--characters", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--results", action="store_true")
    args = parser.parse_args()
    kind = "results" if args.results else "rollouts"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        began = time.perf_counter()
        make(root, args.steps, args.per_step, args.characters, kind)
        size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        print(f"{args.steps * args.per_step:,} rollouts, {kind}, {size / 1e6:.0f} MB, written in {time.perf_counter() - began:.0f} s")
        for _ in range(args.repeat):
            values = measure(root, args.steps * args.per_step)
            print(
                "   ".join(f"{name} {value:.0f}" if "MB" in name else f"{name} {value:.2f} s" for name, value in values.items()), flush=True
            )


if __name__ == "__main__":
    main()
