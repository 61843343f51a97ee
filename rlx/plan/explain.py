"""Explains a plan in words and numbers before the run starts.

Turns a configuration and its plan into text. Asks the machine only for the memory of its GPUs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence

from rlx.config.errors import ConfigError
from rlx.config.eval_envs import evaluated, is_due
from rlx.config.row_budget import why
from rlx.config.schema import CommandConfig, Config, PlayRoot, SftRoot, TrainingRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.inference.arguments import command, environment
from rlx.inference.middleware import SECRET
from rlx.plan.environment import DEVICES
from rlx.plan.memory import memory_lines
from rlx.plan.process_spec import ProcessSpec

Row = tuple[str, str]


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
    sections: dict[str, list[str]] = {
        "composed": [
            *table(["", ""], choices.items())[1:],
            *(f"note: {note}" for note in notes),
            f"run directory: {run_dir}",
        ],
        "environments": [*environments],
        "processes": [
            *table(["process", "host", "GPUs", "ports", "layout"], [_process(cfg, spec) for spec in plan]),
            *_warnings(cfg, plan),
        ],
        "vLLM's command lines": command_lines(cfg, plan) if isinstance(cfg, PlayRoot) else [],
    }
    if isinstance(cfg, EvalRoot | SynthesizeRoot):
        sections["what is played"] = table(["", ""], _played(cfg))[1:]
    elif isinstance(cfg, Config | SftRoot) and cfg.bench_target != "inference":
        rows = _runs(cfg) if cfg.is_shared_trainer else _batch_of_rows(cfg) if isinstance(cfg, SftRoot) else _batch(cfg)
        sections["one step"] = table(["", ""], rows)[1:]
    sections["memory (estimates)"] = memory_lines(cfg, plan)
    return "\n\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections.items() if lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _process(cfg: CommandConfig, spec: ProcessSpec) -> list[str]:
    host = "this machine" if cfg.hardware.nodes == 1 and cfg.launcher.name == "local" else f"host {spec.node}"
    ports = ", ".join(f"{purpose} {port or 'any free'}" for purpose, port in spec.ports.items()) or "-"
    return [spec.name, host, ",".join(map(str, spec.gpus)) or "cpu", ports, _layout(cfg, spec)]


def _layout(cfg: CommandConfig, spec: ProcessSpec) -> str:
    """How a process divides its model, or how many rollouts it has in flight."""
    if spec.role == "trainer" and isinstance(cfg, TrainingRoot):
        copies, trainer = cfg.trainer.dp_replicate, cfg.trainer
        parts = {
            f", {copies} copies": copies,
            f"; each row on {trainer.ranks_of_a_row} of them": trainer.ranks_of_a_row,
            f", matrices divided over {trainer.tp}": trainer.tp,
            f"; experts divided over {trainer.ep}": trainer.ep,
        }
        over = "".join(text for text, number in parts.items() if number > 1)
        return f"FSDP2 over {cfg.trainer_ranks // copies} ranks{over}" if cfg.trainer_ranks > 1 else "one process"
    if spec.role == "inference" and isinstance(cfg, PlayRoot):
        return f"vLLM, {cfg.model.dtype}, context {cfg.max_model_len:,}, tensor parallel {cfg.hardware.tensor_parallel}"
    if spec.role == "prepare" or not isinstance(cfg, PlayRoot):
        return "-"
    more = "" if not cfg.adaptive_concurrency else " at first, then as many as the engines can use"
    return f"{cfg.concurrency} rollouts in flight{more}"


def _warnings(cfg: CommandConfig, plan: Sequence[ProcessSpec]) -> list[str]:
    """Warnings of hosts and GPUs without a process, and of groups of ranks that exchange tokens in every layer and lie on several hosts."""
    hardware, nodes = cfg.hardware, [spec.node for spec in plan if spec.role == "trainer"]
    trainer = cfg.trainer if isinstance(cfg, TrainingRoot) and len(set(nodes)) > 1 else None
    groups = {} if trainer is None else {"tp": trainer.tp, "ep": trainer.ep}
    found = [
        f"warning: trainer.{key}={size} does not divide the {nodes.count(nodes[0])} trainer ranks of a host, so some groups exchange "
        "tokens between hosts in every layer"
        for key, size in groups.items()
        if nodes.count(nodes[0]) % size
    ]
    hosts = sorted({*range(hardware.nodes)} - {spec.node for spec in plan})
    have = hardware.nodes * hardware.gpus_per_node if hardware.device == "cuda" else 0
    gpus = have - len({(spec.node, gpu) for spec in plan for gpu in spec.gpus})
    parts = [f"host {', '.join(map(str, hosts))} (hardware.nodes={hardware.nodes})"] if hosts else []
    parts += [f"{gpus} of {have} GPUs (hardware.gpus_per_node={hardware.gpus_per_node})"] if have and gpus else []
    return found + ([f"warning: no process is on {' and '.join(parts)}"] if parts else [])


def _batch(cfg: Config) -> list[Row]:
    """The arithmetic of a step of reinforcement learning."""
    rollouts, mini, lag = cfg.orchestrator.batch_size, cfg.trainer.num_minibatches, cfg.max_async_level
    trained, played = rollouts * cfg.seq_len, [env for env in cfg.envs.values() if env.weight > 0]
    longest = max(env.sampling.max_tokens or cfg.sampling.max_tokens for env in played)
    stale = (
        f"at most {lag} policy version{'s' * (lag > 1)} old; older groups are dropped, counted and replaced" if lag else "none: on-policy"
    )
    passes = f", {cfg.trainer.num_iterations} times over" if cfg.trainer.num_iterations > 1 else ""
    elsewhere = f"rows of the shared trainer {cfg.trainer.shared_trainer_dir}, together with those of its other runs"
    return [
        ("prompts", f"{cfg.num_groups:,}{_more_prompts(cfg)}"),
        ("rollouts", f"{rollouts:,} = {cfg.num_groups:,} prompts × {cfg.mean_group_size:.4g}; {rollouts * cfg.max_steps:,} in the run"),
        ("new tokens", f"at most {rollouts * longest:,} = {rollouts:,} × max_tokens {longest:,} (per turn)"),
        ("tokens trained on", f"at most {trained:,} = {rollouts:,} × seq_len {cfg.seq_len:,}, prompts included"),
        *([("micro-batches", elsewhere)] if cfg.uses_shared_trainer else _rows(cfg, trained / mini)),
        (
            "optimizer steps",
            f"{cfg.num_updates} per step{passes}; {cfg.max_steps * cfg.num_updates:,} in the run of {cfg.max_steps:,} steps",
        ),
        ("staleness", stale),
        *_evaluations(cfg),
    ]


def _batch_of_rows(cfg: SftRoot) -> list[Row]:
    """The arithmetic of a supervised step."""
    rows, data = cfg.data.batch_size, cfg.data
    trained, long = rows * cfg.seq_len, "left out" if data.on_too_long == "drop" else "cut"
    return [
        *(("data", f"{name} (weight {each.weight:g}): {each.name}, {each.split}") for name, each in data.all_sets.items()),
        ("rows", f"{rows:,}, {rows * cfg.max_steps:,} in the run of {cfg.max_steps:,} steps"),
        ("trained roles", ", ".join(data.loss_mask.roles)),
        ("tokens", f"at most {trained:,} = {rows:,} × seq_len {cfg.seq_len:,}; a longer sample is {long} and counted"),
        *_rows(cfg, trained),
        ("optimizer steps", f"{cfg.num_updates} per step; {cfg.max_steps * cfg.num_updates:,} in the run"),
        ("validation", f"{cfg.val.name}, every {cfg.val.interval} steps" if cfg.val.name is not None else "none"),
        *_evaluations(cfg),
    ]


def _runs(cfg: TrainingRoot) -> list[Row]:
    """What a shared trainer does; batches, steps and policy versions are those of its runs."""
    idle = cfg.trainer.idle_timeout
    return [
        ("runs", f"at most {cfg.trainer.max_concurrent_runs} at a time, each with an adapter of rank {cfg.lora.rank}"),
        ("rows", f"{cfg.micro_batch_tokens:,} tokens: {why(cfg)}; the longest sample of a run must fit"),
        ("ends", "when it is stopped" if idle is None else f"after {idle:g} s without a run, or when it is stopped"),
    ]


def _played(cfg: EvalRoot | SynthesizeRoot) -> Iterable[Row]:
    """What an evaluation or a synthesis plays, and with which weights."""
    versions = cfg.versions if isinstance(cfg, EvalRoot) else ["newest" if cfg.step is None else cfg.step]
    if cfg.weights_dir:
        yield "weights", f"{', '.join('the initial model' if v == 0 else str(v) for v in versions)}, of {cfg.weights_dir}"
    for name, env in cfg.envs.items():
        examples, each = env.num_examples or cfg.num_examples or "all", env.rollouts_per_example or cfg.rollouts_per_example
        tokens = env.sampling.max_tokens or cfg.sampling.max_tokens
        yield name, f"{examples} examples × {each} rollouts, at most {tokens:,} new tokens per turn"
    if cfg.client.base_url:
        yield "endpoint", f"{cfg.client.base_url}, model {cfg.model.name}, key in ${cfg.client.api_key_var}"


def _rows(cfg: TrainingRoot, tokens: float) -> list[Row]:
    """How the `tokens` of an optimizer step become packed rows."""
    row, together = cfg.micro_batch_tokens, cfg.trainer.ranks_of_a_row
    unit = "rank" if together == 1 else f"group of {together} ranks"
    count = math.ceil(tokens / (row * cfg.data_ranks))
    each = f"at most {count:,} per {unit} and optimizer step, each one row of {row:,} tokens, on {cfg.data_ranks} of them"
    return [("micro-batches", each), ("", f"rows of {row:,} tokens: {why(cfg)}")]


def _evaluations(cfg: Config | SftRoot) -> list[Row]:
    """How often, and how many rollouts each."""
    if cfg.eval.interval is None:
        return []
    sizes = ", ".join(f"{name} {env.num_examples or 'all'} × {env.rollouts_per_example}" for name, env in evaluated(cfg).items())
    count = sum(is_due(cfg, version) for version in range(cfg.max_steps + 1))
    return [("evaluations", f"{count} in the run, of {sizes} (examples × rollouts), each at one policy version, alongside training")]


def _more_prompts(cfg: Config) -> str:
    """The extra prompts of a step that oversampling and filters cause."""
    filters, asked = cfg.orchestrator.difficulty_filter, math.ceil(cfg.num_groups * cfg.orchestrator.oversampling_factor)
    text = f"; {asked:,} are requested at a time" if asked > cfg.num_groups else ""
    if rules := filters.rules:
        text += f"; groups filtered out by {', '.join(rules)} are replaced, at most {cfg.num_groups * filters.max_rounds:,} per step"
    return text


def command_lines(cfg: PlayRoot, plan: Sequence[ProcessSpec]) -> list[str]:
    """What starts each inference server; the same in another shell makes a server that a run can train (`inference.base_url`).

    Raises ConfigError if vLLM cannot serve the model so.
    """
    model = "<initial model>" if cfg.model.prepared or getattr(cfg, "weights_dir", None) else cfg.model.name
    host = cfg.inference.host or ("0.0.0.0" if cfg.hardware.nodes > 1 else "127.0.0.1")
    lines = []
    for spec in (spec for spec in plan if spec.role == "inference"):
        try:
            words = command(cfg, model, host, spec.ports["http"] or "<a free port>", spec.replica, spec.argv[0])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        variables = environment(cfg, {}) | ({DEVICES: ",".join(map(str, spec.gpus))} if spec.gpus else {})
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"{spec.name}: {shown} {SECRET}=<secret> {shlex.join(words)}")
    return lines
