"""Explains a plan in words and numbers before the run starts.

Pure: turns a configuration and its plan into text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlx.config.evaluated import evaluated, is_due
from rlx.config.memory import TrainerMemory, size, trained_parameters, trainer_memory, versions_in_memory
from rlx.config.objectives import losses_of
from rlx.config.rows import why
from rlx.config.schema import CommandConfig, Config, EvaluatedRun, PlayRoot, SftRoot, TrainingRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.plan.benchmark import benchmark
from rlx.plan.forecast import time_on_cpu
from rlx.plan.record import ProcessSpec
from rlx.plan.servers import command_lines, memory_of


def explain(
    cfg: CommandConfig,
    plan: Sequence[ProcessSpec],
    choices: Mapping[str, str],
    notes: Sequence[str],
    run_dir: str,
    environments: Sequence[str] = (),
) -> str:
    """The composed configuration, the placement of processes, the arithmetic of a batch, and memory estimates, as text.

    `environments`: what is known of each environment, one line each."""
    rows = [_row(cfg, spec) for spec in plan]
    sections = [
        ("composed", _composed(choices, notes, run_dir)),
        *([("environments", list(environments))] if environments else []),
        ("processes", [*table(["process", "host", "GPUs", "ports", "command"], rows), *_apart(cfg, plan), *_idle(cfg, plan)]),
        *([("vLLM's command lines", lines)] if isinstance(cfg, PlayRoot) and (lines := command_lines(cfg, plan)) else []),
        *SECTIONS[type(cfg)](cfg, plan),
    ]
    return "\n\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _composed(choices: Mapping[str, str], notes: Sequence[str], run_dir: str) -> list[str]:
    lines = [f"{group.ljust(max(map(len, choices)))}  {choice}" for group, choice in choices.items()]
    return [*lines, *(f"note: {note}" for note in notes), f"run directory: {run_dir}"]


def _row(cfg: CommandConfig, spec: ProcessSpec) -> list[str]:
    host = "this machine" if cfg.hardware.nodes == 1 and cfg.launcher.name == "local" else f"host {spec.node}"
    gpus = ",".join(map(str, spec.gpus)) or "cpu"
    ports = ", ".join(f"{purpose} {port or 'any free'}" for purpose, port in spec.ports.items()) or "-"
    return [spec.name, host, gpus, ports, _command(cfg, spec)]


def _command(cfg: CommandConfig, spec: ProcessSpec) -> str:
    if spec.role == "prepare":
        untrained = isinstance(cfg, SftRoot) or (isinstance(cfg, Config) and cfg.on_random_tokens)
        return f"{'makes' if untrained else 'supervised warm start of'} the model, unless it is in the cache"
    if spec.role == "trainer" and isinstance(cfg, TrainingRoot):
        copies = cfg.trainer.dp_replicate
        over = f"{cfg.trainer_ranks // copies} ranks" + (f", {copies} copies" if copies > 1 else "")
        together = cfg.trainer.ranks_of_a_row
        over += f"; each row on {together} of them" if together > 1 else ""
        over += f", matrices divided over {cfg.trainer.tp}" if cfg.trainer.tp > 1 else ""
        over += f"; experts divided over {cfg.trainer.ep}" if cfg.trainer.ep > 1 else ""
        return f"FSDP2 over {over}" if cfg.trainer_ranks > 1 else "one process"
    if not isinstance(cfg, PlayRoot):
        return " ".join(spec.argv)
    if spec.role == "load_generator" and isinstance(cfg, Config):
        return f"random prompts; {cfg.load:,} requests in flight"
    if spec.role == "inference":
        parallel = f", tensor parallel {cfg.hardware.tensor_parallel}" if cfg.hardware.tensor_parallel > 1 else ""
        return f"vLLM, {cfg.model.dtype}, context {cfg.max_model_len:,}{parallel}"
    return f"environments {', '.join(evaluated(cfg) if isinstance(cfg, SftRoot) else cfg.envs)}; {_in_flight(cfg)}"


def _apart(cfg: CommandConfig, plan: Sequence[ProcessSpec]) -> list[str]:
    """Warnings of groups of ranks that exchange tokens in every layer and do not lie on one host."""
    nodes = [spec.node for spec in plan if spec.role == "trainer"]
    if not isinstance(cfg, TrainingRoot) or len(set(nodes)) < 2:
        return []
    on_host = nodes.count(nodes[0])
    return [
        f"warning: trainer.{key}={size} does not divide the {on_host} trainer ranks of a host, so some groups exchange tokens "
        "between hosts in every layer"
        for key, size in (("tp", cfg.trainer.tp), ("ep", cfg.trainer.ep))
        if on_host % size
    ]


def _idle(cfg: CommandConfig, plan: Sequence[ProcessSpec]) -> list[str]:
    """A line about hosts and GPUs that a job would have for nothing."""
    hardware = cfg.hardware
    hosts = sorted({*range(hardware.nodes)} - {spec.node for spec in plan})
    have = hardware.nodes * hardware.gpus_per_node if hardware.device == "cuda" else 0
    gpus = have - len({(spec.node, gpu) for spec in plan for gpu in spec.gpus})
    parts = [f"host {', '.join(map(str, hosts))} (hardware.nodes={hardware.nodes})"] if hosts else []
    parts += [f"{gpus} of {have} GPUs (hardware.gpus_per_node={hardware.gpus_per_node})"] if have and gpus else []
    return [f"warning: no process is on {' and '.join(parts)}"] if parts else []


def _in_flight(cfg: PlayRoot) -> str:
    if not cfg.follows_engines:
        return f"at most {cfg.concurrency} rollouts in flight"
    return f"{cfg.concurrency} rollouts in flight at first, then as many as the engines can use"


def _group_sizes(cfg: Config) -> str:
    sizes = {name: cfg.group_size(name) for name, env in cfg.envs.items() if env.weight > 0}
    if len(set(sizes.values())) == 1:
        return f"{next(iter(sizes.values()))} rollouts per prompt"
    return f"{cfg.mean_group_size:.4g} rollouts per prompt on average ({', '.join(f'{name} {size}' for name, size in sizes.items())})"


def _batch(cfg: Config) -> list[str]:
    rollouts, mini = cfg.orchestrator.batch_size, cfg.trainer.num_minibatches
    row, lag = cfg.micro_batch_tokens, cfg.max_async_level
    trained = rollouts * cfg.seq_len
    rows = math.ceil(trained / (row * cfg.data_ranks * mini))
    versions = "version" if lag == 1 else "versions"
    stale = (
        f"at most {lag} policy {versions} old; older groups are dropped, counted and replaced"
        if lag
        else "none: every token comes from the policy that it trains"
    )
    steps = cfg.max_steps * cfg.num_updates
    rest = f" ({mini} minibatches of {rollouts // mini} rollouts)" if mini > 1 else ""
    rest += f", {cfg.trainer.num_iterations} times over" if cfg.trainer.num_iterations > 1 else ""
    return table(
        ["quantity", "value"],
        [
            ["prompts", f"{cfg.num_groups:,}{_more_prompts(cfg)}"],
            ["rollouts", f"{rollouts:,} = {cfg.num_groups:,} prompts × {_group_sizes(cfg)}"],
            ["new tokens", _new_tokens(cfg)],
            ["tokens trained on", f"at most {trained:,} = {rollouts:,} × seq_len {cfg.seq_len:,}, prompts included"],
            *(
                [["micro-batches", f"rows of the shared trainer {cfg.trainer.shared}, together with those of its other runs"]]
                if cfg.trained_elsewhere
                else [
                    [
                        "micro-batches",
                        f"at most {rows:,} per {_unit(cfg)} and optimizer step, each one row of {row:,} tokens, on {_ranks(cfg)}",
                    ],
                    ["", f"rows of {row:,} tokens: {why(cfg)}"],
                ]
            ),
            ["optimizer steps", f"{cfg.num_updates} per step{rest}; {steps:,} in the run of {cfg.max_steps:,} steps"],
            ["rollouts in the run", f"{rollouts * cfg.max_steps:,}"],
            *([["time on CPU", time_on_cpu(cfg)]] if cfg.hardware.device == "cpu" else []),
            ["staleness", stale],
            *([["evaluations", _evaluations(cfg)]] if cfg.eval.interval is not None else []),
            *([["rounding", _rounding(cfg)]] if cfg.model.dtype != "float32" else []),
        ],
    )[1:]


def _batch_of_rows(cfg: SftRoot) -> list[str]:
    """The arithmetic of a supervised step."""
    rows, row, data = cfg.data.batch_size, cfg.micro_batch_tokens, cfg.data
    trained = rows * cfg.seq_len
    per_rank = math.ceil(trained / (row * cfg.data_ranks))
    sets = [f"{name} (weight {each.weight:g}): {each.name}, {each.split}" for name, each in data.all_sets.items()]
    long = "left out" if data.overflow == "drop" else "cut"
    val = f"{cfg.val.name}, every {cfg.val.interval} steps" if cfg.val.name is not None else "none"
    return table(
        ["quantity", "value"],
        [
            *(["data" if number == 0 else "", text] for number, text in enumerate(sets or [f"random tokens, {data.length} length"])),
            ["rows", f"{rows:,}, {rows * cfg.max_steps:,} in the run of {cfg.max_steps:,} steps"],
            ["trained roles", ", ".join(data.loss_mask.roles)],
            ["tokens", f"at most {trained:,} = {rows:,} × seq_len {cfg.seq_len:,}; a longer sample is {long} and counted"],
            ["micro-batches", f"at most {per_rank:,} per {_unit(cfg)}, each one row of {row:,} tokens, on {_ranks(cfg)}"],
            ["", f"rows of {row:,} tokens: {why(cfg)}"],
            ["optimizer steps", f"{cfg.num_updates} per step; {cfg.max_steps * cfg.num_updates:,} in the run"],
            *([["time on CPU", time_on_cpu(cfg)]] if cfg.hardware.device == "cpu" else []),
            ["validation", val],
            *([["evaluations", _evaluations(cfg)]] if cfg.plays else []),
        ],
    )[1:]


def _unit(cfg: TrainingRoot) -> str:
    """What trains on a row."""
    return "group of ranks" if cfg.trainer.ranks_of_a_row > 1 else "rank"


def _ranks(cfg: TrainingRoot) -> str:
    """How many of them there are."""
    ranks, together = cfg.trainer_ranks, cfg.trainer.ranks_of_a_row
    if together == 1:
        return f"{ranks} rank{'s' * (ranks > 1)}"
    groups = f"{cfg.data_ranks} group{'s' * (cfg.data_ranks > 1)} of {together} ranks"
    return f"{groups}; a rank has {-(-cfg.micro_batch_tokens // together):,} tokens of it"


def _evaluations(cfg: EvaluatedRun) -> str:
    """How often, and how many rollouts each."""
    envs = evaluated(cfg).items()
    sizes = ", ".join(f"{name} {env.num_examples or 'all'} × {env.rollouts_per_example}" for name, env in envs)
    count = sum(is_due(cfg, version) for version in range(cfg.max_steps + 1))
    return f"{count} in the run, of {sizes} (examples × rollouts), each at one policy version, beside training"


def _rounding(cfg: Config) -> str:
    """The effect of 16-bit arithmetic on importance ratios, for each objective in use."""
    measured = "SmolLM2-135M on a CPU: 0.04 nats per token; docs/objectives.md"
    text = f"in {cfg.model.dtype} trainer and engine differ before any training ({measured})"
    against = {True: "the trainer itself", False: "the engine"}
    ways = {key: node.get("proximal", "inference") for key, node in losses_of(cfg).items()}
    parts = [f"relative to {against[way == 'recompute']}: {key}.proximal={way}" for key, way in ways.items()]
    return f"{text}; ratios are {', '.join(parts)}"


def _new_tokens(cfg: Config) -> str:
    """Upper bound on the tokens sampled for a batch. Environments may have their own bounds; each counts by its share of the groups."""
    rollouts, default = cfg.orchestrator.batch_size, cfg.sampling.max_tokens
    bounds = {name: env.sampling.max_tokens or default for name, env in cfg.envs.items() if env.weight > 0}
    if set(bounds.values()) <= {default}:
        return f"at most {rollouts * default:,} = {rollouts:,} × sampling.max_tokens {default:,} (per turn)"
    if len(bounds) == 1:
        ((name, bound),) = bounds.items()
        return f"at most {rollouts * bound:,} = {rollouts:,} × envs.{name}.sampling.max_tokens {bound:,} (per turn)"
    total = sum(cfg.envs[name].weight for name in bounds)
    mean = sum(cfg.envs[name].weight * bound for name, bound in bounds.items()) / total
    each = ", ".join(f"{name} {bound:,}" for name, bound in bounds.items())
    return f"at most about {rollouts * mean:,.0f} = {rollouts:,} × {mean:,.0f}, the mean of the environments' max_tokens ({each}; per turn)"


def _more_prompts(cfg: Config) -> str:
    """The extra prompts of a step that oversampling and filters cause."""
    filters, text = cfg.orchestrator.difficulty_filter, ""
    if cfg.orchestrator.oversampling_factor > 1:
        text += f"; {math.ceil(cfg.num_groups * cfg.orchestrator.oversampling_factor):,} are requested at a time"
    if rules := filters.rules:
        text += f"; groups filtered out by {', '.join(rules)} are replaced, at most {cfg.num_groups * filters.max_rounds:,} per step"
    return text


def _of_trainer(cfg: TrainingRoot, memory: TrainerMemory) -> list[str]:
    """The parts of the trainer's memory, one line each, with the arithmetic."""
    ranks, row = cfg.trainer_ranks // cfg.trainer.dp_replicate, cfg.micro_batch_tokens
    numbers = f"{cfg.model.num_parameters / 1e9:.3g}e9 parameters" + (f" / {ranks} ranks" if ranks > 1 else "")
    if cfg.lora.on:
        runs = f", one for each of {cfg.trainer.max_concurrent_runs} runs" if cfg.hosts else ""
        numbers += f", frozen; at most {trained_parameters(cfg) / 1e6:,.3g} million of adapters of rank {cfg.lora.rank}{runs}"
    where, apart = "in host memory, " if memory.on_host else "", memory.optimizer_on_host
    again = cfg.reshards  # gathered again for backward
    tables = f"vocabulary {cfg.model.vocab_size:,} × width {cfg.model.hidden_size:,}"
    peak = max(memory.moments, key=lambda name: memory.moments[name])
    lines = [
        (memory.parameters + memory.gradients + (0.0 if apart else memory.optimizer), f"{where}parameters {size(memory.parameters)}, "
         f"gradients {size(memory.gradients)}{'' if apart else f', optimizer {size(memory.optimizer)}'}: {numbers}"),
        (memory.reference, f"{where}reference model, frozen"),
        (memory.context, "the process on the GPU: context, workspaces, NCCL"),
        (memory.layers, "two gathered layers: one computes, the next is prefetched" if again
         else "all layers, gathered until backward"),
        (memory.table, f"embedding {'or' if again else 'and'} head, gathered: {tables} × {cfg.model.dtype}"),
        (memory.activations, f"activations of one row: {row:,} tokens × {size(memory.activations / row)}"),
        (memory.head, "the head op: tiles of logits, gradients of hidden states and of one slice of the head"),
        (memory.head_gradient, f"the head's gradient: {tables} × {cfg.model.dtype}"),
        (memory.layer_gradients, f"a layer's gradients in {cfg.model.dtype} and their {cfg.trainer.reduce_dtype} reduction buffer"),
        (memory.table_gradients, "the same for the head, or for the embedding at the end of backward"),
        (0.0 if memory.on_host else memory.update, "a part of the optimizer's state, on the GPU for its update, and a temporary" if apart
         else "a temporary of the optimizer step: one number per parameter"),
    ]  # fmt: skip
    others = ", ".join(f"{name} +{size(value)}" for name, value in memory.moments.items() if value and name != peak)
    shown = [f"{size(value).rjust(9)}  {what}" for value, what in lines if value]
    less = f" ({others})" if others else ""
    return [*shown, f"the peak: {size(memory.states)} always, plus {size(memory.moments[peak])} when {peak}{less}"]


