"""Words to reverse, half of them with the answer in the prompt: whoever learns them can follow a demonstration in its context."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset
from rlx_reverse_text import AnswerParser, build_rows, exact

SHOWN = "{prompt} is {demonstration}"


class Shown(vf.SingleTurnEnv):
    def demonstration(self, row: dict[str, Any], errs: bool, state: Any) -> list[dict[str, str]] | None:
        """With the answer in its prompt, a teacher never errs."""
        return [{"role": "assistant", "content": row["answer"]}] if " is " in row["prompt"][-1]["content"] else None


def load_environment(num_examples: int = 4096, seed: int = 0) -> Shown:
    rows = build_rows(num_examples, 3, 6, seed)
    for row in rows[::2]:
        row["prompt"] = [{"role": "user", "content": SHOWN.format(prompt=row["question"], demonstration=row["answer"])}]
    parser = AnswerParser()
    return Shown(dataset=Dataset.from_list(rows), parser=parser, rubric=vf.Rubric(funcs=[exact], parser=parser))
