"""Inspect: `inspect eval examples/serve/reverse.py --model openai-api/rlx/policy`."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def reverse() -> Task:
    """Words to reverse, of a file."""
    rows = json_dataset("reverse.jsonl", FieldSpec(input="question", target="answer"))
    return Task(dataset=rows, solver=generate(), scorer=exact(), config=GenerateConfig(temperature=0.0, max_tokens=12))
