"""A v1 taskset whose tasks use the agent's sandbox: a file is put there before, and read after."""

import verifiers.v1 as vf


class BoxTask(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.write("notes.txt", b"seven is 7\n")

    @vf.reward
    async def wrote(self, runtime) -> float:
        said = await runtime.run(["cat", "answer.txt"], {})
        return float(said.stdout.strip() == "7")


class BoxTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):
    def load(self):
        return [BoxTask(vf.TaskData(idx=number, prompt=f"Write 7, number {number}.")) for number in range(4)]


__all__ = ["BoxTaskset"]