def _memory(cfg: TrainingRoot) -> list[str]:
    if cfg.trained_elsewhere:
        return [f"trainer: elsewhere ({cfg.trainer.shared}); a dry run of its own command shows its memory"]
    trainer = trainer_memory(cfg)
    kind = "process" if cfg.hardware.device == "cpu" else "GPU"
    alone = cfg.lora.on or cfg.hardware.nodes == 1
    return [
        f"trainer, each {kind}: {size(trainer.device)}",
        *(f"  {line}" for line in _of_trainer(cfg, trainer)),
        *([f"  each also: {size(trainer.loading)} of host memory while it reads its shards of the model"] if trainer.loading else []),
        *([f"  each also: {size(trainer.optimizer)} of host memory for the optimizer's state"] if trainer.optimizer_on_host else []),
        f"  {'rank 0' if alone else 'its hosts together'} also: {size(trainer.published)} of host memory for the copy of the weights"
        f"{' of each run' if cfg.hosts else ''} that is written beside the next step",
        *([f"  its host also: {size(kept)} for versions in weight_broadcast.folder"] if (kept := versions_in_memory(cfg)) else []),
    ]


Sections = list[tuple[str, list[str]]]


def _runs(cfg: TrainingRoot) -> list[str]:
    """What a shared trainer does; batches, steps and policy versions are those of its runs."""
    row, idle = cfg.micro_batch_tokens, cfg.trainer.idle_timeout
    return table(
        ["quantity", "value"],
        [
            ["runs", f"at most {cfg.trainer.max_concurrent_runs} at a time, each with an adapter of rank {cfg.lora.rank}"],
            ["rows", f"{row:,} tokens, {why(cfg)}; the longest sample of a run must fit, so its seq_len is at most that"],
            ["ranks", _ranks(cfg)],
            ["a step", "the runs whose batch is complete; prompts, rollouts, staleness and steps are each run's own"],
            ["ends", "when it is stopped" if idle is None else f"after {idle:g} s without a run, or when it is stopped"],
        ],
    )[1:]


