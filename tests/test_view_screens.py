"""The browser for rollouts, driven by its keys: with Textual's pilot, and in a real terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input, Static
from view_run import write_run, write_step

from rlx.paths import RunPaths
from rlx.runs.rollouts import Rollouts
from rlx.view.app import ListScreen, ViewApp
from rlx.view.detail import CompareScreen, RolloutScreen
from rlx.view.widgets import LongText, RolloutList

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


def drive(root: Path, play: Callable[[ViewApp, Pilot], Awaitable[None]], size: tuple[int, int] = (110, 40), **options: str) -> None:
    async def run() -> None:
        app = ViewApp(Rollouts(root), options)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: isinstance(app.screen, ListScreen) and not app.screen.reading)
            await play(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot, met: Callable[[], object], timeout: float = 120.0) -> None:
    end = time.monotonic() + timeout
    while not met():
        assert time.monotonic() < end, "the screen did not become what was expected"
        await pilot.pause(0.01)


async def press(pilot: Pilot, *keys: str) -> None:
    """Press keys one by one. On a busy machine Textual's own `press` may return while a key is still on its way to the widget."""
    for key in keys:
        await pilot.press(key)
        for _ in range(4):  # from the driver to the app, the screen, the widget, and its messages
            await pilot.pause(0)


