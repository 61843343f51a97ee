"""The warm start as a configuration of `rlx sft`: what teaches the tiny model is supervised training like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlx.config.schema import (
    CkptConfig,
    DataConfig,
    HardwareConfig,
    PlayConfig,
    PlayRoot,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
    SftRoot,
    TrainerConfig,
)

WARMUP_STEPS = 20
ROW_TOKENS = 4096  # per packed row; one row holds a step of default size
LOSS = {"_target_": "rlx.losses.sft.sft", "aggregate": "token_mean"}
OPTIMIZER = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95], "weight_decay": 0.0, "fused": True, "max_norm": 1.0}


def supervised(config: PlayRoot, rows: Path, run_dir: Path, num_envs: int) -> SftRoot:
    """The run that trains the initial model of `config` on `rows`, the demonstrations of `num_envs` environments.

    One process, in float32: `model.warm_start` has the steps, the batch, the peak rate and the seed. The rate warms up and decays to 0.
    Demonstrations longer than the model's context are left out.
    """
    settings = config.model.warm_start
    assert settings is not None, "only a model with a warm start is trained before a run"
    hardware = config.hardware
    length = config.model.context_length
    renderer = "default" if config.model.renderer == "auto" else config.model.renderer  # the package need not be searched for this model
    return SftRoot(
        seed=settings.seed,
        seq_len=length,
        max_steps=settings.steps * num_envs,
        run=RunConfig(name=run_dir.name, dir=str(run_dir)),
        model=replace(config.model, dtype="float32", attention="auto", warm_start=None, renderer=renderer),
        hardware=HardwareConfig(
            name=f"{hardware.name}, one process",
            device=hardware.device,
            gpus_per_node=min(1, hardware.gpus_per_node),
            trainer_processes=1,
            cpu_threads=hardware.cpu_threads,
        ),
        launcher=config.launcher,
        data=DataConfig(name=str(rows), batch_size=settings.batch_size),
        sampling=SamplingConfig(max_tokens=length),
        loss=LOSS,
        optim={**OPTIMIZER, "lr": settings.lr},
        scheduler=SchedulerConfig(type="cosine", warmup_steps=min(WARMUP_STEPS, settings.steps * num_envs)),
        trainer=TrainerConfig(micro_batch_tokens=max(ROW_TOKENS, length)),
        ckpt=CkptConfig(interval=None),
        orchestrator=PlayConfig(trajectory_strategy=config.orchestrator.trajectory_strategy),
    )
