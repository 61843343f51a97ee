"""A v1 environment with two players of a zero-sum game, and a host that is never trained; what a player says decides what goes wrong."""

from __future__ import annotations

import asyncio
import os

import verifiers.v1 as vf

__all__ = ["GameEnv", "GameTaskset"]


class GameTask(vf.Task[vf.TaskData]):
    @vf.stop
    def said_stop(self, response: vf.Response) -> bool:
        return "STOP" in (response.message.content or "")

    @vf.intercept
    def blocked(self, response: vf.Response) -> vf.Response | None:
        if "BLOCK" in (response.message.content or ""):
            return response.model_copy(update={"message": vf.AssistantMessage(content="blocked")})
        return None

    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        text = trace.last_reply
        if "RAISE" in text:
            try:
                return float(text)
            except ValueError as error:
                raise KeyError("no digits") from error
        if "NAN" in text:
            return float("nan")
        if "SLEEP" in text:
            await asyncio.sleep(60)
        if "CANCEL" in text:
            raise asyncio.CancelledError
        return float(sum(character.isdigit() for character in text))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float("inf") if "INFINITE" in trace.last_reply else float(len(trace.last_reply))


class GameConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    right: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, sampling={"temperature": 0.5})
    host: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    rounds: int = 2
    twice: bool = False


class GameEnv(vf.Env[GameConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.host.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.host.run(vf.Task(vf.TaskData(idx=task.data.idx, prompt="HOST opens")))
        if self.config.twice:
            await agents.left.run(task)
        empty = GameTask(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.left.interaction(task) as left, agents.right.interaction(empty) as right:
            heard = await left.turn()
            for number in range(self.config.rounds):
                if heard.terminated:
                    break
                heard = await (left if number % 2 else right).turn(heard.last_reply or "nothing")

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        scores = {trace.agent.name: trace.rewards["digits"].score for trace in episode.traces if trace.agent.name != "host"}
        for trace in episode.traces:
            other = {"left": "right", "right": "left"}.get(trace.agent.name)
            if other:
                trace.record_reward("lead", scores[trace.agent.name] - scores[other], 10.0)


class GameTaskset(vf.Taskset[GameTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield GameTask(vf.TaskData(idx=number, prompt=f"{os.environ.get('RLX_TEST_SAYS', '')}ask {number}", system_prompt="play"))
            number += 1
