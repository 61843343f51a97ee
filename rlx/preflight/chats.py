"""Asks whether the models of one or several configurations can be given the tools of their environments and the arguments of their chat
templates, before anything starts.

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

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig
from rlx.envs.probed import Probed
from rlx.plan.environment import DEVICES, inherited
from rlx.process import SUPERVISOR


def check_chats(configs: Sequence[CommandConfig], environments: Sequence[Mapping[str, Probed]]) -> None:
    """Raise ConfigError with what the models' chat formats lose of the tools of their environments.

    `environments`: what `rlx.preflight.probes` found, for each configuration. A model that rlx trains itself has a
    format that serves tools.
    """
    asked: dict[str, str | None] = {}
    for cfg, found in zip(configs, environments, strict=True):
        tools = {name: [tool.name for tool in probed.tools] for name, probed in found.items() if probed.tools}
        if (tools or cfg.model.chat_template_kwargs) and not cfg.model.prepared:
            request = json.dumps({"model": asdict(cfg.model), "tools": tools}, sort_keys=True)
            asked[request] = _ask(request) if request not in asked else asked[request]
    if problems := [problem for problem in asked.values() if problem is not None]:
        raise ConfigError(problems)


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
