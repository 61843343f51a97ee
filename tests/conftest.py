"""Fixtures of the tests that run the real stack."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from main_job import MainJob

# Set before torch is imported. With several workers of several threads on few cores, threads spin and small tests take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RLX_PYTHONS"] = os.devnull  # not what the user has installed
# `make test` starts tests in the background, where a shell has Ctrl-C ignored, by the tests and by all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop of tests that are coroutines: as in an environment's worker."""
    return "asyncio", {"use_uvloop": True}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make a million objects that stay. Walking over them again and again was a third of the time that collecting takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor do collections during the tests walk over them; to look for garbage among them first would take a second
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind of server stand together: only one server runs at a time (`engines`)."""
    places = [place for place, item in enumerate(items) if "engines" in getattr(item, "fixturenames", ())]

    def kind(item: pytest.Item) -> str:
        return str(item.callspec.params.get("kind", "tied")) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else "tied"

    for place, item in zip(places, sorted((items[place] for place in places), key=kind), strict=True):
        items[place] = item


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A tier runs several sessions, whose reports are long: the Makefile names the failures of all of them once more at its end."""
    path = os.environ.get("TESTS_FAILED")
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:  # the process that collects the workers' reports names them
        return
    with open(path, "a") as file:
        for kind in ("failed", "error"):
            for report in terminalreporter.stats.get(kind, []):
                crash = getattr(report.longrepr, "reprcrash", None)
                text = " ".join(str(crash.message if crash else report.longrepr).split())
                file.write(f"{kind.upper()} {report.nodeid} {text[:400]}\n")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of warm-started models, shared by all processes of a test session. The user's cache is never used.

    `TESTS_CACHE` names a folder for several sessions: the Makefile's tiers then make the model of the default run once.
    """
    base = tmp_path_factory.getbasetemp()
    cache = Path(os.environ.get("TESTS_CACHE") or (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)) / "rlx_cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture(scope="session", autouse=True)
def own_cache(model_cache: Path) -> Iterator[None]:
    """What commands keep between calls (warm-started models, what environments are) is shared by the tests, and not the user's."""
    before = os.environ.get("RLX_CACHE")
    os.environ["RLX_CACHE"] = str(model_cache)
    yield
    if before is None:
        del os.environ["RLX_CACHE"]
    else:
        os.environ["RLX_CACHE"] = before


@pytest.fixture(autouse=True)
def own_search_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """A command in this process says to its children where code lies. The next test's children must not hear it."""
    names = ("PYTHONPATH", "PYTHONSAFEPATH")
    before = {name: os.environ[name] for name in names if name in os.environ}
    if request.node.get_closest_marker("stand_in"):
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent / "engine_stand_in")
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def shared_parts() -> Iterator[None]:
    """Configurations of rlx's own files share what they compose, as the runs of a sweep do: that was a quarter of the fast tests' time.

    A test with files of its own shares nothing.
    """
    from rlx.config import composition, presets

    real, folder, parts = composition.compose_tree, presets.conf_directory(), {}

    def compose_tree(argv: list[str], environ: Any, root: Any = composition.TRAIN, kept: Any = None) -> Any:
        own = any(word.startswith("-") or "searchpath" in word for word in argv) or "RLX_CONFIG_DIR" in environ
        if kept is None and not own and presets.conf_directory() == folder:
            _, kept = parts.setdefault(id(root), (root, {}))  # the root, so that no other gets its id
        return real(argv, environ, root, kept)

    composition.compose_tree = compose_tree
    yield
    composition.compose_tree = real


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """`engines("tied")` is a run with a server of this kind on real vLLM (`inference_server.KINDS`)."""
    from inference_server import Engines  # it imports torch

    found = Engines(tmp_path_factory.mktemp)
    yield found
    found.stop()


@pytest.fixture
def quick_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of servers ask again sooner, and a server that refuses connections is soon gone. One that is only slow never is."""
    for module in ("fleet", "sampler"):
        monkeypatch.setattr(f"rlx.inference.{module}.PAUSE", 0.05)
    monkeypatch.setattr("rlx.inference.fleet.GONE", 0.1)
    monkeypatch.setattr("rlx.inference.sampler.AVOIDED", 0.2)


@pytest.fixture
def version(tmp_path: Path) -> Callable[[int], Path]:
    """Publishes a version for stand-in servers and returns its folder."""
    from server_stand_in import publish  # it imports aiohttp

    return lambda number: publish(tmp_path / f"step_{number}", number)


@pytest.fixture
def known_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process take every environment for a classic one with 512 examples, instead of loading it for seconds."""

    def run(python: str, entry: dict) -> tuple[dict, str]:
        return {"probed": {"kind": "classic", "examples": 512, "tools": []}, "files": {"of a test": "never equal"}, "folders": {}}, ""

    monkeypatch.setattr("rlx.preflight.env_probe._run", run)


@pytest.fixture
def start(tmp_path: Path, model_cache: Path) -> Iterator[Callable[..., MainJob]]:
    """`start("name", *overrides)` starts a main job. At the end of the test its remaining processes are killed."""
    jobs: list[MainJob] = []

    def begin(name: str, *overrides: str, env: dict[str, str] | None = None) -> MainJob:
        jobs.append(MainJob(tmp_path / name, *overrides, env={"RLX_CACHE": str(model_cache)} | (env or {})))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.destroy()


def daemons() -> set[str]:
    """The names of SLURM's processes on this machine."""
    names = subprocess.run(["ps", "-e", "-o", "comm="], check=True, capture_output=True, text=True).stdout.split()
    return {"slurmctld", "slurmd", "slurmstepd", "munged"} & set(names)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """The development cluster. If it cannot start, the tests are skipped with the reason. A running cluster is used and left running."""
    script = Path(__file__).resolve().parent.parent / "slurm" / "dev_cluster.sh"
    runs, before = subprocess.run([script, "status"], check=False).returncode == 0, daemons()
    if not runs:
        bring_up(script)
    yield
    if not runs:
        subprocess.run([script, "down"], check=True, capture_output=True, timeout=600)
        assert daemons() <= before, "`down` stops every process that `up` started"


def bring_up(script: Path) -> None:
    """Start the cluster. If it cannot start, skip the test, or fail it if RLX_REQUIRE_SLURM is set."""
    done = subprocess.run([script, "up"], check=False, capture_output=True, text=True, timeout=600)
    if done.returncode == 3:
        reason = f"no SLURM here: {done.stderr.strip()}"
        if os.environ.get("RLX_REQUIRE_SLURM"):
            pytest.fail(f"{reason} (RLX_REQUIRE_SLURM is set)", pytrace=False)
        pytest.skip(reason)
    assert done.returncode == 0, done.stdout + done.stderr
