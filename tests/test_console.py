"""The display of a run: the live panel, the plain lines, the closing summary. With the files of made-up runs."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rich.console
from test_checkpoint_folders import write as write_checkpoint

from rlx.checkpoints.folders import Start, write_start
from rlx.cli import display as module
from rlx.cli import main
from rlx.cli.console import Console
from rlx.cli.display import sparkline
from rlx.cli.eval_display import PlayDisplay
from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT, SYNTHESIZE
from rlx.config.schema import Config
from rlx.launch.stall import STACKS
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.runs.rewind import trim_metrics
from rlx.runs.status import Restart, Status

DROPS = {"rollouts/dropped_off_policy": 16.0, "rollouts/failed_timeout": 2.0, "rollouts/failed_no_answer": 0.0}


def add_step(run: Path, step: int, at: float, **more: float) -> None:
    """Append one step's records: two steps per second, and a growing reward."""
    orchestrator = {
        "reward/mean": 0.1 * (step + 1),
        "perf/inference_tokens_per_second": 4200.0,
        "time/step": 0.5,
        "time/wait_rollouts": 0.4,
        "time/update_weights": 0.2,
    }
    trainer = {
        "off_policy/lag_mean": 0.5,
        "off_policy/lag_max": 1.0,
        "perf/tokens_per_second": 36_500.0,
        "time/step": 0.5,
        "time/wait_batch": 0.3,
        "time/forward_backward": 0.2,
        "time/optimizer": 0.001,
    }
    with RunPaths(run).metrics.open("a") as file:
        for source, values in (("orchestrator", orchestrator | more), ("trainer", trainer)):
            file.write(json.dumps({"step": step, "source": source, "time": at, **values}) + "\n")


def beat(run: Path, name: str, phase: str, age: float = 0.0) -> None:
    folder = RunPaths(run).heartbeats
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "phase": phase, "since": now - 7, "time": now - age}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run"
    folder.mkdir()
    return folder


def rendered(console: Console) -> str:
    """The live panel as text in a terminal of 100 columns."""
    terminal = rich.console.Console(file=io.StringIO(), width=100, record=True)
    terminal.print(console._panel())
    return terminal.export_text()


def test_the_live_panel_shows_what_starts_before_the_first_step(run, capsys):
    beat(run, "orchestrator", "of an earlier attempt", age=60)
    console = Console(run, Config(max_steps=10))
    beat(run, "inference_0", "loading [bold]model[/]")
    beat(run, "trainer", "done")
    console.update()
    text = rendered(console)
    assert "my-run" in text
    assert "inference_0" in text
    assert "loading [bold]model[/]" in text, "a role's text is not read as markup"
    assert "0:07" in text
    assert "trainer" not in text
    assert "orchestrator" not in text
    assert "ETA" not in text


def test_a_stall_is_shown_once_and_its_end_too(run, capsys):
    paths = RunPaths(run)
    paths.logs(0).mkdir(parents=True)
    paths.latest_logs.symlink_to("attempt_0")
    console = Console(run, Config(max_steps=10))
    capsys.readouterr()

    def said() -> str:
        console._looked = 0.0
        console.update()
        return capsys.readouterr().out

    head = "no progress for 300 s: waiting for trainer\ntrainer: training step 3"
    paths.stall_of(0, 1).write_text(f"{head}\n{STACKS}\n== trainer\n")
    assert said() == f"{head}\n(stacks: {run}/logs/latest/stall_1.txt)\n"
    assert said() == ""
    assert "waiting for trainer" in rendered(console)
    paths.stall_of(0, 1).write_text(f"{head}\nprogress again, after 412 s\n{STACKS}\n== trainer\n")
    assert said() == "progress again, after 412 s\n"


