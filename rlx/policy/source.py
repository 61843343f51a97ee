"""The source of a training run's batches, and the rows that it validates on, as the configuration says.

It is in this room because rows become samples by the chat format of the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from rlx.checkpoints.forked import read_forked
from rlx.config.load import load_run
from rlx.config.schema import Config, SftRoot, TrainingRoot
from rlx.config.schema_sft import DataSetConfig
from rlx.data.rows import digest_of, open_rows
from rlx.data.source import FakeSource, OrchestratorSource, RecordedSource, Source
from rlx.data.supervised import LEFT_OUT, Conversations, Prepared, SupervisedSource
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths, write_text
from rlx.policy.chat import Chat, load_chat
from rlx.policy.templates import ends_of, tokenizer_of
from rlx.types import StepBatch

log = logging.getLogger(__name__)

FAKE_PROMPT = 0.5  # share of a fake sample's tokens that are context


def source_of(cfg: TrainingRoot, paths: RunPaths, mesh: Mesh, model: str, streams: Collection[str] = ()) -> Source:
    """The source of the run's batches. `model`: folder or hub name of the initial model. `streams`: what the objectives read."""
    if isinstance(cfg, Config):
        if cfg.bench_target == "trainer":
            return fake_rollouts(cfg, streams)
        if cfg.replay is not None:
            return RecordedSource(RunPaths(Path(cfg.replay)), mesh, cfg.trainer.num_minibatches, own=trains_alike(cfg))
        return OrchestratorSource(paths, mesh, cfg.trainer.batch_timeout)
    assert isinstance(cfg, SftRoot)
    if cfg.data.type == "fake":
        return fake(cfg)
    return Prepared(partial(supervised, cfg, model, paths), mesh)


def trains_alike(cfg: Config) -> bool:
    """Whether the replay's trainer does what the recorded run's did, so that its policy of each version is the one that sampled."""
    recorded = load_run(Path(str(cfg.replay)).expanduser(), secrets=False)

    def does(of: Config) -> list[Any]:
        own = {name: env.loss for name, env in of.envs.items()}
        return [of.loss, own, of.optim, of.scheduler, of.ref, of.trainer, of.lora, of.model.dtype]

    return does(cfg) == does(recorded)


def fake(cfg: SftRoot) -> FakeSource:
    """Samples of random tokens, half of each trained, as long as `data.length` says."""
    prompt = max(1, int(cfg.seq_len * FAKE_PROMPT))
    shortest = (1, 1) if cfg.data.length == "variable" else (prompt, cfg.seq_len - prompt)
    return FakeSource(
        groups=cfg.data.batch_size,
        members=1,
        prompt_tokens=(shortest[0], prompt),
        completion_tokens=(shortest[1], cfg.seq_len - prompt),
        vocab_size=cfg.model.vocab_size,
        seed=cfg.seed,
        sampled=False,
    )


def fake_rollouts(cfg: Config, streams: Collection[str] = ()) -> FakeSource:
    """Groups of random tokens: a prompt, and answers of `sampling.max_tokens`, together `seq_len` or up to that (`bench_length`)."""
    answer = min(cfg.sampling.max_tokens, cfg.seq_len - 1)
    prompt = cfg.seq_len - answer
    fixed = cfg.bench_length == "fixed"
    return FakeSource(
        groups=cfg.num_groups,
        members=cfg.orchestrator.rollouts_per_example,
        prompt_tokens=(prompt if fixed else 1, prompt),
        completion_tokens=(answer if fixed else 1, answer),
        vocab_size=cfg.model.vocab_size,
        seed=cfg.seed,
        streams=sorted(streams),
        mini_batches=cfg.trainer.num_minibatches,
    )


def supervised(cfg: SftRoot, model: str, paths: RunPaths) -> SupervisedSource:
    """The rows of `data`. Raises ValueError for a data set that cannot be opened, or is not that of the run's earlier attempts."""
    shift = keep_digests(cfg, paths)
    chat, vocab_size = chat_of(cfg, model), vocab_size_of(cfg, model)
    sets = [(_examples(cfg, key, each, chat, vocab_size), each.weight) for key, each in cfg.data.all_sets.items()]
    return SupervisedSource(sets, batch_size=cfg.data.batch_size, seed=cfg.seed, shuffle=cfg.data.shuffle, shift=shift)