def _of_training(cfg: Config | SftRoot, plan: Sequence[ProcessSpec]) -> Sections:
    if cfg.hosts:
        return [("the runs it trains", _runs(cfg)), ("memory (estimates)", _memory(cfg))]
    measures = [("the benchmark", table(["quantity", "value"], rows)[1:])] if (rows := benchmark(cfg)) else []
    if cfg.measured == "inference":
        time_of = [("time on CPU", [time_on_cpu(cfg)])] if isinstance(cfg, Config) and cfg.hardware.device == "cpu" else []
        return [*measures, *time_of, ("memory (estimates)", memory_of(cfg, plan))]
    servers = memory_of(cfg, plan, 0.0 if cfg.trained_elsewhere else trainer_memory(cfg).device) if cfg.plays else []
    batch = _batch_of_rows(cfg) if isinstance(cfg, SftRoot) else _batch(cfg)
    return [*measures, ("one step", batch), ("memory (estimates)", [*_memory(cfg), *servers])]


def _of_eval(cfg: EvalRoot, plan: Sequence[ProcessSpec]) -> Sections:
    envs = evaluated(cfg)
    sizes = {name: f"{env.num_examples or 'all'} examples × {env.rollouts_per_example} rollouts" for name, env in envs.items()}
    weights = f", of {cfg.weights_dir}" if cfg.weights_dir else ""
    rows = [["weights", f"{len(cfg.versions)}: {', '.join('the initial model' if v == 0 else f'step_{v}' for v in cfg.versions)}{weights}"]]
    rows += [[name, text] for name, text in sizes.items()]
    rows += [["new tokens", f"at most {max(env.sampling.max_tokens or 0 for env in envs.values()):,} per turn"]] if envs else []
    parts: Sections = [("the evaluation", table(["quantity", "value"], rows)[1:])]
    if cfg.client.base_url:
        return [*parts, ("endpoint", [f"{cfg.client.base_url}, model {cfg.model.name}, key in ${cfg.client.api_key_var}"])]
    return [*parts, ("memory (estimates)", memory_of(cfg, plan))]


