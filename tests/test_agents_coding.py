"""Claude Code and Codex as npm has them, in boxes, through the gateway: a policy that says what to run, one rollout of each."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from policy_stand_in import StandIn, policy_of, task_of, tiny_chat
from sandboxes import NEEDS_BWRAP

from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import BoxConfig, HarnessConfig
from rlx.envs.kinds import load_one
from rlx.envs.wire import Settings
from rlx.trace import Turn
from rlx.types import Rollout

OPTIONS = Path(__file__).resolve().parent.parent / "examples" / "agents" / "env"
TASK = "Write the word hello into the file f."
CALLS = {
    "claude_code": ("Bash", {"command": "echo hello > f", "description": "write it"}),
    "codex": ("exec_command", {"cmd": "echo hello > f"}),
}


class Coder(StandIn):
    """Calls a tool once, and says that it is done when the history has the call."""

    async def generate(self, prompt_ids: Any, sampling: Any, request_id: str, affinity: int) -> Turn:
        self.answer, call = (lambda user: "Done."), self.answer
        if "echo hello" not in self.chat.tokenizer.decode(prompt_ids).rpartition(TASK)[2]:
            self.answer = call
        try:
            return await super().generate(prompt_ids, sampling, request_id, affinity)
        finally:
            self.answer = call


def has_registry() -> bool:
    return shutil.which("npm") is not None and subprocess.run(["npm", "ping"], capture_output=True, timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.nightly
@NEEDS_BWRAP
@pytest.mark.parametrize("name", CALLS)
def test_a_coding_agent_of_others_edits_a_file_and_each_sampled_token_is_trained_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_registry():
        pytest.skip("npm is not here, or its registry is not reached")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": TASK}) + "\n")
    option = yaml.safe_load((OPTIONS / f"{name}.yaml").read_text())
    tool, arguments = CALLS[name]
    call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    engine = Coder(tiny_chat(), lambda user: call, error=0.0)
    config = EnvConfig(
        id=option["id"],
        args={"data": "tasks.jsonl", "test": "grep -qx hello f"},
        box=BoxConfig(**option["box"]),
        harness=HarnessConfig(**option["harness"]),
    )
    env: Any = load_one("e", config, Settings(timeout=120))

    async def play() -> Rollout:
        env.policy = policy_of(engine, context_length=400_000)
        (rollout,) = await env.play(task_of(env), [0], 0)
        await env.close()
        return rollout

    rollout = asyncio.run(play())
    assert (rollout.status, rollout.stop, rollout.reward) == ("ok", "program_ended", 1.0), rollout.error
    assert (len(engine.requests), len(rollout.trace.answers), len(rollout.trace.branches())) == (2, 2, 1)
