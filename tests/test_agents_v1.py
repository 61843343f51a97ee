"""v1 tasksets whose agents are programs in boxes: each language is recorded through verifiers' interception server."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from policy_stand_in import OUTSIDE, SAMPLING, policy_of, task_of
from sandboxes import NEEDS_BWRAP
from test_gateway import Engine, check

from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import HarnessConfig
from rlx.envs.kinds import load_one
from rlx.envs.wire import Settings
from rlx.types import Rollout

pytestmark = [NEEDS_BWRAP, pytest.mark.slow]
sys.path.insert(0, OUTSIDE) if OUTSIDE not in sys.path else None

CHAT = """
import os, openai
client = openai.OpenAI()
messages = [{"role": "user", "content": os.environ["TASK"]}]
for _ in range(2):
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
open("answer.txt", "w").write(said)
"""
MESSAGES = """
import os, anthropic
client = anthropic.Anthropic()
messages = [{"role": "user", "content": os.environ["TASK"]}]
tools = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
for _ in range(2):
    with client.messages.stream(model="policy", max_tokens=90, messages=messages, tools=tools) as events:
        message = events.get_final_message()
    messages += [{"role": "assistant", "content": message.content}]
    calls = [part for part in message.content if part.type == "tool_use"]
    messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": calls[0].id, "content": "5"}] if calls else "go on"}]
open("answer.txt", "w").write(message.content[0].text)
print(client.messages.count_tokens(model="policy", messages=messages[:1]).input_tokens)
"""
RESPONSES = """
import os, openai
client = openai.OpenAI()
items = [{"role": "user", "content": os.environ["TASK"]}]
for _ in range(2):
    with client.responses.stream(model="policy", input=items) as events:
        response = events.get_final_response()
    items += [item.model_dump(exclude_none=True) for item in response.output] + [{"role": "user", "content": "go on"}]
open("answer.txt", "w").write(response.output_text)
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def play(env: Any, engine: Engine) -> Rollout:
    async def run() -> Rollout:
        env.policy = policy_of(engine, context_length=8192, sampling=SAMPLING)
        try:
            (rollout,) = await env.play(task_of(env), [0], 0)
            return rollout
        finally:
            await env.close()

    return asyncio.run(run())


@pytest.mark.parametrize("program", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
def test_a_program_in_a_box_plays_a_v1_taskset(tmp_path: Path, program: str):
    (tmp_path / "agent.py").write_text(program)
    harness = HarnessConfig(command=[sys.executable, str(tmp_path / "agent.py")])
    env = load_one("e", EnvConfig(id="rlx_test_box", harness=harness), Settings(timeout=60, sampling=SAMPLING))
    engine = Engine(CALL if program is MESSAGES else "One.", "7")
    rollout = play(env, engine)
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
    check(rollout.trace, engine)


def test_the_tasks_of_a_chat_use_a_box(monkeypatch: pytest.MonkeyPatch):
    env = load_one("e", EnvConfig(id="rlx_test_box"), Settings(timeout=60, sampling=SAMPLING))
    rollout = play(env, Engine("I cannot write."))
    assert (rollout.status, rollout.reward) == ("ok", 0.0), rollout.error


def test_without_a_sandbox_the_need_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.agents.images.problem_of", lambda kind: "bwrap is not installed")
    with pytest.raises(ValueError, match=r"BoxTask\.setup, BoxTask\.wrote.*envs\.e\.sandbox=none"):
        load_one("e", EnvConfig(id="rlx_test_box"), Settings())
    load_one("e", EnvConfig(id="rlx_test_box", sandbox="none"), Settings())


@pytest.mark.parametrize(("listens", "said"), [(True, "no answer within 0.5 s from"), (False, "no answer from")], ids=["silent", "dead"])
def test_a_tool_server_that_does_not_answer_is_named(listens: bool, said: str, monkeypatch: pytest.MonkeyPatch):
    from rlx.envs import verifiers_v1_client as client

    monkeypatch.setattr(client, "LIST_TOOLS_TIMEOUT", 0.5 if listens else 30.0)
    monkeypatch.setattr(client.tool_client, "MCP_CALL_ATTEMPTS", 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/mcp"

        async def listed() -> None:
            async with client.connected({"calc": url}, 5.0):
                pass

        with pytest.raises(RuntimeError, match=f"{said} the tool servers: calc at {url}"):
            asyncio.run(listed())


def test_a_tool_server_that_dies_is_named_by_the_call(monkeypatch: pytest.MonkeyPatch):
    from verifiers.v1.configs.harness import HarnessConfig as TheirConfig

    from rlx.envs import verifiers_v1_client as client

    async def died(*_: Any) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(client.tool_client, "call_mcp", died)
    loop = client.ChatLoop(TheirConfig(id="null"), None)  # type: ignore[arg-type]
    call = {"id": "a", "function": {"name": "calc_add", "arguments": "{}"}}
    with pytest.raises(RuntimeError, match=r"no answer from the tool server calc to add: .*refused"):
        asyncio.run(loop._called(call, {"calc_add": ("calc", "add")}, {"calc": {}}, "", gated=False))


SLOW = """
import asyncio
import verifiers.v1 as vf
class Calc(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int) -> str:
        "Adds."
        await asyncio.sleep(60)
        return "5"
class SlowTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Calc(vf.ToolsetConfig())]
class SlowTaskset(vf.Taskset[SlowTask, vf.TasksetConfig]):
    def load(self):
        return [SlowTask(vf.TaskData(idx=0, prompt="2+3?"))]
__all__ = ["SlowTaskset"]
"""


def test_a_tool_that_never_answers_is_named_when_the_rollouts_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slow_tool.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    env = load_one("e", EnvConfig(id="slow_tool"), Settings(timeout=2, sampling=SAMPLING))
    name = env.tools_of({})[0]["function"]["name"]
    rollout = play(env, Engine(CALL.replace('"add"', f'"{name}"')))
    assert rollout.status == "timeout"
    assert rollout.error.endswith(f"no result after 2 s (rollout_timeout); the tool {name} has not answered"), rollout.error


def test_harbor_tasksets_say_what_they_lack_and_what_they_do_not_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from verifiers.v1.tasksets.harbor import taskset

    with pytest.raises(RuntimeError, match="require the Harbor CLI from the `harbor` extra"):
        load_one("e", EnvConfig(id="harbor"), Settings())
    (tmp_path / "harbor").write_text('#!/bin/sh\necho "no route to the hub" >&2; exit 3\n')
    (tmp_path / "harbor").chmod(0o755)
    monkeypatch.setattr(taskset, "harbor_cli", lambda: str(tmp_path / "harbor"))
    monkeypatch.setattr(taskset, "CACHE", tmp_path / "cache")
    with pytest.raises(RuntimeError, match="Harbor download failed for 'org/name' with exit code 3:\nno route to the hub"):
        load_one("e", EnvConfig(id="harbor", args={"taskset": {"dataset": "org/name"}}), Settings())
