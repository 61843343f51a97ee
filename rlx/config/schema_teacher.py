"""The configuration keys of a teacher behind an endpoint. `rlx.policy.teacher_client` asks it."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from rlx.config.keys import key

FIELDS = ("{prompt}", "{demonstration}")  # of `teacher.template`


@dataclass
class TeacherConfig:
    """Who scores the policy's tokens for objectives that distil: a model on servers of its own (`loss=opd`), or the policy itself with a
    demonstration in its prompt (`loss=sdft`), asked with the same batches, bounds and deadlines."""

    demonstration: str | None = key(
        None,
        "for `loss=sdft`, whose teacher is the policy itself: the column of the environment's rows that holds a demonstration, a text or "
        "messages (`info.solution` reads inside `info`; a v1 task's fields are in `task`)",
    )
    template: str = key(
        "{prompt}\n\nHere is an example of a good answer:\n{demonstration}\n\nNow give an answer of your own.",
        "with a demonstration: the first user message as the teacher reads it",
    )
    base_url: list[str] = key(
        [],
        "addresses of servers with the teacher (`http://host:port`), which return prompt log-probabilities: vLLM's own, or rlx's; "
        "empty: no such teacher",
    )
    model: str | None = key(
        None, "its name there; null: the only model that the servers have (required where the teacher samples, `envs.<name>.sampled_by`)"
    )
    api_key: str | None = key(None, "key that these servers want; null: none. Secret, like `inference.api_key`", secret=True)
    batch_size: int = key(16, "samples in one request", low=1)
    max_concurrent: int = key(4, "requests in flight at each server", low=1)
    timeout: float = key(120.0, "seconds for one attempt at a request", above=0)
    deadline: float = key(600.0, "seconds that a complete batch waits for its scores, with all retries; it never waits longer", above=0)
    on_timeout: str = key(
        "fail",
        "samples that were not scored by the deadline: `fail` ends the run, `drop` leaves them out of the batch and counts them",
        choices=("fail", "drop"),
    )
