"""Sweeps: how a command line becomes runs, what is refused before anything starts, and which runs are started, skipped and resumed."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlx.cli import main, sweep
from rlx.cli.commands import TRAIN
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.presets import conf_directory, shipped_groups
from rlx.config.sweeps import element_name, expand, is_sweep
from rlx.metrics import read_metrics
from rlx.plan.process_spec import ProcessSpec
from rlx.runs.status import read_status
from rlx.train.trial import check_built

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("known_environments")]
SHIPPED = sorted(path.stem for path in shipped_groups()["sweeps"].glob("*.yaml"))
TOY = """
    import json, os, sys, time
    from pathlib import Path
    from rlx.checkpoints import folders
    from rlx.config.load import load_run
    from rlx.paths import RunPaths
    root = Path(sys.argv[1])
    cfg, paths = load_run(root), RunPaths(root)
    start = folders.read_start(paths)
    for step in range(start.step if start else 0, cfg.max_steps):
        with (root / "metrics.jsonl").open("a") as file:
            for source in ("orchestrator", "trainer"):
                file.write(json.dumps({"step": step, "source": source, "time": 0, "reward/mean": cfg.seed / 10}) + "\\n")
        if cfg.seed == 3 and step == 1 and not (root.parent / "mended").exists():
            print("seed 3 is broken"); sys.exit(5)
        folders.begin(paths, step + 1)
        folders.finish(paths, step + 1, {}, {})
    (root / "ran").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    if cfg.seed == 9: time.sleep(3600)
