"""A v1 environment of a proposer and its solvers: a sum is proposed and solved several times; the share of right solvers judges it."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf

__all__ = ["ProposerEnv", "ProposerTaskset"]


class ProposeTask(vf.Task[vf.TaskData]):
    """The proposer has no reward of its own: what the solvers make of its sum is its reward."""


class SolveData(vf.TaskData):
    answer: str


class SolveTask(vf.Task[SolveData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ProposerConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    solver: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    solvers: int = 4


class ProposerEnv(vf.Env[ProposerConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        proposed = (await agents.proposer.run(task)).last_reply
        terms = [int(term) for term in proposed.split("+")]
        solving = SolveTask(SolveData(idx=task.data.idx, prompt=f"solve {proposed}", answer=str(sum(terms))))
        async with asyncio.TaskGroup() as solvers:
            for _ in range(self.config.solvers):
                solvers.create_task(agents.solver.run(solving))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        solved = [trace.rewards["correct"].score for trace in episode.traces if trace.agent.name == "solver"]
        rate = sum(solved) / len(solved)
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.record_reward("learnability", 4 * rate * (1 - rate))


class ProposerTaskset(vf.Taskset[ProposeTask, vf.TasksetConfig]):
    def load(self):
        return [ProposeTask(vf.TaskData(idx=number, prompt=f"propose {number}")) for number in range(8)]
