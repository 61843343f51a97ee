"""IFEval (Zhou et al. 2023, 2311.07911): prompts with instructions that a program can check. For evaluation alone.

The checkers are those of lm-evaluation-harness, so the reward is its `prompt_level_strict_acc`: 1.0 if a reply follows every instruction.
Counting sentences needs NLTK's `punkt_tab`, which lm-eval downloads when it is imported for the first time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import load_dataset
from lm_eval.tasks.ifeval.utils import process_results


def load_environment(dataset: str = "google/IFEval", split: str = "train") -> vf.SingleTurnEnv:
    """The environment.

    Args:
        dataset: a data set of the hub, or a JSONL file, with the columns `key`, `prompt`, `instruction_id_list` and `kwargs`.
        split: of the data set of the hub, which calls its only one `train`.
    """
    rows = load_dataset("json", data_files=dataset, split="train") if Path(dataset).is_file() else load_dataset(dataset, split=split)
    columns = rows.column_names
    rows = rows.map(lambda row: {"question": row["prompt"], "answer": "", "info": dict(row)}, remove_columns=columns)
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[prompt_strict, prompt_loose, strict], weights=[1.0, 0.0, 0.0]))


def prompt_strict(completion: vf.Messages, info: dict[str, Any]) -> float:
    """1.0 if the reply follows every instruction: the score of the paper's tables, and the reward."""
    return float(checked(completion, info)["prompt_level_strict_acc"])


def prompt_loose(completion: vf.Messages, info: dict[str, Any]) -> float:
    """The same without its first or last line, or without asterisks, whichever follows most."""
    return float(checked(completion, info)["prompt_level_loose_acc"])


def strict(completion: vf.Messages, info: dict[str, Any]) -> float:
    """The share of the instructions that the reply follows."""
    followed = checked(completion, info)["inst_level_strict_acc"]
    return sum(followed) / len(followed)


def checked(completion: vf.Messages, info: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's four scores of a reply, without what a model thought before it."""
    reply = str(completion[-1]["content"]).rpartition("</think>")[2]
    return process_results(info, [reply])
