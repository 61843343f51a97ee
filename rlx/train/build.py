"""Builds a rank's model, reference, objective and optimizer from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from rlx.config.instantiate import instantiate
from rlx.config.loss_traits import declared_in
from rlx.config.objectives import trained_by
from rlx.config.sampling import biases
from rlx.config.schema import Config, LossTerms, OptimTerms, PlayRoot, TrainingRoot, split_terms
from rlx.losses.base import Objective
from rlx.losses.mix import LossMix
from rlx.models.load import load_policy
from rlx.models.policy import PolicyModel
from rlx.models.slots import Slot
from rlx.parallel.mesh import Mesh
from rlx.train.muon import groups_of
from rlx.train.offload import CPUOffloadOptimizer
from rlx.train.reference import Reference, check_tokenizers
from rlx.train.step import PolicyTrainer

log = logging.getLogger("rlx.trainer")

# Nats a token in the mean. Measured: 1e-6 in float32, 0.02 in bfloat16. A wrong model differs by nats.
ENGINE_NOISE = {"float32": 0.01, "bfloat16": 0.5, "float16": 0.5}
SEEN = 1e-4  # a learning rate whose updates by Adam still change most weights of a usual size in bfloat16


def build(
    cfg: TrainingRoot, source: str, mesh: Mesh, working: Callable[[str], AbstractContextManager[None]], *, resumes: bool = False
) -> PolicyTrainer:
    """Load the model from `source` (a folder or a hub name) and build its trainer.

    `resumes`: a checkpoint is loaded afterwards, so the initial weights need not be read. `working` is entered around each load, which may
    take minutes, with the name of the phase.
    """
    lora = cfg.lora if cfg.lora.enabled else None
    if cfg.uses_reference and cfg.ref.name is not None and mesh.first:  # its error ends the run, before the policy is loaded
        check_tokenizers(source, cfg.ref.name, trust_remote_code=cfg.model.trust_remote_code)
    model = policy_of(cfg, source, mesh, working, resumes=resumes)
    reference: Reference | None = None
    if cfg.uses_reference and lora is not None and cfg.ref.name is None:
        reference = Reference(model, adapters=False)
    elif cfg.uses_reference:
        # A frozen reference needs only its compute dtype. One that follows the policy would lose small changes in that dtype.
        master = cfg.model.dtype if cfg.ref.sync_interval is None else cfg.trainer.optimization_dtype
        with working("loading the reference model"):
            frozen = load_policy(cfg.ref.name or source, mesh, optimization_dtype=master, trained=False, **_loading(cfg))
        reference = Reference(frozen, sync_interval=cfg.ref.sync_interval, alpha=cfg.ref.alpha, teacher=cfg.ref.name is not None)
        reference.check_vocabulary(model)
    optim_terms, optim = split_terms(cfg.optim, OptimTerms)
    if cfg.trainer.optimization_dtype == "bfloat16" and lora is None and optim.get("lr", SEEN) < SEEN and mesh.first:
        log.warning(
            "trainer.optimization_dtype=bfloat16 rounds away an update below about 1/500 of a weight; with optim.lr=%g most are smaller. "
            "Keep float32 masters (the default; model.dtype=bfloat16 computes in 16 bits all the same), or use a rate of about %g",
            optim["lr"],
            SEEN,
        )
    trainer = PolicyTrainer(
        model,
        losses_of(cfg),
        optimizer_of(cfg, optim, model, mesh),
        schedule=cfg.scheduler,
        total_updates=cfg.max_steps * cfg.num_updates,
        max_norm=optim_terms.max_norm,
        mesh=mesh,
        reference=reference,
    )
    if isinstance(cfg, PlayRoot) and not any(biases(vars(each)) for each in (cfg.sampling, *(env.sampling for env in cfg.envs.values()))):
        trainer.engine_noise = ENGINE_NOISE[cfg.model.dtype]
    return trainer


def policy_of(
    cfg: TrainingRoot, source: str, mesh: Mesh, working: Callable[[str], AbstractContextManager[None]], *, resumes: bool = False
) -> PolicyModel:
    """The model that is trained; of a shared trainer with an adapter for each run. For the arguments see `build`."""
    master, lora, slots = cfg.trainer.optimization_dtype, cfg.lora if cfg.lora.enabled else None, cfg.trainer.max_concurrent_runs
    trained: dict[str, Any] = {"ac": cfg.trainer.ac, "ac_offloading": cfg.trainer.ac_offloading, "lora": lora, "slots": slots}
    trained["served"] = served(cfg)
    with working("loading the model"):
        model = load_policy(source, mesh, optimization_dtype=master, read=not resumes, seed=cfg.seed, **trained, **_loading(cfg))
    log.info("log-probability backend: %s; Liger layer kernels: %s", model.logprob_backend, model.liger)
    return model


def optimizer_of(cfg: TrainingRoot, optim: dict[str, Any], model: PolicyModel | Slot, mesh: Mesh) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, for the trained parameters of a model.

    `cfg` says where its state lies: of a run in a shared trainer, the trainer's configuration.
    """
    optimizer: torch.optim.Optimizer = instantiate(optim, params=groups_of(model.layers, model))
    return CPUOffloadOptimizer(optimizer, mesh) if cfg.trainer.optim_cpu_offload else optimizer


def _loading(cfg: TrainingRoot) -> dict[str, Any]:
    """What the policy and a reference have in common."""
    return {
        "dtype": cfg.model.dtype,
        "reduce_dtype": cfg.trainer.reduce_dtype,
        "attention": cfg.model.attention,
        "logprob_backend": cfg.model.logprob_backend,
        "liger": cfg.model.liger,
        "cpu_offload": cfg.trainer.fsdp_cpu_offload,
        "reshard_after_forward": cfg.reshards,
        "compile": cfg.trainer.compile,
        "trust_remote_code": cfg.model.trust_remote_code,
        "context": cfg.seq_len,
    }


def served(cfg: TrainingRoot) -> int | None:
    """The context of the servers that the run starts; None if it starts none."""
    return cfg.max_model_len if isinstance(cfg, PlayRoot) and cfg.started_servers else None


def losses_of(cfg: TrainingRoot) -> LossMix:
    """The objectives of the run. In the metrics, one of several is named after its environments: `math`, `sums+word_guess`."""
    objectives: list[Objective] = []
    by_env: dict[str, int] = {}
    for number, (node, envs) in enumerate(trained_by(cfg) if isinstance(cfg, Config) else [(cfg.loss, ())]):
        terms, loss = split_terms(node, LossTerms)
        function = instantiate(loss)
        by_reference = isinstance(cfg, Config) and not cfg.teacher.base_url and not declared_in(function).demonstrated
        label, longest = "+".join(envs), cfg.longest_answer
        objectives.append(Objective(function, terms, max_length=longest, label=label, reference_teaches=by_reference))
        by_env |= dict.fromkeys(envs, number)
    return LossMix(objectives, by_env)