def keep_digests(cfg: SftRoot, paths: RunPaths) -> int:
    """Write what shows that the data sets have changed. Raises ValueError if they have since an earlier attempt of the run.

    Returns the `shift` of `SupervisedSource`: 0, but in a fork with other data or another batch size, or a fork of such a fork.
    """
    sets = {f"data.{'name' if key == 'data' else f'sets.{key}'}": each for key, each in cfg.data.all_sets.items()}
    if cfg.val.name is not None:
        sets["val.name"] = cfg.data.like(cfg.val)
    here = {key: digest_of(each.name, open_rows(each.name, subset=each.subset, split=each.split)) for key, each in sets.items()}
    found = json.loads(paths.data.read_text()) if paths.data.is_file() else None
    there = found["sets"] if found else {}
    if changed := [f"{key}={sets[key].name}: {there[key]} → {here[key]}" for key in here if there.get(key, here[key]) != here[key]]:
        raise ValueError(
            "a data set has changed since the run began, so a resumed run would skip rows and repeat others:\n  "
            + "\n  ".join(changed)
            + f"\nRestore the data set; or train on the new one in another run from the last checkpoint, resume={paths.root} run.name=NEW; "
            "or begin anew with clean=true"
        )
    shift = _shift(cfg, paths, here) if found is None else found.get("shift", 0)
    write_text(paths.data, json.dumps({"sets": here, **({"shift": shift} if shift else {})}, indent=1) + "\n")
    return shift


def _shift(cfg: SftRoot, paths: RunPaths, here: dict[str, Any]) -> int:
    """The shift of a run that is about to train for the first time. `here`: the digests of its data sets."""
    forked = read_forked(paths)
    if forked is None or forked.data is None:
        return 0
    before = [digest for key, digest in forked.data.get("sets", {}).items() if key.startswith("data.")]
    other = forked.other_order(cfg) or ("other rows" if before != [here[key] for key in here if key.startswith("data.")] else None)
    if other is None:  # the first step of the fork has the rows that the other run would have had next
        return forked.data.get("shift", 0) + forked.step * ((forked.batch_size or cfg.data.batch_size) - cfg.data.batch_size)
    log.warning("%s: the data of this run begin at their first row, and not where %s was after %d steps", other, forked.source, forked.step)
    return -forked.step * cfg.data.batch_size


def validation_rows(cfg: TrainingRoot, mesh: Mesh, model: str, tick: Callable[[], None]) -> tuple[StepBatch, dict[str, float]] | None:
    """The samples of the rows to validate on, the same on every rank; None if there is no validation.

    And how many rows were left out or cut, by the metric's name: `val/overlong`. Only rank 0 knows that.
    """
    if not isinstance(cfg, SftRoot) or cfg.val.name is None:
        return None

    def held_out() -> SupervisedSource:
        examples = _examples(cfg, "val", cfg.data.like(cfg.val), chat_of(cfg, model), vocab_size_of(cfg, model))
        count = min(len(examples), cfg.val.num_examples or len(examples))
        return SupervisedSource([(examples, 1.0)], batch_size=count, seed=cfg.seed, shuffle=False)

    source = Prepared(held_out, mesh, ahead=0)
    batch, report = source.receive(0, tick), source.report(0)
    return batch, {name.replace("data/", "val/"): report[name] for name in LEFT_OUT if name in report}


def chat_of(cfg: SftRoot, model: str) -> Chat:
    """The chat format that rows are rendered with: that of the policy in rollouts."""
    tokenizer = tokenizer_of(model, cfg.model)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {model} has no chat template, so rows cannot be rendered. Set model.chat_template=FILE, with the template "
            "of a model whose format you want"
        )
    keeps = cfg.keeps_thinking or cfg.orchestrator.trajectory_strategy == "interleaved"
    return load_chat(tokenizer, cfg.model, keeps_tokens=keeps, ends=ends_of(model), keeps_thinking=cfg.keeps_thinking)


def vocab_size_of(cfg: SftRoot, model: str) -> int:
    """Rows of the model's embedding."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model, trust_remote_code=cfg.model.trust_remote_code).get_text_config().vocab_size)


def _examples(cfg: SftRoot, key: str, data: DataSetConfig, chat: Chat, vocab_size: int) -> Conversations:
    return Conversations(
        name=key,
        rows=open_rows(data.name, subset=data.subset, split=data.split),
        columns=data.columns,
        chat=chat,
        seq_len=cfg.seq_len,
        vocab_size=vocab_size,
        roles=cfg.data.loss_mask.roles,
        truncate=cfg.data.on_too_long == "truncate",
        skip_refused=cfg.data.on_bad_row == "skip",
        escapes=cfg.data.control_tokens == "escape",
    )