def test_a_server_that_died_and_starts_again_is_said_at_once_and_counted_at_the_end(run, capsys):
    console = Console(run, Config(max_steps=10))
    capsys.readouterr()
    died = [Restart(name=f"inference_{number}", reason="killed by SIGKILL", log=f"logs/{number}.log", time=0.0) for number in (0, 1, 0)]
    for restarts in (died[:1], died):
        Status(max_steps=10, restarts=restarts).write(RunPaths(run))
        console._looked = 0.0
        console.update()
    said = capsys.readouterr().out
    assert said.count("killed by SIGKILL; it starts again") == 3
    assert f"(its log: {run}/logs/1.log)" in said
    assert "started again: inference_0 2 ×, inference_1 1 ×" in rendered(console)
    Status(max_steps=10, restarts=died, state="completed").write(RunPaths(run))
    assert "  restarted inference_0 2 ×, inference_1 1 ×; the last: killed by SIGKILL, logs/0.log" in Console(run, Config()).summary(0)


def test_the_live_panel_shows_steps_reward_lag_speed_stages_and_the_time_left(run):
    console = Console(run, Config(max_steps=10))
    for step in range(4):
        add_step(run, step, 1000.0 + 0.5 * step)
    beat(run, "trainer", "waiting for batch 4")
    console.history.read()
    text = rendered(console)
    for part in (
        "step 4/10",
        "2.00 steps/s",
        "ETA 0:03",
        "reward 0.400",
        "▁▃▆█",
        "lag 0.5 (max 1)",
        "4.2k tok/s sampled",
        "36.5k tok/s trained",
    ):
        assert part in text, (part, text)
    assert "orchestrator 0:02: wait for rollouts 80% · update servers 40%" in text
    assert "waiting for batch 4" in text
    assert "━" in text, "the progress bar"


def test_without_a_terminal_there_is_a_line_for_every_phase_and_no_more_than_one_a_second_for_steps(run, capsys, monkeypatch):
    at, since = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: at)
    monkeypatch.setattr(time, "monotonic", lambda: since)
    console = Console(run, Config(max_steps=30))
    for done in range(3):
        beat(run, "prepare", f"warm {done}/250")
        console.update()
    assert capsys.readouterr().out.splitlines() == [f"run {run}", "[0:00] prepare: warm 0/250"]
    for step in range(3):
        add_step(run, step, 1000.0 + 0.5 * step)
        console.update()
    first, *more = capsys.readouterr().out.splitlines()
    assert first == "[0:00] step 1/30   reward 0.100   lag 0.5 (max 1)   4.2k tok/s sampled   36.5k tok/s trained"
    assert more == [], "less than a second later"
    monkeypatch.setattr(module, "LINE_INTERVAL", 0.0)
    console.update()
    assert capsys.readouterr().out.strip().endswith("2.00 steps/s   ETA 0:13")
    assert "\x1b" not in first


def test_a_closed_pipe_ends_the_output_and_not_the_run():
    code = "import os\nfrom rlx.cli.display import tell\nfor n in range(3): tell('x')\nprint('z', flush=True); os._exit(7)"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (7, b"")


def finished(run: Path, *, max_steps: int = 10, state: str = "completed") -> Console:
    for step in range(max_steps):
        add_step(run, step, 1000.0 + 0.5 * step, **(DROPS if step == max_steps - 1 else {}))
    Status(state=state).write(RunPaths(run))
    console = Console(run, Config(max_steps=max_steps, seed=4))
    console.history.read()
    return console


def test_the_summary_has_rewards_times_speed_and_what_was_dropped(run):
    lines = finished(run).summary(0).splitlines()
    assert lines[1].startswith("my-run: completed after 10 of 10 steps, ")
    assert lines[2] == f"  reward    0.300 → 0.800  {sparkline(list(range(10)))}  (means of the first and last 5)"
    assert lines[3] == "  time      trainer 0:05: wait for batch 60% · forward and backward 40%"
    assert lines[4] == "            orchestrator 0:05: wait for rollouts 80% · update servers 40%"
    assert lines[5] == "  speed     2.00 steps/s · 4.2k tokens/s sampled · 36.5k tokens/s trained"
    assert lines[6] == "  dropped   16 dropped off policy, 2 failed timeout"
    assert lines[7] == f"  run       {run}"
    add_step(run, 0, 1000.0)
    assert "  dropped   nothing\n" in Console(run, Config(max_steps=1)).summary(0)


