"""`env=reverse_text` as a v1 taskset: the same words and the same reward, so a rollout's cost is that of verifiers' v1 harness and ours."""

from __future__ import annotations

import rlx_reverse_text
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[Data]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):
    num_examples: int = 8192


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> list[ReverseTextTask]:
        rows = rlx_reverse_text.build_rows(self.config.num_examples, 3, 6, seed=0)
        return [
            ReverseTextTask(Data(idx=number, prompt=row["question"], answer=row["answer"]), self.config.task)
            for number, row in enumerate(rows)
        ]


__all__ = ["ReverseTextTaskset"]
