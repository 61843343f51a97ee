"""The walk-throughs in `examples/`: their commands compose, and those of reverse_text run as its page says."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import termios
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from rlx.config.load import Composed, compose, load_run
from rlx.config.roots import EVAL, SFT, TRAIN
from rlx.config.sweeps import expand
from rlx.metrics import read_metrics
from rlx.paths import COMPLETE, RunPaths
from rlx.runs.weights import resolve
from rlx.weights.shapes import ADAPTER_CONFIG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "examples").glob("*/README.md"))


def commands_of(page: Path, language: str = "") -> list[list[str]]:
    """The commands in the code blocks of a page. Those that a walk-through does not need stand in blocks of the language `sh`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with the examples in it, as the present one."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keys_on_gpus(page: Path) -> list[str]:
    """The keys that a page gives for GPUs: the first under that title."""
    found = re.search(r"`([^`]*=[^`]*)`", page.read_text().partition("## On GPUs")[2])
    assert found is not None, f"{page} does not say what changes on GPUs"
    return found[1].replace("slurm=my_cluster", "slurm=example").split()


def make_run(root: Path, composed: Composed) -> None:
    """What `rlx eval` reads of a finished run."""
    version = root / "weights" / "step_50"
    version.mkdir(parents=True)
    (version / COMPLETE).touch()
    RunPaths(root).initial_model.write_text(str(version))
    if composed.cfg.lora.enabled:
        (version / ADAPTER_CONFIG).write_text(json.dumps({"r": composed.cfg.lora.rank}))
    (root / "config.yaml").write_text(composed.yaml)


def run_page(name: str, **more: list[str]) -> None:
    """Run the commands of a page as they stand. `more`: arguments for `rlx KIND`, by kind."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for program, *argv in commands_of(ROOT / "examples" / name / "README.md"):
        start = [sys.executable] if program == "python" else [sys.executable, "-m", "rlx.cli"]
        command = [*start, *argv, *more.get(argv[0], [])]
        if argv[0] == "view":
            look(command, environ)
            continue
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, f"{program} {shlex.join(argv)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def look(command: list[str], environ: dict[str, str]) -> None:
    """Run `rlx view` in a terminal until it shows rollouts, then leave it with its key."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (40, 140))
    seen, deadline = b"", time.monotonic() + 120
    with subprocess.Popen(command, env=environ | {"TERM": "xterm-256color"}, stdin=its, stdout=its, stderr=its) as process:
        try:
            os.close(its)
            while not re.search(rb"reward \d\.\d{3}", seen):  # of the rollouts that were read; the filter's help has the word, too
                assert time.monotonic() < deadline, seen[-3000:]
                assert process.poll() is None, seen[-3000:]
                if select.select([ours], [], [], 1)[0]:
                    with contextlib.suppress(OSError):  # it has closed the terminal
                        seen += os.read(ours, 65536)
            os.write(ours, b"q")
            deadline = time.monotonic() + 60
            while process.poll() is None:
                assert time.monotonic() < deadline, "it does not end"
                if select.select([ours], [], [], 0.1)[0]:
                    with contextlib.suppress(OSError):
                        os.read(ours, 65536)
        finally:
            process.kill()
            os.close(ours)
    assert process.returncode == 0, seen[-3000:]


def evaluations(run: Path, env: str) -> dict[int, float]:
    """Mean reward of a run's own evaluations, by version."""
    records = [record for record, _ in read_metrics(run / "metrics.jsonl") if record["source"] == "eval"]
    return {record["step"]: record[f"eval/{env}/avg@1"] for record in records}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_commands_of_a_page_compose(page: Path, there: Path) -> None:
    commands = commands_of(page)
    assert any(command[:2] == ["rlx", "eval"] for command in commands), "a walk-through ends with the evaluation of its checkpoints"
    for program, *argv in commands:
        if program == "python":
            assert (ROOT / argv[0]).is_file()
            Path(argv[1]).parent.mkdir(exist_ok=True)
            Path(argv[1]).write_text("")
            assert compose(argv[2:]).cfg.envs
            continue
        assert program == "rlx"
        kind, *rest = argv
        if kind == "train" and "-m" in rest:
            sweep = expand(rest, None, TRAIN)
            assert len(sweep.elements) == 8
            for element in sweep.elements:
                make_run(Path("outputs", sweep.name, element.name), compose(list(element.argv)))
        elif kind in ("train", "sft"):
            for part in rest:
                if part.startswith("model.name="):
                    (folder := Path(part.partition("=")[2])).mkdir(parents=True, exist_ok=True)
                    (folder / "config.json").write_text("{}")
            composed = compose(rest, None, TRAIN if kind == "train" else SFT)
            assert composed.cfg.eval.interval is not None
            make_run(Path("outputs", str(composed.cfg.run.name)), composed)
        elif kind == "eval":
            assert resolve(replace(compose(rest, None, EVAL).cfg, eval_base=False)).versions == [50]
        else:
            assert kind in ("show", "view", "runs", "report")


