"""`rlx report`: what the page of a run and of a sweep says, that untrusted text stays text, and that broken directories are no obstacle."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import re
import shlex
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import zstandard
from launch_configs import config

from rlx.cli import main
from rlx.config.load import compose
from rlx.config.roots import EVAL, SYNTHESIZE, Root
from rlx.config.schema import RunConfig
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.report.chart import Chart, Curve, draw, kept_points, number
from rlx.report.gather import gather
from rlx.report.settings import arrange
from rlx.report.sweep import _mean as mean_curve
from rlx.report.sweep import aligned, first_missing, shrunk
from rlx.runs.run import Run
from rlx.runs.run_dir import create, write_description
from rlx.runs.status import Cause, Status

EVIL = "<script>window.pwned=1</script></pre><img src=http://evil.example/x onerror=alert(1)>\x1b[31m\u202e"


def make(root: Path, rewards: list[float], *, seed: int = 0, loss: str = "grpo", lr: float = 1e-4, state: str = "completed") -> RunPaths:
    """A run directory as a sweep makes it, with records of each step."""
    cfg = replace(config("cpu"), seed=seed, max_steps=6, run=RunConfig(name=root.name, dir=str(root)))
    cfg = replace(cfg, loss={**cfg.loss, "_target_": f"rlx.losses.{loss}.{loss}"}, optim={**cfg.optim, "lr": lr})
    paths, lock = create(cfg, [f"loss={loss}", f"optim.lr={lr}", f"seed={seed}"], make_plan(cfg, root))
    lock.close()
    orchestrator, trainer = MetricsWriter(paths.metrics, "orchestrator"), MetricsWriter(paths.metrics, "trainer")
    for step, reward in enumerate(rewards):
        orchestrator.write(step, {"reward/mean": reward, "reward/std": 0.1, "rollouts/dropped_off_policy": 8.0 * step})
        trainer.write(step, {"policy/entropy": 1 / (step + 1), "time/step": 2.0, "time/wait_batch": 0.5})
    status = Status(step=len(rewards), max_steps=6)
    cause = Cause(role="trainer", replica=0, returncode=1, reason="exit code 1", log="logs/latest/trainer.log", last_lines=("boom <b>",))
    status.finish(state, cause if state == "failed" else None)
    status.write(paths)
    return paths


def page_of(directory: Path) -> str:
    assert main(["report", str(directory)]) == 0
    return (directory / "report.html").read_text()


class Parsed(HTMLParser):
    """The tags and attributes of a page, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_commands_on_a_page_survive_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "env.args.text='a b'"])
    paths = make(tmp_path / "sp ä" / "ru n", [0.1])
    texts = Parsed(page_of(paths.root)).texts
    assert shlex.split(next(text for text in texts if text.startswith("bash "))) == ["bash", str(paths.reproduce)]
    assert shlex.split(next(text for text in texts if text.startswith("train.py "))) == sys.argv


@pytest.mark.parametrize("what", ["run", "sweep"])
def test_untrusted_text_stays_text_and_nothing_is_fetched(what: str, tmp_path: Path) -> None:
    paths = make(tmp_path / "run", [0.1, 0.9], state="failed")
    record = {"env": EVIL, "reward": 1.0, "advantage": 0.5, "prompt": EVIL, "stop": EVIL, "answer": EVIL, "num_tokens": 3}
    record["completion"] = [{"role": EVIL, "content": [{"text": EVIL}], "tool_calls": [{"name": EVIL}]}]
    paths.rollouts.mkdir()
    paths.rollouts_of(1).write_bytes(zstandard.ZstdCompressor().compress(json.dumps(record).encode() + b"\n"))
    MetricsWriter(paths.metrics, "orchestrator").write(2, {f"reward/{EVIL}/mean": 1.0, "reward/other/mean": 0.5, "reward/mean": 0.5})
    MetricsWriter(paths.metrics, "eval").write(2, {f"eval/{quoted}/avg@1": 0.5 for quoted in ('x" onload="alert(1)', "x><img src=y>")})
    page = page_of(paths.root if what == "run" else tmp_path)
    parsed = Parsed(page)
    assert not [tag for tag, _ in parsed.tags if tag in ("img", "iframe", "link", "object")]
    assert [attrs for tag, attrs in parsed.tags if tag == "script" and attrs.get("type") != "application/json"] == [{}], "one script, ours"
    assert not [attrs for _, attrs in parsed.tags if {"src", "onerror", "onload", "style"} & set(attrs)]
    links = {str(attrs["href"]) for tag, attrs in parsed.tags if tag == "a"}
    assert {link for link in links if not link.startswith("#")} == ({"timeline.json.gz"} if what == "run" else set())
    shown = "".join(parsed.texts)
    assert EVIL.partition("\x1b")[0] in shown, "shown as it was written"
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert what == "sweep" or "boom <b>" in shown


