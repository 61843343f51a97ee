"""The batches that the configuration of `rlx sft` describes, from the source that the trainer has: weights of data sets, trained roles."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.config.schema import WarmStartConfig
from rlx.models import tiny
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.policy.source import source_of
from rlx.types import TrainingSample


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=1), 128), tiny.build_tokenizer(128), folder)
    return folder


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first_batch(model: Path, *keys: str) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples of step 0 and its report."""
    cfg = compose([*keys, "model=tiny_trained", f"model.name={model}", "hardware=cpu", "seq_len=96"], {}, SFT).cfg
    paths = RunPaths(model.parent / "run")
    paths.root.mkdir()
    source = source_of(cfg, paths, one_process("cpu"), str(model))
    (samples,) = source.receive(0, lambda: None).mini_batches
    return list(samples), source.report(0)


def test_several_data_sets_share_a_batch_by_their_configured_weights(tmp_path: Path, model: Path) -> None:
    sets = [f"+data.sets.{name}.name={write(tmp_path / f'{name}.jsonl', [{'prompt': name, 'completion': name}] * 8)}" for name in "ab"]
    samples, report = first_batch(model, *sets, "+data.sets.a.weight=3", "+data.sets.b.weight=1", "data.batch_size=12")
    assert Counter(sample.env for sample in samples) == {"a": 9, "b": 3}
    assert (report["data/a/rows"], report["data/b/rows"]) == (9, 3)


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ((), ["dcba<|im_end|>", "hgfe<|im_end|>"]),
        (("data.loss_mask.user=true",), ["abcd", "dcba<|im_end|>", "efgh", "hgfe<|im_end|>"]),
        (("data.loss_mask.system=true", "data.loss_mask.assistant=false"), ["reverse it"]),
    ],
)
def test_the_configured_roles_are_trained_and_no_others(tmp_path: Path, model: Path, keys: tuple[str, ...], trained: list[str]) -> None:
    said = [("system", "reverse it"), ("user", "abcd"), ("assistant", "dcba"), ("user", "efgh"), ("assistant", "hgfe")]
    name = write(tmp_path / "rows.jsonl", [{"messages": [{"role": role, "content": content} for role, content in said]}])
    (sample,), _ = first_batch(model, f"data.name={name}", "data.batch_size=1", *keys)
    tokenizer, found, before = tiny.build_tokenizer(128), [], False
    for token, on in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if on:
            found += [] if before else [""]
            found[-1] += tokenizer.decode([token])
        before = on
    assert found == trained