def test_the_last_evaluation_is_shown_with_its_interval_and_the_best_checkpoint(run):
    writer = MetricsWriter(RunPaths(run).metrics, "eval")
    for step, score in ((0, 0.25), (8, 0.75)):
        writer.write(step, {"eval/math/avg@4": score, "eval/math/avg@4_low": score - 0.1, "eval/math/avg@4_high": score + 0.1})
        write_checkpoint(RunPaths(run), step)
    console = finished(run)
    console.cfg.ckpt.keep_best = "eval/math/avg@4"
    assert "eval math avg@4 0.750 (step 8)" in rendered(console)
    lines = console.summary(0).splitlines()
    assert lines[3] == "  eval      math avg@4: 0.250 → 0.750 at step 8  [0.650, 0.850]"
    assert lines[4] == f"  best      eval/math/avg@4 0.750: {RunPaths(run).checkpoint_of(8)}"


def next_commands(console: Console) -> list[str]:
    """The suggested commands, without their comments."""
    lines = console.summary(0).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("  next"))
    return [line[12:].split("   #")[0] for line in lines[begin:]]


def test_a_way_to_look_at_the_last_rollouts_is_suggested_where_there_are_any(run, capsys, monkeypatch):
    from rlx.rollout.record import write_rollouts

    monkeypatch.setattr(sys, "argv", ["/there/rlx/cli/__main__.py"])
    console = finished(run, max_steps=2)
    assert not any(" view " in command for command in next_commands(console))
    write_rollouts(console.paths.rollouts_of(1), [], [])
    (look,) = [command for command in next_commands(console) if " view " in command]
    _, option, name, command, path = shlex.split(look)
    assert (option, name, command, path) == ("-m", "rlx.cli", "view", str(console.paths.root))
    for command in ("view", "show"):
        assert main([command, path]) == 0
        assert main([command, path, "step=7"]) == 2
        assert "only of steps 1 … 1" in capsys.readouterr().err
        assert main([command, path + ".absent"]) == 2
        assert "there is no directory" in capsys.readouterr().err


def test_a_run_that_failed_points_to_its_logs_and_suggests_nothing(run):
    text = finished(run, state="failed").summary(1)
    assert "my-run: failed after" in text
    assert text.endswith(f"  look at   {run}/logs/latest/")
    assert "newest checkpoint" not in text
    assert "next" not in text


def test_an_interrupted_run_names_its_newest_checkpoint_and_the_command_that_goes_on(run):
    write_checkpoint(RunPaths(run), 5)
    console = finished(run, state="interrupted", max_steps=8)
    text = console.summary(130)
    assert "my-run: interrupted after 8 of 8 steps; the newest checkpoint is step 5, " in text
    (line,) = [line for line in text.splitlines() if line.startswith("  go on")]
    assert line.endswith(f" --config-dir {run} --config-name config resume=latest")


def test_a_steps_line_has_the_reward_of_that_step_although_sampling_is_ahead(run, capsys):
    for step in range(2):
        add_step(run, step, at=1.0 + step)
    MetricsWriter(RunPaths(run).metrics, "orchestrator").write(2, {"reward/mean": 0.9})
    Console(run, compose(["max_steps=8"], {}).cfg).update()
    assert "step 2/8   reward 0.200" in capsys.readouterr().out


def test_an_attempt_that_goes_on_shows_nothing_of_the_one_before_it(run, capsys):
    """As after a requeue: the same console, the run back at a checkpoint, and its roles starting."""
    paths = RunPaths(run)
    trainer, orchestrator = (MetricsWriter(paths.metrics, source) for source in ("trainer", "orchestrator"))
    for step in range(6):
        orchestrator.write(step, {"reward/mean": 0.9})
        trainer.write(step, {"off_policy/lag_mean": 1.0, "off_policy/lag_max": 1.0})
    console = Console(run, compose(["max_steps=8"], {}).cfg)
    console.update()
    assert "step 6/8   reward 0.900" in capsys.readouterr().out
    paths.logs(1).mkdir(parents=True)
    paths.latest_logs.symlink_to("attempt_1")
    write_start(paths, Start(step=4, checkpoint=paths.checkpoint_of(4)))
    trim_metrics(paths, 4)
    beat(run, "trainer", "reading checkpoint 4")
    console.update()
    said = capsys.readouterr().out
    assert "trainer: reading checkpoint 4" in said
    assert "reward" not in said
    assert console.history.steps == 4
    assert console.history.last("reward/mean", "orchestrator") is None
    console._printed_at = 0.0
    for writer, name in (
        (MetricsWriter(paths.metrics, "orchestrator"), "reward/mean"),
        (MetricsWriter(paths.metrics, "trainer"), "loss/total"),
    ):
        writer.write(4, {name: 0.25})
    console.update()
    said = capsys.readouterr().out
    assert "step 5/8   reward 0.250" in said
    assert "steps/s" not in said, "the pace must not include the pause between the attempts"


