"""The loss on validation rows, and what is said of rows that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlx.cli.console_sft import SftConsole
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.config.schema import WarmStartConfig
from rlx.metrics import read_metrics
from rlx.models import tiny
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.policy.source import validation_rows
from rlx.train.build import build
from rlx.train.validation import Validation
from rlx.train.watch import Watch

LONG = "abc" * 60  # its sample has more tokens than `seq_len`


@pytest.mark.parametrize(
    ("keys", "left_out", "said"),
    [
        ((), (2, 0, 1), "; of the validation 2 samples longer than seq_len, 1 rows that cannot be marked"),
        (("data.overflow=truncate",), (0, 2, 1), "; of the validation 2 samples cut to seq_len, 1 rows that cannot be marked"),
    ],
)
def test_validation_rows_that_are_left_out_are_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], left_out: tuple[int, int, int], said: str
):
    rows = [{"prompt": "abc", "completion": word} for word in ("cba", "ab", LONG, LONG, "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=1), 128), tiny.build_tokenizer(128), tmp_path / "model")
    fixed = ["model=tiny_trained", f"model.name={tmp_path}/model", "hardware=cpu", "data.refused=skip", "seq_len=48", "max_steps=1"]
    names = [f"data.name={tmp_path}/rows.jsonl", f"val.name={tmp_path}/rows.jsonl", f"run.dir={tmp_path}/run"]
    cfg = compose([*fixed, *names, *keys], {}, SFT).cfg
    paths, mesh = RunPaths(tmp_path / "run"), one_process("cpu")
    paths.root.mkdir()
    watch = Watch(paths, "trainer", first=True, grace=1.0)
    trainer = build(cfg, str(tmp_path / "model"), mesh, watch.working, resumes=False)
    held_out = validation_rows(cfg, mesh, str(tmp_path / "model"), watch.beat_on)
    assert held_out is not None
    with caplog.at_level("INFO", "rlx.trainer"):
        Validation(trainer, held_out, 256, sum, paths, watch).record(0)
    ((record, _),) = read_metrics(paths.metrics)
    assert record["source"] == "val"
    assert tuple(record[f"val/{name}"] for name in ("overlong", "truncated", "refused")) == left_out
    assert record["val/samples"] == 4 - left_out[0]
    (line,) = [each for each in caplog.messages if "validation loss" in each]
    assert line.endswith("".join(f", val/{n} {c}" for n, c in zip(("overlong", "truncated", "refused"), left_out, strict=True) if c))
    console = SftConsole(paths.root, cfg)
    console.history.read()
    (line,) = [each for each in console.summary(0).splitlines() if each.startswith("  left out")]
    assert line == f"  left out  nothing{said}"
