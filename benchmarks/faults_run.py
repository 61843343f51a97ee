"""How long it takes until a run notices that one of its processes has failed: `python benchmarks/faults_run.py [FAULT …]`.

Each fault happens to a default run on real vLLM, on policy, after its second step. Three times are measured: until the output says what
happened, until the next step is trained (or the run ends), and until the run has ended. A server cannot be made to answer 500, so a proxy
stands before it and does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from main_job import MainJob
from test_run_servers import ON_POLICY, server_of

KEYS = (*ON_POLICY, "orchestrator.rollout_timeout=60", "ckpt.interval=null")
OUTAGE = 10.0  # seconds of answers 500


class Proxy:
    """Stands between a run and its server, in a thread. While `fails` is set, everything is answered with a 500."""

    def __init__(self) -> None:
        self.fails, self.failed = False, 0
        self.upstream = ""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        assert self._ready.wait(120)

    async def _serve(self) -> None:
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await asyncio.Event().wait()

    async def _forward(self, request: web.Request) -> web.Response:
        if not self.upstream:
            return web.Response(status=503)
        if self.fails:
            self.failed += 1
            return web.Response(status=500, text="out of luck")
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        url, body = self.upstream + request.path_qs, await request.read()
        async with aiohttp.ClientSession() as session, session.request(request.method, url, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read())


def log_of(job: MainJob) -> str:
    """All that a user can read: the output, and the logs of the roles."""
    return job.text() + "".join(file.read_text() for file in sorted(job.run_dir.glob("logs/attempt_0/*.log")))


def pid_of(job: MainJob, role: str) -> int:
    return job.pids()[role]


def kill_server(job: MainJob) -> None:
    os.kill(pid_of(job, "inference"), signal.SIGKILL)


def kill_part(job: MainJob, mark: str) -> None:
    """Kill the server's process that has this in its command line."""
    parts = psutil.Process(pid_of(job, "inference")).children(recursive=True)
    next(part for part in parts if mark in " ".join(part.cmdline())).kill()


def kill_worker(job: MainJob) -> None:
    workers = [child for child in psutil.Process(pid_of(job, "orchestrator")).children() if "worker" in child.cmdline()]
    workers[0].kill()


def kill_rank(job: MainJob) -> None:
    ranks = [child for child in psutil.Process(pid_of(job, "trainer")).children() if child.environ().get("RANK") == "1"]
    ranks[0].kill()


FAULTS: dict[str, tuple[Callable[[MainJob], None], str, tuple[str, ...]]] = {  # what is done, what is said then, further keys
    "server_killed": (kill_server, r"inference_0: killed by SIGKILL.*", ()),
    "api_killed": (lambda job: kill_part(job, "vllm.entrypoints"), r"vLLM ended while it served.*", ()),
    "engine_killed": (lambda job: kill_part(job, "EngineCore"), r"vLLM ended while it served.*", ()),
    "worker_killed": (kill_worker, r"env_reverse_text_0 \(process \d+\) died.*", ()),
    "rank_killed": (kill_rank, r".*SIGKILL.*", ("hardware.trainer_processes=2",)),
}


@contextmanager
def behind(proxy: Proxy, job: MainJob, folder: Path) -> Iterator[None]:
    with server_of(job, folder / "server") as proxy.upstream:
        yield


def steps(job: MainJob) -> int:
    return len(job.metrics("trainer"))


def report(name: str, job: MainJob, began: float, pattern: str) -> str:
    """One row of the table."""
    before, told, next_step = steps(job), 0.0, 0.0
    said = ""
    while not next_step or (job.process.poll() is None and not told):
        found = [line for line in log_of(job).splitlines() if re.search(pattern, line)]
        if found and not told:
            told, said = time.monotonic() - began, found[0].strip()
        if steps(job) > before + 1 or job.process.poll() is not None:  # the first may have been computed already
            next_step = next_step or time.monotonic() - began
        time.sleep(0.05)
    code = job.wait()
    ended = time.monotonic() - began
    lags = max(record["mismatch/kl"] for record in job.metrics("trainer"))
    failed = {name: value for name, value in job.metrics("orchestrator")[-1].items() if name.startswith("rollouts/failed_") and value}
    return (
        f"| `{name}` | {told:.1f} s | {next_step:.1f} s | exit code {code} after {ended:.1f} s, {steps(job)} steps, mismatch/kl at most "
        f"{lags:.1e}, failed rollouts {failed or 'none'} | {said} |"
    )


def measure(name: str, folder: Path, extra: list[str]) -> str:
    if name == "server_500":
        proxy = Proxy()
        address = (f"inference.base_url=[http://127.0.0.1:{proxy.port}]", "inference.api_key=key")
        job = MainJob(folder / "run", *KEYS, *address, "max_steps=12", *extra)
        try:
            with behind(proxy, job, folder):
                job.until_step(2)
                proxy.fails, began = True, time.monotonic()
                threading.Timer(OUTAGE, setattr, (proxy, "fails", False)).start()
                return report(name, job, began, r".*(out of luck|takes requests).*")
        finally:
            job.destroy()
    act, pattern, keys = FAULTS[name]
    job = MainJob(folder / "run", *KEYS, *keys, "max_steps=12", *extra)
    try:
        job.until_step(2)
        began = time.monotonic()
        act(job)
        return report(name, job, began, pattern)
    finally:
        job.destroy()


def main() -> None:
    known = ("server_500", *FAULTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--set", action="append", default=[], help="a key of the run, KEY=VALUE")
    options = parser.parse_args()
    print("| fault | said after | next step after | the run | what is said |\n| --- | --- | --- | --- | --- |")
    for name in options.faults or known:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(name, Path(folder), options.set), flush=True)


if __name__ == "__main__":
    main()
