"""Asks whether the models of one or several configurations can be given conversations, the tools of their environments and the arguments of
their chat templates, before anything starts.

Rendering a chat template takes transformers, which this floor does not import: `rlx.policy.probe` does it in a process of its own. It is
asked only if there are any.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig, Config, ModelConfig, SftRoot
from rlx.envs.probe_cache import Probed
from rlx.plan.environment import DEVICES, inherited
from rlx.process import SUPERVISOR

NAMES, TEMPLATES = "tokenizer_config.json", ("chat_template.jinja", "chat_template.json")


def check_chats(configs: Sequence[CommandConfig], environments: Sequence[Mapping[str, Probed]]) -> None:
    """Raise ConfigError for a tokenizer without a chat template or an end, and with what chat formats lose of environments' tools.

    `environments`: what `rlx.preflight.env_probe` found, for each configuration. A model that rlx trains itself has a
    format that serves tools.
    """
    asked: dict[str, str | None] = {}
    for cfg, found in zip(configs, environments, strict=True):
        tools = {name: [tool.name for tool in probed.tools] for name, probed in found.items() if probed.tools}
        on_random_tokens = isinstance(cfg, Config) and cfg.bench_target in ("trainer", "inference")
        rendered = not on_random_tokens and not (isinstance(cfg, SftRoot) and cfg.data.type == "fake")
        asks = tools or cfg.model.chat_template_kwargs or (rendered and _lacks_a_part(cfg.model))
        if asks and not cfg.model.prepared:
            request = json.dumps({"model": asdict(cfg.model), "tools": tools}, sort_keys=True)
            asked[request] = _ask(request) if request not in asked else asked[request]
    if problems := [problem for problem in asked.values() if problem is not None]:
        raise ConfigError(problems)


def _lacks_a_part(model: ModelConfig) -> bool:
    """Whether the files of a tokenizer on this machine name no end of a sequence, or no chat template. Then it is worth loading."""
    from huggingface_hub import try_to_load_from_cache

    local = Path(model.name).expanduser()
    found: Any = local / NAMES if local.is_dir() else try_to_load_from_cache(model.name, NAMES)
    if not isinstance(found, str | Path) or not Path(found).is_file():
        return False
    folder = Path(found).parent
    try:
        written = json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError:  # loading it will say more
        return False
    has_template = "chat_template" in written or any((folder / name).is_file() for name in TEMPLATES)
    return not written.get("eos_token") or not (has_template or model.chat_template or model.renderer not in ("auto", "default"))


def _ask(request: str) -> str | None:
    environment = inherited(os.environ) | {DEVICES: "", SUPERVISOR: str(os.getpid()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "rlx.policy.probe"],
        input=request,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"the tokenizer of the model cannot be used: {last}\n  fix: check model.name and model.chat_template")
    return json.loads(done.stdout)["problem"]
