"""The browser for rollouts, driven by its keys: with Textual's pilot, and in a real terminal."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from rich.color import Color
from textual.events import Key
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Input, Static
from view_run import write_run, write_step

from rlx.paths import RunPaths
from rlx.runs.rollouts import Rollouts
from rlx.view.app import AHEAD, ListScreen, RolloutList, ViewApp
from rlx.view.detail import CompareScreen, Document, RolloutScreen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


def drive(root: Path, play: Callable[[ViewApp, Pilot], Awaitable[None]], size: tuple[int, int] = (110, 40), conditions: str = "") -> None:
    async def run() -> None:
        app = ViewApp(Rollouts(root), conditions)
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


def text_of(document: Document) -> str:
    return "\n".join(str(part.render()) for part in document.query(Static))


def test_the_list_is_sorted_filtered_and_opened_by_keys(paths: RunPaths):
    async def play(app: ViewApp, pilot: Pilot) -> None:
        table = app.screen.query_one(RolloutList)
        assert "29 rollouts" in status(app)
        assert "3 failed" in status(app)
        assert [table.rollouts[0].step, str(table.get_row_at(0)[0])] == [2, "2"]  # the newest step comes first
        await press(pilot, "r")
        assert [str(table.get_row_at(row)[4]) for row in (0, 1)] == ["1.000", "1.000"]
        assert "reward ▼" in screen_text(app)
        await press(pilot, "r")
        assert table.rollouts[0].reward == 0
        await press(pilot, "e")
        assert all(row.error for row in table.rollouts[:3])
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
        text = text_of(app.screen.query_one(Document))
        assert "reward 1.000   advantage +1.000" in text
        assert "rewards correct 1 · short 0.5" in text
        assert 'add({"a": 1, "b": 2})' in text
        await press(pilot, "p", "escape")
        await until(pilot, lambda: isinstance(app.screen, ListScreen))
        assert table.cursor_row == 4  # where the reader went

    drive(paths.root, play)


def test_a_rollouts_tokens_have_the_colours_of_their_numbers(paths: RunPaths):
    async def play(app: ViewApp, pilot: Pilot) -> None:
        await press(pilot, "enter", "t")
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen))
        screen = app.screen
        assert isinstance(screen, RolloutScreen)
        await until(pilot, lambda: screen.samples)
        await pilot.pause()
        assert "p < 0.9" in screen_text(app)
        strips = screen.query_one(Document).query(Static).last().render_lines(Region(0, 0, 100, 20))
        darkest = Color.parse("#7f2704")
        assert {part.text.strip() for strip in strips for part in strip if part.style and part.style.bgcolor == darkest} == {"three"}
        await press(pilot, "c")
        assert screen.quantity == "version"  # entropy and mismatch were not recorded
        assert "policy version  1   2" in " ".join(screen_text(app).split("\n")[-3:])
        await press(pilot, "t")
        rows = [line.split() for line in text_of(screen.query_one(Document)).splitlines()]
        assert ["10", "three", "7", "-6.000", "0.002", "-", "-", "2", "+1.000", "0.7"] in rows
        await press(pilot, "escape", "slash")
        app.screen.query_one(Input).value = "set=eval"
        await press(pilot, "enter", "enter", "t")
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen))
        await until(pilot, lambda: "no tokens: tokens are recorded for the rollouts of training only" in screen_text(app))

    drive(paths.root, play, conditions="env=sums step=2 trained member=1")


def test_one_example_at_two_steps_stands_side_by_side(paths: RunPaths):
    async def play(app: ViewApp, pilot: Pilot) -> None:
        await press(pilot, "x")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen) and "step" in text_of(app.screen.query_one("#side1", Document)))
        sides = [app.screen.query_one(f"#side{side}", Document) for side in (0, 1)]
        assert "step 1 · rollout 2 of 2" in text_of(sides[0])
        assert "step 2 · rollout 1 of 2" in text_of(sides[1])
        await press(pilot, "tab", "left", "n")
        assert "step 0 · rollout 2 of 2" in text_of(sides[0])
        assert "is three" in text_of(sides[0])
        assert "is four" in text_of(sides[1])
        await press(pilot, "escape")
        await until(pilot, lambda: isinstance(app.screen, ListScreen))

    drive(paths.root, play, conditions="set=train example=7 step=1 member=1")


def test_the_list_grows_with_the_run_under_a_cursor_that_stays(tmp_path: Path):
    paths = write_run(tmp_path / "mine", steps=1)

    async def play(app: ViewApp, pilot: Pilot) -> None:
        table = app.screen.query_one(RolloutList)
        await press(pilot, "down", "down")
        before = table.current
        write_step(paths, 1)
        await press(pilot, "u")
        await until(pilot, lambda: len(table.rollouts) == 14)
        assert table.current == before
        assert table.cursor_row == 2 + 7  # seven newer ones lie above it

    drive(paths.root, play, conditions="set=train")


def test_texts_of_others_are_shown_and_not_obeyed(tmp_path: Path):
    """Neither the terminal's sequences nor Textual's own markup, in a small window."""
    said = "漢字" * 40 + " a\tb\x1b[31m [bold red]loud[/] [@click=app.quit]x[/] " + "x" * 95
    line = {"example_id": 1, "env": "[red]odd\x1b[2J", "stop": "[/]", "reward": 1.0, "prompt": "[link=file:///]", "completion": said}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")

    async def play(app: ViewApp, pilot: Pilot) -> None:
        await until(pilot, lambda: "[link=file:///]" in screen_text(app))
        assert "[red]odd␛[2J" in screen_text(app)
        await press(pilot, "enter")
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen))
        await pilot.pause()
        screen = screen_text(app)
        assert "\x1b" not in screen
        assert "".join(said.split()).replace("\x1b", "␛") in "".join(screen.split())

    drive(tmp_path, play, size=(60, 40))


def test_a_list_of_many_rollouts_is_filled_as_far_as_the_reader_goes(tmp_path: Path):
    (tmp_path / "results.jsonl").write_text("".join(json.dumps({"example_id": n, "reward": n}) + "\n" for n in range(20_000)))

    async def play(app: ViewApp, pilot: Pilot) -> None:
        table = app.screen.query_one(RolloutList)
        assert "20,000 rollouts" in status(app)
        await press(pilot, "r")
        assert "19999" in screen_text(app)
        for _ in range(3):
            await press(pilot, "end")
            await pilot.pause(0.1)
        assert table.current is not None
        assert table.cursor_row > AHEAD
        assert str(table.current.example) in screen_text(app)

    drive(tmp_path, play)


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
