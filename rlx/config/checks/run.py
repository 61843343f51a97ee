"""The rules for what is run and where its files are: model, adapters, run directory, benchmarks, shared trainers, endpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rlx.config.chat_format import arguments_of, families, family_of, fields_of, template_names, template_path, unread
from rlx.config.gpus import visible_gpus
from rlx.config.k8s_volume import in_a_pod
from rlx.config.rules import Describe, Rule, check_of, problem, table
from rlx.config.schema import CommandConfig, Config, EvaluatedRun, LoraConfig, PlayRoot, TrainingRoot
from rlx.config.schema_eval import PlayWithModel
from rlx.config.signatures import is_installed
from rlx.config.validate import Problem


def is_path(name: str) -> bool:
    """Whether a model's name can only be a folder."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _lies(folder: str | None, *file: str) -> bool:
    return Path(folder or "", *file).expanduser().is_file()


table(
    CommandConfig,
    [
        Rule(
            "model.name",
            lambda c: c.model.warm_start is not None and "/" in c.model.name,
            "rlx would make the model itself (model.warm_start), and the name would only be a label",
            "a model that is loaded, such as model=qwen3_0_6b; model=tiny_trained is the tiny model from a folder",
        ),
        Rule(
            "model.name",
            lambda c: c.model.warm_start is None and is_path(c.model.name) and not _lies(c.model.name, "config.json"),
            "this is no folder with a config.json",
            "the path of a Hugging Face model folder; adapters are first merged into their model (docs/lora.md)",
        ),
        Rule(
            "seq_len model.context_length",
            lambda c: c.seq_len > c.model.context_length,
            "samples are longer than the model's context",
            "seq_len={s.model.context_length} or less, or another model",
        ),
        Rule(
            "run.name run.dir",
            lambda c: not str(c.run.name or "").isprintable() or not str(c.run.dir or "").isprintable(),
            "a character that steers a terminal is no part of a name",
            "choose another",
        ),
        Rule(
            "resume clean",
            lambda c: c.resume is not None and c.clean,
            "a run cannot be both deleted and resumed",
            "remove one of the two",
        ),
        Rule(
            "resume",
            lambda c: c.resume and (c.resume == "latest" or c.resume.isdecimal()) and c.run.name is None and c.run.dir is None,
            "this does not say which run to resume",
            "run.name=NAME or run.dir=PATH; resume=PATH forks a run",
        ),
    ],
)


def _has_package(name: str) -> Rule[TrainingRoot]:
    return Rule(
        f"logger.{name}.samples",
        lambda c: getattr(c.logger, name) and not c.dry_run and not is_installed(name),
        f"the package {name} is not installed",
        f"pip install 'rlx[{name}]'",
    )


table(
    TrainingRoot,
    [
        *(_has_package(name) for name in ("wandb", "tensorboard", "mlflow", "trackio")),
        Rule(
            "scheduler.type scheduler.decay_steps scheduler.min_lr",
            lambda c: c.scheduler.type == "constant" and (c.scheduler.decay_steps is not None or c.scheduler.min_lr > 0),
            "a constant learning rate does not decay",
            "scheduler.type=cosine or linear, or leave out the others",
        ),
        Rule(
            "ref.name ref.sync_interval",
            lambda c: c.ref.name is not None and c.ref.sync_interval is not None,
            "a teacher does not follow the policy",
            "set one to null; without ref.name the reference is the initial policy",
        ),
        Rule(
            "ref.sync_interval",
            lambda c: c.ref.sync_interval is not None and not c.uses_reference,
            "no reference is loaded that could follow the policy",
            "loss.kl.beta above 0",
        ),
        Rule(
            "lora.rank ref.sync_interval",
            lambda c: c.lora.enabled and c.ref.sync_interval is not None,
            "with adapters the reference is the model without them, which does not follow the policy",
            "ref.sync_interval=null, or lora.rank=null to train the whole model",
        ),
    ],
)


