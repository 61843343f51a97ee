"""The parts of `gpu.py` that run models: random weights in the sizes of Qwen3, rlx's own trainer, fake rollouts, AdamW."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_rows import Report
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlx.config.memory import CONTEXT, trainer_memory
from rlx.config.schema import AcConfig, Config, LoraConfig, LossTerms
from rlx.data.packing import pack
from rlx.data.source import FakeSource
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.flash import LONG
from rlx.models.liger import apply_liger
from rlx.models.load import choose_attention
from rlx.models.lora import PARAMETERS, add_adapters, draw_adapters
from rlx.models.policy import PolicyModel
from rlx.models.read import empty_weights
from rlx.models.shard import checkpoint_activations, compile_layers, shard
from rlx.parallel.mesh import Mesh, join, one_process
from rlx.train.flops import Meter
from rlx.train.step import PolicyTrainer

WHOLE_8B = 36  # layers
LIMIT = 60.0  # seconds for a collective


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Qwen3's family."""

    name: str
    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    tied: bool = True
    head_dim: int = 128
    vocabulary: int = 151_936

    def config(self, layers: int | None = None) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.inner, num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads, head_dim=self.head_dim, max_position_embeddings=40_960,
            tie_word_embeddings=self.tied, use_sliding_window=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip


SHAPES = {
    "0.6B": Shape("0.6B", 1024, 3072, 28, 16, 8),
    "4B": Shape("4B", 2560, 9728, 36, 32, 8),
    "8B": Shape("8B", 4096, 12_288, WHOLE_8B, 32, 8, tied=False),
}
TINY = Shape("tiny", 32, 64, 2, 4, 2, head_dim=8, vocabulary=500)


def shape_of(report: Report, name: str) -> Shape:
    return TINY if report.small else SHAPES[name]


@dataclass(slots=True)
class Built:
    """A model as `rlx.models.load.load_policy` makes it, but with random weights, and without files."""

    model: PolicyModel
    mesh: Mesh
    trained: list[torch.nn.Parameter] = field(default_factory=list)


def build(
    config: Qwen3Config,
    report: Report,
    mesh: Mesh,
    *,
    master: torch.dtype,
    ac: int = 0,
    lora: LoraConfig | None = None,
    compile: Any = None,
) -> Built:
    """Parameters are `master`, and computed with in the report's dtype. `compile`: keys of torch.compile.

    Unless the model has adapters, that takes a `mesh` with FSDP2 if these dtypes differ.
    """
    frozen = master if lora is None else report.dtype
    with torch.device("meta"):
        hf: Any = Qwen3ForCausalLM._from_config(config, dtype=frozen)
        if lora is not None:
            add_adapters(hf, lora, master)
    model = PolicyModel(hf, compute_dtype=report.dtype)
    model.liger = apply_liger(hf, "auto", report.device, rope=compile is None)
    if ac:
        checkpoint_activations(model, AcConfig(freq=ac))
    if compile is not None:
        compile_layers(model, report.device, **compile)
    if mesh.is_distributed:
        shard(model, mesh, compute_dtype=report.dtype, reduce_dtype=torch.float32)
    empty_weights(hf, report.device)
    with torch.no_grad():
        for parameter in hf.parameters():
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.fill_(1.0) if parameter.dim() == 1 else local.normal_(0, 0.02)
    if lora is not None:
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(name.endswith(PARAMETERS))
        draw_adapters(hf, seed=0)
    if report.cuda and compile is None and model.layout_kind(report.device) == "varlen":
        choose_attention(model, mesh)
    return Built(model, mesh, [parameter for parameter in model.parameters() if parameter.requires_grad])


def over_itself(report: Report) -> Mesh:
    """FSDP2 with one rank. A process makes it once."""
    return join(report.device, rank=0, world_size=1, timeout=LIMIT)