def test_the_summary_says_which_kernels_trained(run):
    console = Console(run, Config())
    assert "kernels" not in console.summary(1), "the trainer did not get that far"
    console.paths.kernels.write_text('{"logprob": "triton", "layers": "rope, rms_norm of qwen3; 11 modules", "warning": "rounding clips"}')
    text = console.summary(0)
    assert "  kernels   log-probabilities by triton · Liger's layer kernels rope, rms_norm of qwen3; 11 modules\n" in text
    assert "  warning   rounding clips\n" in text


def test_supervised_training_shows_losses_what_was_left_out_and_how_to_train_on(tmp_path: Path):
    cfg = compose(["data=fake", f"run.dir={tmp_path}", "max_steps=4"], {}, SFT).cfg
    trainer, held_out = (MetricsWriter(RunPaths(tmp_path).metrics, source) for source in ("trainer", "val"))
    for step in range(4):
        trainer.write(step, {"loss/nll": 2.0 - step / 4, "data/overlong": 1.0, "data/epoch": 0.5, "time/step": 1.0})
    held_out.write(4, {"val/loss": 1.5, "val/truncated": 2.0})
    console = Console(tmp_path, cfg)
    console.update()
    assert "step 4/4" in rendered(console)
    assert "loss 1.250   val 1.500 (step 4)   epoch 0.50" in rendered(console)
    text = console.summary(0)
    assert "  loss      1.625 → 1.625" in text
    assert "  dropped   4 samples longer than seq_len, of the validation 2 samples cut to seq_len" in text
    assert f" model.name={tmp_path}/weights/step_4   # reinforcement learning from the result" in text


def test_an_evaluation_shows_its_rollouts_the_time_left_and_what_is_in_flight(tmp_path: Path, capsys):
    now = {"what": "sums at step 10", "done": 60, "total": 100, "before": 50, "seconds": 5.0}
    now |= {"tokens": 500, "in_flight": 8, "oldest": 12.0, "failed": 3}
    display = PlayDisplay(tmp_path, compose(["env=sums", "num_examples=100"], {}, EVAL).cfg)
    assert display.progress() is None
    display.paths.progress.write_text(json.dumps(now))
    display.update()
    line = capsys.readouterr().out.splitlines()[-1].partition("] ")[2]
    assert line == (
        "sums at step 10: rollouts 60/100   2.0 rollouts/s   100 tok/s   8 in flight, the oldest for 0:12   3 failed   ETA 0:20"
    )
    display.paths.progress.write_text(json.dumps(now | {"before": 60}))
    assert display.progress().left is None


def test_synthesized_data_is_counted_and_the_next_command_trains_on_it(tmp_path: Path):
    display = PlayDisplay(tmp_path, compose(["env=sums"], {}, SYNTHESIZE).cfg)
    metadata = display.paths.synthesized.with_name("metadata.json")
    metadata.parent.mkdir()
    counts = {"played": 8, "kept": 2}
    found = {"rollouts": counts | {"dropped": {"reward": 6}}, "examples": counts, "reward": {"played": 0.25, "kept": 1.0}}
    metadata.write_text(json.dumps(found | {"file": str(metadata), "rows": 2, "raw_text_rows": 0}))
    text = display.summary(0)
    assert "  kept      2 rollouts of 2 examples, mean reward 1.000\n  dropped   6 reward\n" in text
    assert f"sft data.name={tmp_path}/data/train.jsonl model=… seq_len=" in text