def test_the_commands_that_a_page_adds_to_its_walk_through_compose(there: Path) -> None:
    """Demonstrations for harder sums, supervised training on them, and reinforcement learning from a shorter one."""
    (program, script, out, *made), *trained, learned = commands_of(ROOT / "examples" / "smollm2" / "README.md", "sh")
    assert (program, *[each[:2] for each in trained]) == ("python", ["rlx", "sft"], ["rlx", "sft"])
    assert learned[:2] == ["rlx", "train"]
    assert (ROOT / script).is_file()
    Path(out).parent.mkdir()
    Path(out).write_text("")
    assert all(f"data.name={out}" in each for each in trained)
    start = compose(trained[-1][2:], None, SFT)
    made_by_it = Path(f"outputs/{start.cfg.run.name}/weights/step_{start.cfg.max_steps}")
    assert f"model.name={made_by_it}" in learned
    made_by_it.mkdir(parents=True)
    (made_by_it / "config.json").write_text("{}")
    envs = [
        compose(made).cfg.envs,
        *[compose(each[2:], None, SFT).cfg.envs for each in trained],
        compose(learned[2:], None, TRAIN).cfg.envs,
    ]
    assert [dict(env["sums"].args)["level"] for env in envs] == [3, 3, 3, 3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_keys_of_a_page_for_gpus_compose(page: Path, there: Path) -> None:
    argv = next(argv for program, kind, *argv in commands_of(page) if (program, kind) == ("rlx", "train"))
    keys = keys_on_gpus(page)
    given = {key.partition("=")[0] for key in keys}
    first = [part for part in argv if part.partition("=")[0] not in {*given, "model.name"}]
    if "-m" in first:
        configs = [compose(list(element.argv)).cfg for element in expand([*first, *keys, "dry_run=true"], None, TRAIN).elements]
        assert len(configs) == 8
    else:
        configs = [compose([*first, *keys, "dry_run=true"], None, TRAIN).cfg]
    for cfg in configs:
        assert (cfg.hardware.device, cfg.model.warm_start) == ("cuda", None)


def test_sanity_names_and_evaluates_every_objective_that_it_runs(there: Path) -> None:
    page = ROOT / "examples" / "sanity" / "README.md"
    (train,) = [rest for _, kind, *rest in commands_of(page) if kind == "train"]
    ran = {re.findall(r"loss=(\w+)", element.name)[0] for element in expand(train, None, TRAIN).elements}
    evaluated = [re.findall(r"loss=(\w+)", rest[0])[0] for _, kind, *rest in commands_of(page) if kind == "eval"]
    assert sorted(evaluated) == sorted(ran)
    assert all(f"`{name}`" in page.read_text() for name in ran)


@pytest.mark.parametrize("name", ["alphabet_sort", "tool_math"])
def test_an_example_has_the_settings_of_its_preset(name: str, there: Path) -> None:
    example = compose([f"--config-dir=examples/{name}", f"experiment={name}"]).cfg
    preset = compose([f"experiment={name}_tiny"]).cfg
    own = {"max_steps", "eval", "ckpt"} | ({"lora"} if name == "alphabet_sort" else set())  # what the page shows
    for field in fields(preset):
        if field.name not in own:
            assert getattr(example, field.name) == getattr(preset, field.name), field.name


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_reverse_text_runs_as_its_page_says(there: Path) -> None:
    run_page("reverse_text")
    scores = {run: evaluations(there / f"outputs/reverse_text-{run}", "reverse_text") for run in ("sft", "rl")}
    assert sorted(scores["sft"]) == [0, 50, 100, 150, 200, 250]
    assert sorted(scores["rl"]) == [0, 50, 100]
    assert scores["sft"][0] < 0.05
    assert 0.05 < scores["sft"][250] < 0.8, "the teacher errs every second time"
    assert scores["rl"][100] > scores["rl"][0] + 0.25
    evaluated = json.loads((there / "outputs/reverse_text-eval/summary.json").read_text())["rows"]
    assert [row["step"] for row in evaluated][:2] == [0, 50]
    assert evaluated[-1]["step"] == 100
    assert load_run(there / "outputs/reverse_text-rl").model.name.endswith("step_250")
    shutil.rmtree(there / "outputs")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_pretrained_model_learns_as_its_page_says(there: Path) -> None:
    folder = there / "models/SmolLM2"
    made = subprocess.run([sys.executable, str(ROOT / "tools/smollm2.py"), str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    run_page("smollm2", sft=[f"model.name={folder}"])
    before, after = (evaluations(there / f"outputs/smollm2-{run}", "sums") for run in ("sft", "rl"))
    assert (sorted(before), sorted(after)) == ([0, 4, 8], [0, 4, 8, 12, 16])
    # 32 problems tell little, so two evaluations of what both runs learned are compared with the start.
    assert min(before[8], (after[12] + after[16]) / 2) > before[0] + 0.2
    losses = [
        record["loss/nll"] for record, _ in read_metrics(there / "outputs/smollm2-sft/metrics.jsonl") if record["source"] == "trainer"
    ]
    assert losses[-1] < losses[0] / 2
    rows = json.loads((there / "outputs/smollm2-eval/summary.json").read_text())["rows"]
    assert ([row["step"] for row in rows][:2], rows[-1]["step"]) == ([0, 4], 16)
    shutil.rmtree(there / "outputs")