def trainer_of(built: Built, report: Report) -> PolicyTrainer:
    optimizer = torch.optim.AdamW(built.trained, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    objective = Objective(grpo, LossTerms(aggregate="token_mean"))
    return PolicyTrainer(built.model, objective, optimizer, max_norm=1.0, mesh=built.mesh)


def rollouts(shape: Shape, samples: int, tokens: int) -> FakeSource:
    """Groups of two rollouts with `tokens` each, a sixteenth of them the prompt."""
    prompt = tokens // 16
    answer = (tokens - prompt, tokens - prompt)
    return FakeSource(groups=samples // 2, members=2, prompt_tokens=(prompt, prompt), completion_tokens=answer, vocab_size=shape.vocabulary)


def steps(report: Report, built: Built, source: FakeSource, row: int, repeats: int = 3) -> dict[str, float]:
    """The median over whole steps: packing, forward, loss, backward, clipping, optimizer. Two steps before them are not counted."""
    trainer, meter = trainer_of(built, report), Meter(built.model, built.mesh)
    records = []
    for number in range(2 + repeats):
        batch = source.receive(number)
        built.mesh.synchronize()
        began = time.perf_counter()
        trainer.train_batch(pack(batch, rank=0, ranks=1, tokens=row))
        built.mesh.synchronize()
        seconds = time.perf_counter() - began
        if number >= 2:
            records.append(meter.measure(batch, seconds, 1, trainer.forward_only))
    return {name: statistics.median(record[name] for record in records) for name in records[0]}


def step_rows(report: Report, what: str, where: str, found: dict[str, float], tokens: str | None, mfu: str | None = None) -> None:
    memory = found["perf/peak_memory_gb"] if report.cuda else None
    report.row(what, where, found["perf/tokens_per_second"], "tokens/s", tokens, peak_gib=memory)
    if "perf/mfu_causal" in found:
        report.row(what, where, 100 * found["perf/mfu_causal"], "% causal MFU", mfu, peak_gib=memory)
    elif mfu is not None:
        report.error(f"{what}: causal MFU", where, "the device's peak is not known")


def whole_steps(
    report: Report, name: str, samples: int, tokens: int, goal: str, lora: LoraConfig | None = None, rows: tuple[int, ...] = (1,)
) -> None:
    """`rows`: numbers of rollouts in a row. The first is also computed with FlashAttention alone, if cuDNN computes long samples."""
    shape, length = shape_of(report, name), tokens if not report.small else 128
    mesh = over_itself(report) if lora is None else one_process(report.device)  # as the trainer does
    source = rollouts(shape, samples, length)
    where = f"{shape.name}, {samples} rollouts of {length:,} tokens, rows of "
    with report.attempt("a step", f"{where}{rows[0] * length:,}"):
        built = build(shape.config(), report, mesh, master=torch.float32, lora=lora)
        for number in rows:
            row = number * length
            step_rows(report, kernels(built), f"{where}{row:,}", steps(report, built, source, row), goal)
        if built.model.long_apart and length > LONG:
            built.model.long_apart = False
            row = rows[0] * length
            step_rows(report, kernels(built), f"{where}{row:,}", steps(report, built, source, row), None)
        del built


def kernels(built: Built) -> str:
    """What computes a model's layers."""
    attention = f"samples from {LONG:,} tokens by cuDNN" if built.model.long_apart else "FlashAttention"
    return f"{attention}, Liger {built.model.liger.split(':')[0]}"


def small_rl(report: Report) -> None:
    """Without recomputed activations: parameters and AdamW take 9 GiB, a row's activations about 35."""
    whole_steps(report, "0.6B", 4, 16_384, ">= 30000")


def lora(report: Report) -> None:
    """Rank 16 on all linear layers, without recomputed activations: 8 GiB of frozen weights, about 30 of activations."""
    whole_steps(report, "4B", 8, 4096, ">= 12000", LoraConfig(rank=16), rows=(1, 4))


def large(report: Report) -> None:
    """All 36 layers in bfloat16, with AdamW's state in bfloat16: 61 GiB. float32 would take 122. Every layer is recomputed."""
    shape, length = shape_of(report, "8B"), 8192 if not report.small else 128
    layers = shape.layers
    if report.cuda and not report.small and (total := torch.cuda.get_device_properties(0).total_memory / 2**30) < 76:
        layers = max(1, int((total - 25) / 1.5))  # 1.5 GiB a layer
    where = f"{shape.name}, {layers} of {shape.layers} layers, 4 rollouts of {length:,} tokens, 16-bit AdamW"
    source = rollouts(shape, 4, length)
    with report.attempt("a step", where):
        built = build(shape.config(layers), report, one_process(report.device), master=report.dtype, ac=1)
        for number in (1, 2):
            row = number * length
            found = steps(report, built, source, row, repeats=2)
            step_rows(report, kernels(built), f"{where}, rows of {row:,}", found, None, ">= 45")
        del built


def formula(shape: Shape, layers: int, parameters: int, row: int) -> float:
    """The plan's estimate of the peak, GiB: what torch allocates, so without the CUDA context."""
    cfg = Config()
    cfg.seq_len, cfg.optim = row, {"_target_": "torch.optim.AdamW"}
    cfg.hardware.device, cfg.hardware.trainer_processes = "cuda", 1
    cfg.trainer.micro_batch_tokens, cfg.trainer.ac = row, AcConfig(freq=1)
    cfg.model.dtype, cfg.model.num_parameters, cfg.model.num_layers = "bfloat16", parameters, layers
    cfg.model.hidden_size, cfg.model.vocab_size, cfg.model.head_dim = shape.width, shape.vocabulary, shape.head_dim
    cfg.model.num_attention_heads, cfg.model.num_key_value_heads = shape.heads, shape.key_heads
    return (trainer_memory(cfg).device - CONTEXT) / 2**30


def fsdp(report: Report) -> None:
    """8B does not fit with float32 AdamW: two and four of its layers are measured, and a line through both gives the peak of 36."""
    shape, mesh = shape_of(report, "8B"), over_itself(report)
    few, more = 2, 4
    peaks: dict[tuple[int, int], float] = {}
    counts: dict[int, int] = {}
    rows = (8192, 16_384) if not report.small else (64, 128)
    for layers in (few, more):
        with report.attempt("a step", f"{shape.name} width, {layers} layers"):
            built = build(shape.config(layers), report, mesh, master=torch.float32, ac=1)
            counts[layers] = sum(parameter.numel() for parameter in built.model.parameters())
            for row in rows:
                where = f"{shape.name} width, {layers} layers, rows of {row:,}, float32 AdamW, every layer recomputed"
                report.clear()
                found = steps(report, built, rollouts(shape, 2, row), row, repeats=2)
                step_rows(report, "a step", where, found, None)
                if report.cuda:
                    peaks[layers, row] = found["perf/peak_memory_gb"]
                    estimate = formula(shape, layers, counts[layers], row)
                    report.row(f"peak / formula of {estimate:.1f} GiB", where, peaks[layers, row] / estimate, "ratio")
            del built
    for row in rows:
        where = f"{shape.name}, 36 layers, rows of {row:,}, extrapolated from {few} and {more} layers"
        if (few, row) not in peaks or (more, row) not in peaks:
            report.error("peak / formula", where, "there is no peak to extrapolate from; torch counts it on CUDA only")
            continue
        slope = (peaks[more, row] - peaks[few, row]) / (more - few)
        peak = peaks[few, row] + slope * (WHOLE_8B - few)
        parameters = counts[few] + (counts[more] - counts[few]) // (more - few) * (WHOLE_8B - few)
        estimate = formula(shape, WHOLE_8B, parameters, row)
        report.row(f"peak of {peak:.1f} GiB / formula of {estimate:.1f} GiB", where, peak / estimate, "ratio", "0.75 to 1.33")


def compiled(report: Report) -> None:
    """Counts the graphs that are compiled for each layout of a row. The second may need more, because sizes become symbols.

    Without a GPU rows are divided into a number of buckets, each number of which needs a graph; varlen has none.
    """
    shape, mesh = shape_of(report, "4B"), one_process(report.device)
    unit = 8192 if not report.small else 64
    layouts = [[unit], [unit // 2] * 2, [unit // 8] * 8, [unit // 2, unit // 4, unit // 8], [unit // 16] * 5, [unit - unit // 16]]
    layers, graphs = 4 if not report.small else 2, 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        if not report.cuda:
            return graph.forward  # traced, and computed as it is
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    sources = []
    for lengths in layouts:
        groups = [
            FakeSource(
                groups=1,
                members=1,
                prompt_tokens=(n // 4,) * 2,
                completion_tokens=(n - n // 4,) * 2,
                vocab_size=shape.vocabulary,
                seed=n * 10 + i,
            )
            .receive(0)
            .mini_batches[0][0]
            for i, n in enumerate(lengths)
        ]
        sources.append(groups)
    medians: dict[str, list[float]] = {}
    for what, keys in (("eager", None), ("compiled", {"backend": backend})):
        where = f"{shape.name} width, {layers} layers, six layouts of up to {unit:,} tokens"
        with report.attempt(what, where):
            trainer = trainer_of(build(shape.config(layers), report, mesh, master=report.dtype, compile=keys), report)
            counts, first, medians[what] = [], 0.0, []
            for samples in sources:
                batch = pack(_batch(samples), rank=0, ranks=1, tokens=unit)
                began = time.perf_counter()
                trainer.train_batch(batch)
                first += time.perf_counter() - began
                counts.append(graphs)
                medians[what].append(report.measure(lambda batch=batch, trainer=trainer: trainer.train_batch(batch), 3).seconds)
            if what == "compiled":
                report.row(
                    f"graphs after each layout: {' '.join(map(str, counts))}",
                    where,
                    counts[-1] - counts[1],
                    "after the second",
                    "== 0",
                )
                report.row("compiling", where, first - sum(medians[what]), "s")
                report.row("eager / compiled", where, sum(medians["eager"]) / sum(medians[what]), "times", peak_gib=report.peak())
            del trainer


def _batch(samples: list[Any]) -> Any:
    from dataclasses import replace

    from rlx.types import StepBatch

    return StepBatch(step=0, mini_batches=(tuple(replace(sample, group=i) for i, sample in enumerate(samples)),))
