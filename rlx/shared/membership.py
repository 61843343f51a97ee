"""How a run and a shared trainer find each other, by files in their directories (docs/lora.md).

    orchestrator   locks `membership/present`, writes `membership/asks.json` {token}                        a new token in every attempt
    trainer        sees it in `run_*`, loads the run into a slot, writes `membership/answer.json` {token, state, why}
    orchestrator   goes on when the state is `in`; ends with an error when it becomes `out`, or when the trainer is gone
    trainer        `done` after the run's last step; puts the run out, with the reason, if it is gone or cannot be trained

The orchestrator locks `present` in the run's directory, and rank 0 that in the trainer's, each as long as it lives. So either end sees the
other's death at once, however it died. Needs no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlx.lock import FileLock
from rlx.paths import MEMBER, RunPaths, listed, listed_with_folder, write_text

log = logging.getLogger(__name__)

PRESENT, ASKS, ANSWER = "present", "asks.json", "answer.json"  # in the directory's `membership/`
POLL_SECONDS = 0.5  # seconds between two looks at the other end
TAKE = 5.0  # seconds to wait for one's own lock: the other end holds it for a moment when it looks

State = Literal["in", "out", "done"]


class EvictedError(RuntimeError):
    """The shared trainer does not train this run any more. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class JoinResponse:
    """What the trainer says to the run that asked with `token`."""

    token: str
    state: State
    why: str = ""


class LivenessLock:
    """A lock that shows that this process is alive."""

    def __init__(self, paths: RunPaths) -> None:
        """Take it. Raises RuntimeError if another process has it."""
        path = paths.membership / PRESENT
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        self.fd = lock.fd
        if not lock.take(TAKE):
            raise RuntimeError(f"another process is at work in {paths.root} ({path} is locked)")


def is_present(paths: RunPaths) -> bool:
    """Whether the process that holds the presence in this directory is alive."""
    path = paths.membership / PRESENT
    if not listed_with_folder(path):
        return False
    try:
        lock = FileLock(path, create=False)
    except FileNotFoundError:  # the directory was deleted meanwhile
        return False
    try:
        return not lock.share(0.0)
    finally:
        lock.close()


def pending_requests(host: RunPaths) -> Iterator[tuple[RunPaths, str]]:
    """The runs in a shared trainer's directory that have asked to be trained, by name, with their tokens; also answered ones."""
    for folder in sorted(host.root.glob(f"{MEMBER}*")):
        paths = RunPaths(folder)
        try:
            token = request_token(paths) if folder.is_dir() else None
        except OSError:  # the folder of another user
            continue
        if token is not None:
            yield paths, token


def request_token(paths: RunPaths) -> str | None:
    """The token of the newest request in a run's directory; None without one."""
    record = _read(paths.membership / ASKS)
    return None if record is None else str(record["token"])


def respond(paths: RunPaths, token: str, state: State, why: str = "") -> None:
    """The trainer's answer. A run whose directory was deleted, or cannot be written, gets none."""
    try:
        if listed(paths.membership):
            write_text(paths.membership / ANSWER, json.dumps(asdict(JoinResponse(token, state, why))) + "\n")
    except OSError as error:  # it concerns this run alone
        log.warning("%s gets no answer (%s): %s", paths.root, why or state, error)


def response_of(paths: RunPaths) -> JoinResponse | None:
    """The last answer in a run's directory, of any attempt."""
    record = _read(paths.membership / ANSWER)
    return None if record is None else JoinResponse(**record)


class TrainerClient:
    """The orchestrator's end."""

    def __init__(self, paths: RunPaths, host: Path) -> None:
        """Ask the trainer in the directory `host`."""
        self.paths, self.host = paths, RunPaths(host)
        self.presence = LivenessLock(paths)
        self.token = secrets.token_hex(8)
        write_text(paths.membership / ASKS, json.dumps({"token": self.token}) + "\n")

    def wait(self, tick: Callable[[], None]) -> None:
        """Return once the trainer has a slot for the run and its initial model is known. Raises EvictedError.

        It may be loading its model or in a long step. If it hangs, its own supervisor ends it, and that ends the wait.
        """
        while not self.check():
            tick()
            time.sleep(POLL_SECONDS / 5)

    def check(self) -> bool:
        """Whether the run is being trained, or is done. Raises EvictedError if the trainer put it out, or is gone."""
        found = response_of(self.paths)
        if found is not None and found.token == self.token:
            if found.state == "out":
                raise EvictedError(f"the shared trainer in {self.host.root} does not train this run: {found.why}")
            if found.state == "done":
                return True
        if not is_present(self.host):
            raise EvictedError(
                f"the shared trainer in {self.host.root} has ended (its logs: {self.host.latest_logs}). Start it again, then go on with "
                "this run: resume=latest"
            )
        return found is not None and found.token == self.token

    async def ended(self) -> None:
        """Return when the trainer has let the run go, with its last checkpoint complete. `stay` raises if it is put out instead."""
        while (found := await asyncio.to_thread(response_of, self.paths)) is None or (found.token, found.state) != (self.token, "done"):
            await asyncio.sleep(POLL_SECONDS)

    async def stay(self) -> None:
        """Runs for ever. Raises EvictedError as `check` does."""
        while True:
            await asyncio.to_thread(self.check)
            await asyncio.sleep(POLL_SECONDS)


def _read(path: Path) -> dict[str, Any] | None:
    """A file of the membership, which appears whole; None without one."""
    if not listed_with_folder(path):
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # the directory was deleted meanwhile
        return None