@check_of(CommandConfig)
def adapters_without_a_rank(cfg: CommandConfig, of: Describe) -> Iterator[Problem]:
    # A model's file may say what adapters would get. Whoever types a key wants adapters, and would train the whole model.
    typed = [f"lora.{f.name}" for f in fields(LoraConfig) if f.name != "rank" and of.typed(f"lora.{f.name}")]
    if typed and not cfg.lora.enabled:
        yield problem("there are no adapters", [*typed, "lora.rank"], "lora.rank=16 or so, or leave out the others", of)


table(
    PlayRoot,
    [
        Rule(
            "lora.rank model.dtype",
            lambda c: (
                c.lora.enabled
                and c.generates_rollouts
                and not c.inference.base_url
                and (c.hardware.device, c.model.dtype) == ("cuda", "float32")
            ),
            "on a GPU vLLM serves adapters of models in 16 bits only",
            "model.dtype=bfloat16",
        ),
    ],
)

table(
    PlayWithModel,
    [
        Rule(
            "client.base_url weights_dir inference.base_url",
            lambda c: c.client.base_url and (c.weights_dir is not None or c.inference.base_url),
            "the model would be in two places",
            "leave one",
        ),
        Rule(
            "client.base_url model.name",
            lambda c: c.client.base_url and c.model.prepared,
            "no endpoint serves a model that rlx makes itself",
            "model=endpoint model.name=NAME, with the endpoint's name for the model",
        ),
        Rule(
            "client.base_url client.timeout",
            lambda c: c.client.base_url and any(env.turn_timeout is not None for env in c.envs.values()),
            "`turn_timeout` of an environment bounds the answers of rlx's own servers, not those of an endpoint",
            "leave out turn_timeout; client.timeout is that of each request",
        ),
        Rule(
            "client.api_key_var",
            lambda c: c.client.base_url and c.client.api_key_var and not c.dry_run and not os.environ.get(c.client.api_key_var),
            "the key of {s.client.base_url} is missing: this variable is not set",
            "set it, name another, or client.api_key_var=null for an endpoint that asks for none",
        ),
        Rule(
            "resume",
            lambda c: c.resume not in (None, "latest"),
            "this command has no checkpoints, so it can only go on where it was",
            "resume=latest",
        ),
    ],
)

table(
    Config,
    [
        Rule(
            "bench_role bench",
            lambda c: c.bench_role != "trainer" and not c.bench,
            "nothing would be measured",
            "bench=true, or leave out bench_role",
        ),
        Rule(
            "bench replay",
            lambda c: c.bench and c.replay is not None,
            "a benchmark does not train on recorded batches",
            "remove one of the two",
        ),
    ],
)

table(
    EvaluatedRun,
    [
        Rule(
            "bench eval.interval",
            lambda c: c.bench and c.eval.interval is not None,
            "a benchmark evaluates nothing",
            "remove one of the two",
        ),
    ],
)

table(
    Config,
    [
        Rule(
            "trainer.shared_trainer_dir trainer.max_concurrent_runs",
            lambda c: c.uses_shared_trainer and c.is_shared_trainer,
            "a run cannot be a shared trainer and be trained by one",
            "leave one",
        ),
        Rule(
            "trainer.shared_trainer_dir trainer.max_concurrent_runs lora.rank",
            lambda c: (c.uses_shared_trainer or c.is_shared_trainer) and not c.lora.enabled,
            "the runs of a shared trainer train adapters",
            "lora.rank=16 or so",
        ),
        Rule(
            "trainer.shared_trainer_dir trainer.max_concurrent_runs replay bench",
            lambda c: (c.uses_shared_trainer or c.is_shared_trainer) and (c.replay is not None or c.bench),
            "a replay or a benchmark needs a trainer of its own",
            "leave one",
        ),
        Rule(
            "trainer.shared_trainer_dir trainer.max_concurrent_runs launcher.name",
            lambda c: (c.uses_shared_trainer or c.is_shared_trainer) and (c.launcher.name != "local" or in_a_pod()),
            "shared trainers and their runs start on one machine only",
            "launcher=local, without `rlx pod`",
        ),
        Rule(
            "trainer.shared_trainer_dir trainer.max_concurrent_runs ref.name",
            lambda c: (c.uses_shared_trainer or c.is_shared_trainer) and c.ref.name is not None,
            "the reference of the runs of a shared trainer is its model without adapters",
            "ref.name=null",
        ),
        Rule(
            "trainer.cp trainer.tp trainer.ep trainer.compile",
            lambda c: c.is_shared_trainer and (max(c.trainer.cp, c.trainer.tp, c.trainer.ep) > 1 or c.trainer.compile),
            "a shared trainer neither divides nor compiles the layers of several adapters",
            "leave them at their defaults",
        ),
    ],
)


