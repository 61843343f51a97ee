"""The loss on validation rows against a plain Hugging Face model, and what is said of rows that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.cli.console import Console
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.config.schema import SftRoot, WarmStartConfig
from rlx.metrics import read_metrics
from rlx.models import tiny
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.policy.source import validation_rows
from rlx.train.build import build
from rlx.train.validation import Validation
from rlx.train.watch import Watch

LONG = "abc" * 60  # its sample has more tokens than `seq_len`
ANSWERS = ("cba", "ab", LONG, LONG, "")  # of which the last cannot be marked: it says nothing


def validated(folder: Path, *keys: str) -> tuple[SftRoot, dict]:
    """Validate a random model as the trainer does before its first step. Gives the configuration and the record."""
    rows = [{"prompt": "abc", "completion": word} for word in ANSWERS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=1), 128), tiny.build_tokenizer(128), folder / "model")
    fixed = ["model=tiny_trained", f"model.name={folder}/model", "hardware=cpu", "data.on_bad_row=skip", "seq_len=48", "max_steps=1"]
    names = [f"data.name={folder}/rows.jsonl", f"val.name={folder}/rows.jsonl", f"run.dir={folder}/run"]
    cfg = compose([*fixed, *names, *keys], {}, SFT).cfg
    paths, mesh = RunPaths(folder / "run"), one_process("cpu")
    paths.root.mkdir()
    watch = Watch(paths, "trainer", first=True, grace=1.0)
    trainer = build(cfg, str(folder / "model"), mesh, watch.working, resumes=False)
    held_out = validation_rows(cfg, mesh, str(folder / "model"), watch.heartbeat)
    assert held_out is not None
    Validation(trainer, held_out, 64, sum, paths, watch).record(0)
    ((record, _),) = read_metrics(paths.metrics)
    return cfg, record


@pytest.mark.parametrize(
    ("keys", "left_out", "said"),
    [
        ((), (2, 0, 1), "2 samples longer than seq_len, of the validation 1 rows that cannot be marked"),
        (("data.on_too_long=truncate",), (0, 2, 1), "2 samples cut to seq_len, of the validation 1 rows that cannot be marked"),
    ],
)
def test_validation_rows_that_are_left_out_are_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], left_out: tuple[int, int, int], said: str
):
    with caplog.at_level("INFO", "rlx.trainer"):
        cfg, record = validated(tmp_path, *keys)
    assert record["source"] == "val"
    assert tuple(record[f"val/{name}"] for name in ("overlong", "truncated", "refused")) == left_out
    assert record["val/samples"] == 4 - left_out[0]
    (line,) = [each for each in caplog.messages if "validation loss" in each]
    assert line.endswith("".join(f", val/{n} {c}" for n, c in zip(("overlong", "truncated", "refused"), left_out, strict=True) if c))
    console = Console(tmp_path / "run", cfg)
    console.history.read()
    (line,) = [each for each in console.summary(0).splitlines() if each.startswith("  dropped")]
    assert line == f"  dropped   of the validation {said}"


@pytest.mark.parametrize(("overflow", "kept"), [("drop", ("cba", "ab")), ("truncate", ("cba", "ab", LONG, LONG))])
def test_the_validation_loss_is_the_mean_cross_entropy_of_the_kept_answers(tmp_path: Path, overflow: str, kept: tuple[str, ...]):
    _, record = validated(tmp_path, f"data.on_too_long={overflow}", "model.dtype=float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    losses = []
    for answer in kept:
        asked, said = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>"
        prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in (asked, asked + said))
        ids = ids[:48]
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        losses.append(functional.cross_entropy(logits, torch.tensor(ids[len(prompt) :]), reduction="none"))
    by_token = torch.cat(losses)
    assert record["val/loss_tokens"] == len(by_token)
    assert record["val/loss"] == pytest.approx(float(by_token.mean()), rel=1e-5)
    assert record["val/perplexity"] == pytest.approx(float(by_token.mean().exp()), rel=1e-4)


@pytest.mark.parametrize(
    ("keys", "said"),
    [(("optim.lr=1e-6",), True), (("optim.lr=1e-3",), False), (("optim.lr=1e-6", "lora.rank=2"), False), ((), False)],
    ids=["small", "large", "adapters", "float32"],
)
def test_master_weights_that_would_round_small_updates_away_are_said(
    keys: tuple[str, ...], said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    masters = ("trainer.optimization_dtype=bfloat16", "model.dtype=bfloat16") if keys else ("optim.lr=1e-6",)
    validated(tmp_path, *masters, *keys)
    assert ("rounds away an update below about 1/500 of a weight; with optim.lr=1e-06" in caplog.text) == said
