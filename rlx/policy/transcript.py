"""Transcripts: the cuts of a trace as messages, for rows of training data.

The messages are those of the requests, not those that an environment shows after the episode: an environment may rewrite its history
between two turns, and a model learns a wrong thing from a prompt that it never saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.policy.sampling_params import raw_text
from rlx.trace import Branch, Trace, TraceBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One conversation: what the policy was told, and what it answered.

    Every assistant message of `completion` is an answer of this rollout; no message of `prompt` is.

    Two turns with a tool's reply between them, in a prompt that shows an example:

        prompt      user "2+2?" · assistant "4" · user "3+4?"                 the environment's; its "4" is no answer of the policy
        completion  assistant call add(3, 4) · tool "7" · assistant "7"       the policy's two answers, and what came between
    """

    prompt: Any  # messages, or a `str` for a raw text prompt
    completion: Any  # messages, or a `str` after a raw text prompt
    tools: tuple[Mapping[str, Any], ...] = ()  # functions in OpenAI's form
    truncated: bool = False  # a length limit cut one of the answers


def transcripts_of(trace: Trace) -> list[Transcript]:
    """The transcripts of a rollout, in the order of their first answers. Every answer is in exactly one `completion`.

    Here a request continues an answer by its messages, whatever the tokens: a template that leaves out earlier reasoning makes several
    training samples of one conversation. A history that was rewritten, other tools, another agent, or an answer that the environment put
    into the policy's mouth begin a transcript of their own, in which earlier answers are context.
    """
    said = TraceBuilder()
    for number, index in enumerate(trace.answers):
        *prompt, answer = trace.conversation(index)
        prompt = prompt[-1:] if prompt and prompt[-1].get("role") == "text" else prompt  # a raw prompt is whole
        said.add(number, prompt, trace.tools_of(index), answer, None, finish_reason=trace.nodes[index].finish_reason)
    by_messages = said.trace()
    return [_transcript(by_messages, branch) for branch in by_messages.branches()]


def _transcript(trace: Trace, branch: Branch) -> Transcript:
    first = branch.path.index(min(branch.own))
    prompt, completion = ([trace.nodes[place].message for place in part] for part in (branch.path[:first], branch.path[first:]))
    truncated = any(trace.nodes[place].finish_reason == "length" for place in branch.own)
    raw = raw_text(prompt)
    if raw is not None:
        (answer,) = completion  # a raw text prompt continues nothing
        return Transcript(prompt=raw, completion=answer["content"], truncated=truncated)
    return Transcript(prompt=prompt, completion=completion, tools=tuple(trace.tools_of(branch.path[-1])), truncated=truncated)