@check_of(CommandConfig)
def gpus_present(cfg: CommandConfig, of: Describe) -> Iterator[Problem]:
    if cfg.dry_run or cfg.launcher.name != "local" or in_a_pod():  # a plan may be for another machine
        return
    if cfg.hardware.nodes > 1:
        fix = "launcher=slurm; start each host (`rlx pod`) or each role (`rlx trainer`) by hand (docs/cluster.md); or dry_run=true to plan"
        yield problem("launcher=local starts processes on this host only", ["hardware.nodes"], fix, of)
        return
    visible = visible_gpus() if cfg.hardware.device == "cuda" else 0
    if cfg.num_gpus > visible:
        fix = "hardware=auto, which fits the GPUs here, hardware=cpu, or dry_run=true to plan for another machine"
        yield problem(
            f"the layout needs {cfg.num_gpus} GPUs, and {visible} are visible here", ["hardware.name", "hardware.device"], fix, of
        )


table(
    PlayRoot,
    [
        Rule(
            "model.renderer",
            lambda c: c.model.renderer not in ("auto", "default") and c.model.renderer not in families(),
            "there is no such renderer",
            "auto, default (the chat template), or a family of the package `renderers`, such as qwen3",
        ),
        Rule(
            "model.chat_template model.renderer",
            lambda c: c.model.chat_template is not None and c.model.renderer not in ("auto", "default"),
            "a renderer does not read a chat template",
            "remove one; model.renderer=default uses the template",
        ),
        Rule(
            "model.tool_call_parser model.reasoning_parser model.renderer",
            lambda c: (c.model.tool_call_parser, c.model.reasoning_parser) != ("auto", "auto") and family_of(c.model) is not None,
            "the model's renderer reads answers itself, so no parser is used",
            "auto for both, or model.renderer=default, which uses the chat template",
        ),
        Rule(
            "model.name model.template_drops_thinking orchestrator.trajectory_strategy model.renderer",
            lambda c: (
                c.generates_rollouts
                and c.model.template_drops_thinking
                and c.orchestrator.trajectory_strategy == "interleaved"
                and c.model.chat_template is None
                and c.chat.thinking != "template"
                and family_of(c.model) is None  # a renderer keeps all reasoning (rlx.policy.chat)
            ),
            "the chat template removes the reasoning of earlier turns, so later prompts do not extend earlier ones",
            "the renderer of the model's family, such as model.renderer=qwen3; or chat.thinking=template: several samples a rollout",
        ),
    ],
)


@check_of(PlayRoot)
def template_is_read(cfg: PlayRoot, of: Describe) -> Iterator[Problem]:
    model, keys = cfg.model, ["model.chat_template", "model.chat_template_kwargs"]
    given, missing, known = model.chat_template_kwargs, [], []
    if model.chat_template is not None:
        try:
            template = template_path(model.chat_template).read_text()
            missing, known = unread(given, template), sorted(arguments_of(template))
        except (OSError, ValueError) as error:
            fix = f"the path of a Jinja file, or a template of rlx by its name: {', '.join(template_names())}"
            yield problem(f"the chat template cannot be read ({error})", keys[:1], fix, of)
    elif given and model.warm_start is not None:
        missing = list(given)
    elif given and (family := family_of(model)) in families():
        known = sorted(fields_of(str(family)))
        missing = sorted({*given} - {*known})
    if missing:
        why = f"the chat format does not read {', '.join(missing)}, so they would have no effect"
        yield problem(why, keys[1:], f"leave them out; it reads {', '.join(known) or 'none'}", of)