def test_the_policy_of_the_page_allows_its_own_script_and_no_other(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", [0.1]).root)
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    assert policy.startswith("default-src 'none'; ")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}';" in policy


def test_a_failed_run_says_why_and_its_numbers_are_in_tables_too(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", [0.125, 0.5], state="failed").root)
    assert "trainer 0: exit code 1" in page
    assert "2 of 6" in page
    assert "<td>0.125 <small>[0.025, 0.225]</small></td>" in page, "reward of step 0 with its spread, readable without scripts"
    assert "<td>dropped off policy</td><td>8</td>" in page


@pytest.mark.parametrize(
    "content", [{}, {"status.json": "{"}, {"config.yaml": "a: ["}, {"metrics.jsonl": "{broken\n", "provenance.json": "[]"}]
)
def test_half_made_and_damaged_directories_get_a_page(tmp_path: Path, content: dict[str, str]) -> None:
    paths = make(tmp_path / "run", [0.5])
    for name, text in content.items():
        (paths.root / name).write_text(text)
    if not content:
        for path in (paths.status, paths.metrics, paths.provenance):
            path.unlink()
    page = page_of(paths.root)
    assert ("Not readable" in page) == (bool(content) and "metrics.jsonl" not in content)
    assert gather(Run(paths.root)).name == "run"


@pytest.mark.parametrize("what", ["run", "sweep"])
def test_odd_values_hide_nothing_else(what: str, tmp_path: Path) -> None:
    paths = make(tmp_path / "run", [0.5, 1e308, -1e308])
    odd = {"step": 4, "source": "orchestrator", "reward/mean": "good", "filter/x": [1], "length/completion_mean": 10**400}
    with paths.metrics.open("a") as file:
        file.write(json.dumps(odd) + "\n" + json.dumps(odd | {"step": "x"}) + "\n")
    paths.provenance.write_text(json.dumps({"source": "x", "python": 3, "packages": [1], "machine": {"gpus": 7}}))
    paths.rollouts.mkdir()
    paths.rollouts_of(1).write_bytes(zstandard.compress(b'[1]\n{"env": "sums", "reward": 0.25}\n'))
    page = page_of(paths.root if what == "run" else tmp_path)
    assert "2 values are not finite" in page or what == "sweep"
    assert "reward 0.25" in page or what == "sweep"


def test_a_report_of_a_dry_run_leaves_the_directory_free(tmp_path: Path) -> None:
    cfg = replace(config("cpu"), run=RunConfig(name="run", dir=str(tmp_path / "run")))
    plan = make_plan(cfg, tmp_path / "run")
    assert write_description(cfg, [], plan) is not None
    assert "not started" in page_of(tmp_path / "run")
    create(cfg, [], plan)[1].close()


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([str(tmp_path / "absent")], [str(tmp_path)], [str(tmp_path), "--out"], ["--typo", str(tmp_path)], []):
        assert main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    assert "there is no directory" in said
    assert "is neither a run's directory nor a sweep's" in said
    assert not (tmp_path / "report.html").exists()


def other(root: Path, made_by: Root) -> Path:
    """A directory of a command that trains nothing."""
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(compose(["env=sums", "dry_run=true"], {}, made_by).yaml)
    return root


@pytest.mark.parametrize("made_by", [EVAL, SYNTHESIZE])
def test_a_directory_of_another_command_gets_no_report_and_hides_no_other(
    made_by: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = other(tmp_path / "folder" / "other", made_by)
    for directory in (single, tmp_path / "folder"):
        assert main(["report", str(directory)]) == 2
        assert f"of `rlx {made_by.command}`; a report shows runs that train" in capsys.readouterr().err
    make(tmp_path / "folder" / "mine", [0.5] * 6)
    page = page_of(tmp_path / "folder")
    assert f"other is a directory of `rlx {made_by.command}`" in "".join(Parsed(page).texts)
    assert "1 completed" in page


def sweep(root: Path) -> Path:
    """Two objectives and two learning rates with two seeds each; one run failed, one has not started."""
    for loss, lr, base in (("grpo", 1e-4, 0.8), ("grpo", 1e-3, 0.6), ("gspo", 1e-4, 0.7), ("gspo", 1e-3, 0.5)):
        for seed in (1, 2):
            failed = (loss, lr, seed) == ("gspo", 1e-3, 2)
            rewards = [base + seed / 100] * (3 if failed else 6)
            make(
                root / f"loss={loss},optim.lr={lr},seed={seed}",
                rewards,
                seed=seed,
                loss=loss,
                lr=lr,
                state="failed" if failed else "completed",
            )
    return root


def test_a_sweep_groups_its_runs_by_everything_but_the_seed(tmp_path: Path) -> None:
    sweep(tmp_path / "sweep")
    found = arrange([gather(Run(path)) for path in sorted((tmp_path / "sweep").iterdir())])
    assert found.keys == ["loss", "optim.lr"]
    assert found.leaves == ["loss._target_", "optim.lr"]
    assert [(each.label, len(each.runs), len(each.scored)) for each in found.settings] == [
        ("loss=grpo, optim.lr=0.0001", 2, 2),
        ("loss=gspo, optim.lr=0.0001", 2, 2),
        ("loss=grpo, optim.lr=0.001", 2, 2),
        ("loss=gspo, optim.lr=0.001", 2, 1),
    ]
    best, worst = found.settings[0].iqm, found.settings[3].iqm
    assert best is not None
    assert (best.value, best.low, best.high) == pytest.approx((0.815, 0.81, 0.82))
    assert worst is not None
    assert (worst.value, worst.low) == (pytest.approx(0.51), None)


def test_a_sweep_may_be_scored_by_a_held_out_metric_paired_by_seed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for loss, seed, score in (("grpo", 1, 0.2), ("grpo", 2, 0.6), ("gspo", 1, 0.1), ("gspo", 2, 0.5)):
        paths = make(tmp_path / "sweep" / f"{loss}{seed}", [0.9] * 6, seed=seed, loss=loss)
        MetricsWriter(paths.metrics, "eval").write(6, {"eval/math/avg@1": score})
    arguments = ["report", str(tmp_path / "sweep"), "--score", "eval/math/avg@1", "--csv", str(tmp_path / "runs.csv")]
    assert main(arguments) == 0
    lines = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [(line["loss"], line["seed"], float(line["eval/math/avg@1"])) for line in lines] == [
        ("grpo", "1", 0.2),
        ("grpo", "2", 0.6),
        ("gspo", "1", 0.1),
        ("gspo", "2", 0.5),
    ]
    best, other = arrange([gather(Run(path), None, "eval/math/avg@1") for path in sorted((tmp_path / "sweep").glob("g*"))]).settings
    difference = other.minus(best)
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == pytest.approx((-0.1, -0.1, -0.1)), "what a seed does to both cancels out"
    assert "eval/math/avg@1" in "".join(Parsed((tmp_path / "sweep" / "report.html").read_text()).texts)
    assert main(["report", str(tmp_path / "sweep"), "--score", "eval/math/avg@9"]) == 2
    assert "eval/math/avg@1" in capsys.readouterr().err


def test_a_sweep_names_the_runs_that_failed(tmp_path: Path) -> None:
    page = page_of(sweep(tmp_path / "sweep"))
    assert "7 completed, 1 failed" in page
    assert "1 of 8 runs are not completed" in page
    assert "loss=gspo,optim.lr=0.001,seed=2: failed after 3 of 6 steps: trainer 0, exit code 1" in page


def test_a_sweep_of_supervised_runs_has_no_rewards_and_shows_losses(tmp_path: Path) -> None:
    for seed in (1, 2):
        paths = make(tmp_path / "sweep" / f"seed={seed}", [], seed=seed)
        for step in range(6):
            MetricsWriter(paths.metrics, "trainer").write(step, {"loss/nll": 2.0 - step / 10})
        MetricsWriter(paths.metrics, "val").write(6, {"val/loss": 1.5})
    page = page_of(tmp_path / "sweep")
    assert "The completed runs have no rewards, so there are no final scores." in page
    assert "No run is completed yet" not in page
    assert "Negative log-probability" in page
    assert "Validation loss" in page


def test_runs_whose_configuration_is_not_readable_are_not_lumped_together(tmp_path: Path) -> None:
    for path in sorted(sweep(tmp_path / "sweep").iterdir()):
        (path / "config.yaml").write_text("from: another version")
    found = arrange([gather(Run(path)) for path in sorted((tmp_path / "sweep").iterdir())])
    assert [len(setting.runs) for setting in found.settings] == [2, 2, 2, 2]
    assert found.settings[0].label == "loss=grpo, optim.lr=0.0001 (configuration not readable)"


def test_runs_that_only_repeat_a_seed_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / "folder" / name, [0.5] * 6, seed=3)
    assert "Runs of one seed are one draw" in page_of(tmp_path / "folder")
    for seed in (4, 5):
        make(tmp_path / "folder" / str(seed), [0.2] * 6, seed=seed)
    make(tmp_path / "folder" / "f", [0.1] * 2, seed=5, state="failed")  # the try before; its seed has a run that completed
    (setting,) = arrange([gather(Run(path)) for path in sorted((tmp_path / "folder").glob("?"))]).settings
    line = mean_curve(setting, "reward/mean", "orchestrator", 0)
    assert (len(setting.runs), setting.scored, line.runs.max(), line.whole) == (5, [0.2, 0.2, 0.5], 3, None), "bands are over seeds, too"
    assert line.y == pytest.approx(0.3)


def test_a_page_elsewhere_links_the_timeline_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my pages").mkdir()
    make(tmp_path / "a run", [0.5] * 6)
    for out in ("my pages/page.html", "here.html", str(tmp_path / "a run" / "report.html")):
        assert main(["report", "a run", "--out", out, "--csv", "run.csv"]) == 0
        (link,) = [
            str(tag["href"]) for name, tag in Parsed(Path(out).read_text()).tags if name == "a" and "timeline" in str(tag.get("href"))
        ]
        assert (Path(out).parent / unquote(link)).is_file()
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 2
    Path("file").touch()
    assert main(["report", "a run", "--csv", "file/run.csv"]) == 2


def test_curves_meet_on_common_steps_and_a_missing_run_is_noticed() -> None:
    x, values = aligned([(np.array([0.0, 1, 2, 3]), np.array([1.0, 2, 3, 4])), (np.array([0.0, 1, 3]), np.array([5.0, 6, 8]))])
    assert x.tolist() == [0, 1, 2, 3]
    assert np.array_equal(values, [[1, 2, 3, 4], [5, 6, np.nan, 8]], equal_nan=True)
    assert first_missing(values) == 2
    few, means = shrunk(x, values, most=2)
    assert few.tolist() == [0.5, 2.5]
    assert np.array_equal(means, [[1.5, 3.5], [5.5, np.nan]], equal_nan=True), "a mean over half of the steps is not comparable"


def test_long_curves_are_thinned_and_a_spike_survives() -> None:
    y = np.zeros(10_000)
    y[5001], y[7] = 7, np.nan
    kept = kept_points(y, most=100)
    assert len(kept) <= 100
    assert 5001 in kept


def test_values_that_are_not_finite_are_counted_on_the_chart() -> None:
    line = Curve(label="loss", x=np.arange(4.0), y=np.array([1, np.nan, np.inf, 2]))
    drawn = draw(Chart(title="Loss", lines=[line]), "loss")
    assert "2 values are not finite" in drawn
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', drawn)
    assert json.loads(data)["lines"][0]["y"] == [1, None, None, 2], "the curve has a gap"
    assert draw(Chart(title="Loss", lines=[]), "loss") == ""


def test_numbers_are_short() -> None:
    said = [number(value) for value in (None, float("nan"), 12345.0, 0.000012345, -1.5, float("inf"))]
    assert said == ["–", "–", "12,345", "1.234e-05", "−1.5", "∞"]