def _of_synthesis(cfg: SynthesizeRoot, plan: Sequence[ProcessSpec]) -> Sections:
    rows = [
        [
            name,
            f"{env.num_examples or cfg.num_examples or 'all'} examples × {env.rollouts_per_example or cfg.rollouts_per_example} rollouts",
        ]
        for name, env in cfg.envs.items()
    ]
    if cfg.weights_dir:
        rows.insert(
            0,
            [
                "weights",
                f"{'the initial model' if cfg.step == 0 else f'step_{cfg.step}' if cfg.step else 'the newest'}, of {cfg.weights_dir}",
            ],
        )
    if cfg.envs:  # else they are those of a run that only the pods can read
        rows.append(
            ["new tokens", f"at most {max(e.sampling.max_tokens or cfg.sampling.max_tokens for e in cfg.envs.values()):,} per turn"]
        )
    parts: Sections = [("the synthesis", table(["quantity", "value"], rows)[1:])]
    if cfg.client.base_url:
        return [*parts, ("endpoint", [f"{cfg.client.base_url}, model {cfg.model.name}, key in ${cfg.client.api_key_var}"])]
    return [*parts, ("memory (estimates)", memory_of(cfg, plan))]


SECTIONS: dict[type, Callable[[Any, Sequence[ProcessSpec]], Sections]] = {  # a new command adds what it explains here
    Config: _of_training,
    SftRoot: _of_training,
    EvalRoot: _of_eval,
    SynthesizeRoot: _of_synthesis,
}