"""


def names(*argv: str) -> list[str]:
    return [element.name for element in expand(list(argv), {}).elements]


def test_values_of_groups_and_keys_are_multiplied_and_name_their_directories():
    assert names("-m", "loss=grpo,gspo", "seed=range(2)", "max_steps=3") == [
        "loss=grpo,seed=0",
        "loss=grpo,seed=1",
        "loss=gspo,seed=0",
        "loss=gspo,seed=1",
    ]
    assert expand(["-m", "seed=1,2", "max_steps=3"], {}).elements[1].argv == ("max_steps=3", "seed=2")
    assert names("-m", "env=[sums],[sums,reverse_text]") == ["env=[sums]", "env=[sums,reverse_text]"]
    assert names("-m", "model.name=a/b,c") == ["model.name=a_b", "model.name=c"]


def test_the_folder_of_a_sweep_is_the_same_for_the_same_sweep_and_no_other():
    one = expand(["-m", "seed=1,2", "max_steps=3"], {}).name
    assert one == expand(["max_steps=3", "-m", "seed=1,2", "launcher=slurm", "slurm=dev"], {}).name
    assert one != expand(["-m", "seed=1,2", "max_steps=4"], {}).name
    assert expand(["-m", "sweeps=losses"], {}).name == "losses"
    assert expand(["-m", "seed=1,2", "run.name=mine"], {}).name == "mine"
    assert expand(["-m", "seed=1,2", "run.dir=/tmp/x"], {}).directory == "/tmp/x"


def test_long_names_are_cut_and_stay_different():
    long = [f"inference.api_key={letter * 200}" for letter in "ab"]
    cut = [element_name([line]) for line in long]
    assert len(set(cut)) == 2
    assert all(len(name) <= 120 for name in cut)


def test_the_command_line_wins_over_a_file_of_the_group_sweeps():
    assert names("sweeps=seeds", "seed=7,8") == ["seed=7", "seed=8"]
    assert names("sweeps=async_level", "seed=5") == [f"max_async_level={k}" for k in (0, 1, 2, 4)]


def test_the_command_line_wins_over_the_older_name_of_a_key_in_such_a_file(tmp_path: Path):
    (tmp_path / "sweeps").mkdir()
    params = "{orchestrator.group_size: '4,8', seed: '1,2'}"
    (tmp_path / "sweeps" / "mine.yaml").write_text(f"# @package _global_\nhydra: {{sweeper: {{params: {params}}}}}\n")
    assert names("sweeps=mine", "--config-dir", str(tmp_path), "orchestrator.rollouts_per_example=2") == ["seed=1", "seed=2"]


def test_files_of_ones_own_are_found(tmp_path: Path):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("# @package _global_\nmax_steps: 5\nhydra: {sweeper: {params: {seed: '1,2'}}}\n")
    elements = sweep.checked(expand(["sweeps=mine", "--config-dir", str(tmp_path)], {}).elements, tmp_path / "out", TRAIN)
    assert [(e.cfg.seed, e.cfg.max_steps, e.cfg.run.dir) for e in elements] == [
        (1, 5, f"{tmp_path}/out/seed=1"),
        (2, 5, f"{tmp_path}/out/seed=2"),
    ]


@pytest.mark.parametrize(
    ("argv", "environ", "several"),
    [
        ("sweeps=seeds", {}, True),
        ("+sweeps=seeds", {}, True),
        ("", {"RLX_SWEEPS": "seeds"}, True),
        ("-m seed=1,2", {}, True),
        ("sweeps=null", {}, False),
        ("sweeps=null", {"RLX_SWEEPS": "seeds"}, False),
        ("seed=1", {"RLX_SWEEPS": "null"}, False),
    ],
)
def test_a_file_of_the_group_sweeps_makes_several_runs_however_it_is_chosen(argv: str, environ: dict[str, str], several: bool):
    assert is_sweep(argv.split(), environ) is several
    if several:
        assert len(expand(argv.split(), environ).elements) >= 2
    else:
        assert compose(argv.split(), environ).cfg.max_steps == 100


@functools.cache
def shipped(name: str) -> list:
    return sweep.checked(expand([f"sweeps={name}", "dry_run=true"], {}).elements, Path("outputs"), TRAIN)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_sweep_composes_checks_and_plans(name: str):
    elements = shipped(name)
    assert len({str(e.paths.root) for e in elements}) == len(elements) >= 2
    assert all(e.plan for e in elements)
    for element in elements:
        check_built(element.cfg)


def test_the_shipped_sweeps_are_what_they_say():
    def of(name: str) -> list:
        return [e.cfg for e in shipped(name)]

    losses = {path.stem for path in (conf_directory() / "loss").glob("*.yaml")} - {"sft", "opd", "sdft"}
    assert {cfg.run.name for cfg in of("losses")} == {f"loss={loss}" for loss in losses}
    clips = of("lr_clip")
    assert {(cfg.optim["lr"], cfg.loss["eps_low"]) for cfg in clips} == {(lr, e) for lr in (1e-4, 3e-4, 1e-3) for e in (0.1, 0.2, 0.4)}
    assert all(cfg.loss["eps_high"] == cfg.loss["eps_low"] for cfg in clips)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-m", "max_steps=3"], "nothing here has several values"),
        (["-m", "seed=1,1"], "two runs of the sweep have the same directory seed=1"),
        (["-m", "loss=grpo,grppo"], "there is no loss=grppo"),
        (["-m", "seed=1,2", "seq_len=2"], "2 of 2 runs)"),
        (["-m", "orchestrator.batch_size=64,65"], "(in orchestrator.batch_size=65; 1 of 2 runs)"),
        (["-m", "launcher=local,slurm", "hardware=cpu", "dry_run=true"], "launched together"),
        (["sweeps=lossses"], "Did you mean sweeps=losses?"),
    ],
)
def test_a_mistake_in_any_run_stops_the_sweep_before_it_starts(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *argv]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def toy_plan(cfg, directory):
    code = textwrap.dedent(TOY)
    return [ProcessSpec(role="trainer", replica=0, node=0, gpus=(), argv=(sys.executable, "-c", code, str(cfg.run.dir)))]


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces real runs by toy runs, in a directory of their own."""
    monkeypatch.setattr("rlx.plan.make.make_plan", toy_plan)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def test_a_local_sweep_ends_with_a_table_and_goes_on_where_it_was(toys: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["train", "-m", "seed=1,2,3", "max_steps=3", f"run.dir={toys}", "launcher.array_parallelism=2"]
    assert main(argv) == 1
    text = capsys.readouterr().out
    assert [line.split()[:4] for line in text.splitlines()[-4:-1]] == [
        ["seed=1", "completed", "3/3", "0.100"],
        ["seed=2", "completed", "3/3", "0.200"],
        ["seed=3", "failed", "2/3", "0.300"],
    ]
    assert text.splitlines()[-2].endswith("trainer: exit code 5: seed 3 is broken")
    assert text.splitlines()[-1].endswith(f"report {toys.name}")
    before = {seed: (toys / f"seed={seed}" / "status.json").read_text() for seed in (1, 2)}

    (toys / "mended").touch()
    assert main(argv) == 0
    text, said = capsys.readouterr()
    assert "2 already completed; 1 to resume" in text
    assert "resuming after 1 steps" in said
    assert [(r["step"], r["source"]) for r, _ in read_metrics(toys / "seed=3" / "metrics.jsonl")] == [
        (step, source) for step in range(3) for source in ("orchestrator", "trainer")
    ]
    assert text.splitlines()[-2].split()[:4] == ["seed=3", "completed", "3/3", "0.300"]
    assert before == {seed: (toys / f"seed={seed}" / "status.json").read_text() for seed in (1, 2)}

    with pytest.raises(ConfigError, match=r"orchestrator.batch_size: 128 ≠ 512"):
        sweep.run(["-m", "seed=1,2", "max_steps=4", "orchestrator.batch_size=512", f"run.dir={toys}"], TRAIN)
    assert main([*argv, "max_steps=4", "ckpt.interval=2", "launcher.grace=4"]) == 0, "a sweep is extended like one run"
    text, said = capsys.readouterr()
    assert "(3 to resume)" in text
    assert "max_steps: 3 → 4" in said
    assert [line.split()[:3] for line in text.splitlines()[-4:-1]] == [[f"seed={seed}", "completed", "4/4"] for seed in (1, 2, 3)]


def test_an_interrupted_sweep_stops_its_runs(toys: Path):
    code = f"""
import sys
from rlx.cli import main
import rlx.plan.make
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_sweep import toy_plan
rlx.plan.make.make_plan = toy_plan
sys.exit(main(["train", "-m", "seed=9,8", "max_steps=3", "run.dir={toys}"]))
"""
    pool = subprocess.Popen([sys.executable, "-c", code], cwd=toys.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 300
    while not (toys / "seed=9" / "ran").exists():
        assert time.monotonic() < deadline
        assert pool.poll() is None, pool.stdout.read()
        time.sleep(0.05)
    pool.send_signal(signal.SIGTERM)
    out, _ = pool.communicate(timeout=600)
    assert pool.returncode == 130
    status = read_status(sweep_paths(toys / "seed=9"))
    assert status.state == "interrupted"
    assert not (toys / "seed=8" / "ran").exists()
    assert "seed=9" in out


def sweep_paths(root: Path):
    from rlx.paths import RunPaths

    return RunPaths(root)


def test_runs_with_gpus_get_different_ones(toys: Path, monkeypatch: pytest.MonkeyPatch):
    from rlx.launch import sweep as launch_sweep

    elements = sweep.checked(expand(["-m", "seed=1,2,3", "hardware=gpu2", "dry_run=true"], {}).elements, toys, TRAIN)
    assert launch_sweep.check_local(elements, ["4", "5", "6", "7"], None) == 2
    with pytest.raises(ConfigError, match="3 runs of 2 GPUs need 6, and 4 are visible"):
        launch_sweep.check_local(elements, ["4", "5", "6", "7"], 3)


def test_runs_of_several_sizes_share_no_gpus(toys: Path, monkeypatch: pytest.MonkeyPatch):
    from rlx.launch import sweep as launch_sweep

    runs: list[tuple[list[str], list[bool]]] = []  # by run, its GPUs and whether it has ended

    class Child:
        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            mine, over = env["CUDA_VISIBLE_DEVICES"].split(","), [False]
            assert not {gpu for gpus, ended in runs if not ended[0] for gpu in gpus} & set(mine)
            self.looks, self.over = 0, over
            runs.append((mine, over))

        def poll(self) -> int | None:
            self.looks += 1
            self.over[0] = self.looks > 2
            return 0 if self.over[0] else None

    monkeypatch.setattr(launch_sweep.subprocess, "Popen", Child)
    monkeypatch.setattr(launch_sweep, "row_of", lambda _: ["completed"])
    monkeypatch.setattr(launch_sweep, "POLL_SECONDS", 0.0)
    elements = sweep.checked(expand(["-m", "seed=1,2", "hardware=gpu4,gpu2", "dry_run=true"], {}).elements, toys, TRAIN)
    launch_sweep.run_pool(elements, 2, [str(gpu) for gpu in range(8)], lambda _: None)
    assert sorted(len(gpus) for gpus, _ in runs) == [2, 2, 4, 4]


def test_a_sweep_whose_launcher_died_before_it_started_anything_is_started_again(toys: Path):
    from rlx.launch import sweep as launch_sweep

    line = ["-m", "seed=1,2", "max_steps=2", f"run.dir={toys}"]
    elements = sweep.checked(expand(line, {}).elements, toys, TRAIN)
    launch_sweep.release(launch_sweep.make_directories(elements))  # as the launcher's death does
    assert sweep.run(line, TRAIN) == 0


def test_a_secret_names_no_directory_of_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "inference.api_key=one-key,two-key"]) == 2
    assert main(["train", "inference.api_key=one-key,two-key"]) == 2
    assert main(["train", "-m", "inference={api_key: one-key},{api_key: two-key}"]) == 2
    assert main(["train", "seed=x", "inference.api_key=[one-key]", "inference.api_key = one-key"]) == 2
    assert main(["train", "seed=x", "inference.api_key=[one-key]"]) == 2
    said = capsys.readouterr().err
    assert "inference.api_key is secret" in said
    assert "inference.api_key=<secret>" in said
    assert "-key" not in said
