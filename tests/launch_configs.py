"""Configurations for the launch tests, made from the hardware presets without hydra."""

from __future__ import annotations

from typing import Any

import yaml

from rlx.config.presets import conf_directory
from rlx.config.schema import Config
from rlx.config.validate import Builder

MODEL = {
    "name": "Qwen/Qwen3-8B",
    "context_length": 40960,
    "num_parameters": 8.19e9,
    "hidden_size": 4096,
    "num_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def config(hardware: str, /, **sections: Any) -> Config:
    """A configuration with a shipped hardware preset. `sections` override it and are merged one level deep."""
    data: dict[str, Any] = {
        "max_steps": 10,
        "seq_len": 8192,
        "model": dict(MODEL),
        "envs": {"math": {"id": "rlx-math"}},
        "sampling": {"max_tokens": 6144},
        "orchestrator": {"batch_size": 256, "rollouts_per_example": 8},
        "optim": {"_target_": "torch.optim.AdamW", "lr": 1e-6},
    }
    preset = yaml.safe_load((conf_directory() / "hardware" / f"{hardware}.yaml").read_text())
    for name, section in [*preset.items(), *sections.items()]:
        data[name] = {**data.get(name, {}), **section} if isinstance(section, dict) else section
    builder = Builder(Config)
    cfg = builder.build(Config, data)
    assert not builder.problems, builder.problems
    return cfg