def screen_text(app: ViewApp) -> str:
    """What the terminal shows."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


def status(app: ViewApp) -> str:
    return str(app.screen.query_one("#status", Static).render())


def test_the_list_is_sorted_filtered_and_opened_by_keys(paths: RunPaths):
    async def play(app: ViewApp, pilot: Pilot) -> None:
        rollouts = app.screen.query_one(RolloutList)
        assert "29 rollouts" in status(app)
        assert "3 failed" in status(app)
        table = rollouts.table
        assert table.columns["step"][rollouts.row] == 2  # the newest step comes first
        await press(pilot, "r")
        assert [table.columns["reward"][row] for row in rollouts.rows[:2]] == [1, 1]
        assert "reward ▼" in screen_text(app)
        await press(pilot, "r")
        assert table.columns["reward"][rollouts.rows[0]] == 0
        await press(pilot, "e")
        assert table.failed[rollouts.rows[:3]].all()
        for key in "/set=train reward>0.5 bogus":  # as fast as a paste
            app.post_message(Key({"/": "slash"}.get(key, key), key))
        await until(pilot, lambda: app.screen.query_one(Input).value.endswith("bogus"))
        await press(pilot, "enter")
        assert app.screen.query_one(Input).value == "set=train reward>0.5 bogus"
        assert "'bogus' is no condition" in status(app)
        app.screen.query_one(Input).value = "set=train reward>0.5"
        await press(pilot, "enter")
        assert "6 of 29 rollouts" in status(app)
        assert not app.screen.query_one(Input).display
        await press(pilot, "s", "end", "enter")
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen))
        text = app.screen.query_one(LongText).text()
        assert "reward 1.000   advantage +1.000" in text
        assert "rewards correct 1 · short 0.5" in text
        assert "add(a=1, b=2)" in text
        await press(pilot, "p", "escape")
        await until(pilot, lambda: isinstance(app.screen, ListScreen))
        assert rollouts.cursor == 4  # where the reader went

    drive(paths.root, play)


def test_a_rollouts_tokens_have_the_colours_of_their_numbers(paths: RunPaths):
    async def play(app: ViewApp, pilot: Pilot) -> None:
        await press(pilot, "enter", "t")
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen))
        screen = app.screen
        assert isinstance(screen, RolloutScreen)
        await until(pilot, lambda: screen.samples)
        document = screen.query_one(LongText)
        styles = {
            segment.text.strip(): segment.style for line in document._lines for segment in line if segment.style and segment.style.bgcolor
        }
        assert set(styles) == {"three"}  # sampled with probability 0.002; `call` and `is` are near 1
        assert "p < 0.9" in screen_text(app)
        await press(pilot, "c")
        assert screen.quantity == "version"  # entropy and mismatch were not recorded
        assert "policy version  1   2" in " ".join(screen_text(app).split("\n")[-3:])
        await press(pilot, "t")
        rows = [line.split() for line in document.text().splitlines()]
        assert ["10", "three", "7", "-6.000", "0.002", "2", "+1.000", "0.7"] in rows
        await press(pilot, "escape", "slash")
        app.screen.query_one(Input).value = "set=eval"
        await press(pilot, "enter", "enter", "t")
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen))
        evaluated = app.screen
        assert isinstance(evaluated, RolloutScreen)
        await until(pilot, lambda: evaluated.why)
        assert "no tokens: tokens are recorded for the rollouts of training only" in screen_text(app)

    drive(paths.root, play, filter="env=sums step=2 trained member=1")


def test_one_example_at_two_steps_stands_side_by_side(paths: RunPaths):
    async def play(app: ViewApp, pilot: Pilot) -> None:
        await press(pilot, "x")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen) and "step" in app.screen.query_one("#side1", LongText).text())
        sides = [app.screen.query_one(f"#side{side}", LongText) for side in (0, 1)]
        assert "step 1 · rollout 2 of 2" in sides[0].text()
        assert "step 2 · rollout 1 of 2" in sides[1].text()
        await press(pilot, "tab", "left", "n")
        assert "step 0 · rollout 2 of 2" in sides[0].text()
        assert "is three" in sides[0].text()
        assert "is four" in sides[1].text()
        await press(pilot, "escape")
        await until(pilot, lambda: isinstance(app.screen, ListScreen))

    drive(paths.root, play, filter="set=train example=7 step=1 member=1")


def test_the_list_grows_with_the_run_under_a_cursor_that_stays(tmp_path: Path):
    paths = write_run(tmp_path / "mine", steps=1)

    async def play(app: ViewApp, pilot: Pilot) -> None:
        rollouts = app.screen.query_one(RolloutList)
        await press(pilot, "down", "down")
        place = rollouts.place()
        write_step(paths, 1)
        await press(pilot, "u")
        await until(pilot, lambda: len(rollouts.rows) == 14)
        assert rollouts.place() == place
        assert rollouts.cursor == 2 + 7  # seven newer ones lie above it

    drive(paths.root, play, filter="set=train")


def test_long_words_wide_letters_and_small_windows_fit(tmp_path: Path):
    from rich.cells import cell_len
    from rich.style import Style

    from rlx.view.flow import flow, words

    text = "漢字" * 40 + " a\tb\x1b[31m " + "x" * 95 + "\n\n" + "word " * 30
    lines = flow(words(text, Style.null()), 20, indent=2)
    shown = ["".join(segment.text for segment in line) for line in lines]
    assert max(map(cell_len, shown)) <= 20
    assert "\x1b" not in "".join(shown)
    assert "".join("".join(shown).split()) == "".join(text.replace("\x1b", "␛").split())


@pytest.fixture
def terminal(paths: RunPaths) -> Iterator[Callable[..., str]]:
    """A real terminal: `terminal(keys…)` types keys and returns the screen once it holds `see`."""
    if shutil.which("tmux") is None:
        pytest.skip("this machine has no tmux, which is not needed to run rlx")
    tmux = ["tmux", "-L", f"rlx-view-{os.getpid()}", "-f", "/dev/null"]
    command = f"TERM=xterm-256color {sys.executable} -m rlx.cli view {paths.root}; echo left with $?; sleep 60"
    shell = os.environ | {"SHELL": "/bin/sh"}  # tmux gives the command to the user's own, which may read it otherwise
    subprocess.run([*tmux, "new-session", "-d", "-s", "v", "-x", "100", "-y", "32", command], check=True, env=shell)

    def show(*keys: str, see: str) -> str:
        for key in keys:
            subprocess.run([*tmux, "send-keys", "-t", "v", key], check=True)
        end = time.monotonic() + 300
        while see not in (
            screen := subprocess.run([*tmux, "capture-pane", "-p", "-t", "v"], capture_output=True, text=True, check=True).stdout
        ):
            assert time.monotonic() < end, f"{see!r} is not on the screen:\n{screen}"
            time.sleep(0.05)
        return screen

    yield show
    subprocess.run([*tmux, "kill-server"], check=False)


def test_in_a_real_terminal_the_keys_lead_from_the_list_to_tokens_and_back(terminal: Callable[..., str]):
    terminal(see="29 rollouts")
    terminal(see="⏎ open  / filter  r reward")
    terminal("/", "set=train reward>0.5 env=sums", "Enter", see="3 of 29 rollouts")
    terminal("Enter", see="▌ sampled by the policy")
    terminal("t", see="<user> one plus two")
    terminal("t", see="-6.000    0.002")
    terminal("x", see="the same example was played at steps 0 … 2 (3)")
    terminal("Escape", see="2 · rollout 1 of 3 · numbers")
    terminal("q", see="3 of 29 rollouts")
    terminal("?", see="in the list")
    terminal("q", see="3 of 29 rollouts")
    terminal("q", see="left with 0")
