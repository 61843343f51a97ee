"""Chooses the rollouts that become training data: by reward, without duplicates, balanced over examples. Pure.

    failed → truncated → empty answer → reward → duplicates → at most, or exactly, n of an example

The choice follows from the rollouts and the keys (`rlx.config.schema_synthesize`), in whatever order the rollouts finished. Every dropped
rollout is counted under the first rule that it breaks.

The data are transcripts: the cuts of a trace as messages. They are those of the requests, not those that an environment shows after the
episode: an environment may rewrite its history between two turns, and a model learns a wrong thing from a prompt that it never saw.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.config.schema_synthesize import SelectionConfig
from rlx.policy.sampling_params import raw_text
from rlx.rollout.eval_results import Outcome
from rlx.rollout.eval_stats import at_least
from rlx.trace import Branch, Node, Trace, TraceBuilder

FAILED, TRUNCATED, EMPTY = "failed", "truncated", "nothing said"
LOW, HIGH, DUPLICATE, SURPLUS, FEW = "reward too low", "reward too high", "duplicate", "over per_example", "example has too few"
CAUSES = (FAILED, TRUNCATED, EMPTY, LOW, HIGH, DUPLICATE, SURPLUS, FEW)
"""Why a rollout is dropped, in the order of the rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One conversation: what the policy was told, and its completions.

    Every assistant message of `completion` is sampled in this rollout; no message of `prompt` is.

    Two turns with a tool's reply between them, in a prompt that shows an example:

        prompt      user "2+2?" · assistant "4" · user "3+4?"                 the environment's; its "4" is not the policy's
        completion  assistant call add(3, 4) · tool "7" · assistant "7"       the policy's two completions, and what came between
    """

    prompt: Any  # messages, or a `str` for a raw text prompt
    completion: Any  # messages, or a `str` after a raw text prompt
    tools: tuple[Mapping[str, Any], ...] = ()  # functions in OpenAI's form
    truncated: bool = False  # a length limit cut one of the completions


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished rollout with its transcripts."""

    rollout: Outcome
    transcripts: tuple[Transcript, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> Candidate:
        return cls(outcome, tuple(transcripts_of(Trace(tuple(Node(**node) for node in outcome.nodes or ())))))


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
    if raw is not None:  # it continues nothing, so there is one completion
        return Transcript(prompt=raw, completion=completion[0]["content"], truncated=truncated)
    return Transcript(prompt=prompt, completion=completion, tools=tuple(trace.tools_of(branch.path[-1])), truncated=truncated)


def select(candidates: Iterable[Candidate], keys: SelectionConfig, seed: int) -> tuple[list[Candidate], Counter[str]]:
    """(the rollouts to keep in the order of the file, number of those dropped by cause). `seed` decides for `select_by=random` only."""
    dropped: Counter[str] = Counter()
    seen: set[Any] = set()
    kept: list[Candidate] = []
    ordered = sorted(candidates, key=lambda one: one.rollout.key)
    for example, members in itertools.groupby(ordered, key=lambda one: one.rollout.key[:2]):
        left: list[Candidate] = []
        hashes: list[Any] = []  # equal for duplicates
        for one in sorted(members, key=lambda one: _preference(one.rollout, keys.select_by, seed)):
            this = content_hash(one.transcripts) if keys.duplicates == "all" else (example, content_hash(one.transcripts))
            cause = _cause(one, keys)
            if cause is None and keys.duplicates != "keep" and (this in seen or this in hashes):
                cause = DUPLICATE
            if cause is None:
                left.append(one)
                hashes.append(this)
            else:
                dropped[cause] += 1
        if keys.per_example is not None and keys.require_all and len(left) < keys.per_example:
            dropped[FEW] += len(left)
            continue
        dropped[SURPLUS] += len(left[keys.per_example :]) if keys.per_example is not None else 0
        kept += left[: keys.per_example]
        seen.update(hashes[: keys.per_example])  # what another rule drops leaves room for its equals
    return sorted(kept, key=lambda one: one.rollout.key), +dropped


def _cause(one: Candidate, keys: SelectionConfig) -> str | None:
    """The rule that the rollout breaks by itself."""
    rollout = one.rollout
    if not rollout.is_completed and keys.drop_failed:
        return FAILED
    if keys.drop_truncated and (rollout.is_truncated or any(each.truncated for each in one.transcripts)):
        return TRUNCATED
    if not one.transcripts or any(_has_empty_answer(each) for each in one.transcripts):
        return EMPTY
    if keys.min_reward is not None and not at_least(rollout.reward, keys.min_reward):
        return LOW
    if keys.max_reward is not None and not at_least(keys.max_reward, rollout.reward):
        return HIGH
    return None


def _has_empty_answer(transcript: Transcript) -> bool:
    """Whether an answer has neither text nor reasoning nor calls. It would teach to say nothing, and `rlx sft` refuses such a row."""
    if isinstance(transcript.completion, str):
        return not transcript.completion.strip()
    answers = [message for message in transcript.completion if message["role"] == "assistant"]
    texts = ("content", "reasoning_content")
    return any(not one.get("tool_calls") and not any(str(one.get(text) or "").strip() for text in texts) for one in answers)


def _preference(rollout: Outcome, prefer: str, seed: int) -> tuple[float | str, int]:
    """The rollouts of an example are taken from the lowest to the highest."""
    if prefer == "best":
        return -rollout.reward, rollout.rollout
    if prefer == "random":
        key = f"{seed}|{rollout.env}|{rollout.place}|{rollout.rollout}"
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), rollout.rollout
    return 0.0, rollout.rollout


def content_hash(transcripts: Sequence[Transcript]) -> str:
    """Equal for rollouts with equal prompts, tools, messages and calls, apart from white space and the ids of calls."""
    content = _normalized([[one.prompt, one.completion, one.tools] for one in transcripts])
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _normalized(value: Any) -> Any:
    """A text, messages or calls in a form in which equal ones are equal."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, Mapping):
        own = {
            key: _normalized(_arguments(one) if key == "arguments" else one)
            for key, one in value.items()
            if key not in ("id", "tool_call_id")
        }
        return {key: one for key, one in own.items() if one not in ("", None)}
    return [_normalized(one) for one in value] if isinstance(value, list | tuple) else value


def _arguments(arguments: Any) -> Any:
    """The arguments of a call; as they are if they are no JSON."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
