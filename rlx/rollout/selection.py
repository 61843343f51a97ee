"""Which rollouts become training data: by reward, without duplicates, balanced over examples. Pure.

    failed → truncated → nothing said → reward → duplicates → at most, or exactly, n of an example

The choice follows from the rollouts and the keys (`rlx.config.schema_synthesize`), in whatever order the rollouts finished. Every dropped
rollout is counted under the first rule that it breaks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.config.schema_synthesize import SelectionConfig
from rlx.policy.transcript import Transcript

FAILED, TRUNCATED, SILENT = "failed", "truncated", "nothing said"
LOW, HIGH, DUPLICATE, SURPLUS, FEW = "reward too low", "reward too high", "duplicate", "over per_example", "example has too few"
CAUSES = (FAILED, TRUNCATED, SILENT, LOW, HIGH, DUPLICATE, SURPLUS, FEW)
"""Why a rollout is dropped, in the order of the rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A finished rollout, as the selection sees it."""

    env: str
    index: int  # place of the example in the environment's data
    member: int  # number of the rollout among those of the example
    reward: float  # 0 if it failed
    failed: bool
    truncated: bool  # a length limit cut it
    transcripts: tuple[Transcript, ...]
    about: Mapping[str, Any] = field(default_factory=dict)  # its further facts, for the file

    @property
    def place(self) -> tuple[str, int, int]:
        """Where it stands in the file."""
        return self.env, self.index, self.member


@dataclass(frozen=True, slots=True)
class Selection:
    """What is kept, in the order of the file, and the number of those dropped, by cause."""

    kept: list[Candidate]
    dropped: Counter[str]


def select(candidates: Iterable[Candidate], keys: SelectionConfig, seed: int) -> Selection:
    """The rollouts to keep. `seed` decides for `prefer=random` only."""
    dropped: Counter[str] = Counter()
    seen: set[Any] = set()
    kept: list[Candidate] = []
    for _, one_example in itertools.groupby(sorted(candidates, key=lambda c: c.place), key=lambda c: (c.env, c.index)):
        left: list[Candidate] = []
        said: set[Any] = set()
        for candidate in sorted(one_example, key=lambda c: _preference(c, keys.prefer, seed)):
            cause = _cause(candidate, keys)
            if cause is None and keys.duplicates != "keep":
                this = _sameness(candidate, keys)
                cause = DUPLICATE if this in seen or this in said else None
                said.add(this)
            if cause is None:
                left.append(candidate)
            else:
                dropped[cause] += 1
        if keys.per_example is not None and keys.exactly and len(left) < keys.per_example:
            dropped[FEW] += len(left)
            left = []
        surplus = left[keys.per_example :] if keys.per_example is not None else []
        dropped[SURPLUS] += len(surplus)
        left = left[: len(left) - len(surplus)]
        seen.update(_sameness(candidate, keys) for candidate in left)  # what another rule drops leaves room for its equals
        kept += left
    return Selection(sorted(kept, key=lambda c: c.place), +dropped)


def _sameness(candidate: Candidate, keys: SelectionConfig) -> Any:
    """Equal for duplicates."""
    return saying(candidate) if keys.duplicates == "all" else (candidate.env, candidate.index, saying(candidate))


def _cause(candidate: Candidate, keys: SelectionConfig) -> str | None:
    """The rule that the rollout breaks by itself."""
    if candidate.failed and keys.drop_failed:
        return FAILED
    if keys.drop_truncated and (candidate.truncated or any(one.truncated for one in candidate.transcripts)):
        return TRUNCATED
    if not candidate.transcripts or any(_has_empty_answer(one) for one in candidate.transcripts):
        return SILENT
    if keys.min_reward is not None and candidate.reward < keys.min_reward:
        return LOW
    if keys.max_reward is not None and candidate.reward > keys.max_reward:
        return HIGH
    return None


def _has_empty_answer(transcript: Transcript) -> bool:
    """Whether an answer has neither text nor reasoning nor calls. It would teach to say nothing, and `rlx sft` refuses such a row."""
    if isinstance(transcript.completion, str):
        return not transcript.completion.strip()
    answers = [message for message in transcript.completion if message["role"] == "assistant"]
    texts = ("content", "reasoning_content")
    return any(not one.get("tool_calls") and not any(str(one.get(text) or "").strip() for text in texts) for one in answers)


def _preference(candidate: Candidate, prefer: str, seed: int) -> tuple[float | str, int]:
    """The rollouts of an example are taken from the lowest to the highest."""
    if prefer == "best":
        return -candidate.reward, candidate.member
    if prefer == "random":
        key = f"{seed}|{candidate.env}|{candidate.index}|{candidate.member}"
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), candidate.member
    return 0.0, candidate.member


def saying(candidate: Candidate) -> str:
    """Equal for rollouts that say the same: prompts, tools, messages and calls are equal, apart from white space and the ids of calls."""
    ids: dict[str, int] = {}
    said = [[_said(one.prompt, ids), _said(one.completion, ids), list(one.tools)] for one in candidate.transcripts]
    text = json.dumps(said, sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _said(messages: str | Sequence[Mapping[str, Any]], ids: dict[str, int]) -> Any:
    """A text or messages in a form in which equal sayings are equal. `ids`: the numbers of the calls so far, by their ids."""
    if isinstance(messages, str):
        return plain_text(messages)
    found = []
    for message in messages:
        said: dict[str, Any] = {
            key: plain_text(value) for key, value in message.items() if isinstance(value, str) and value and key != "tool_call_id"
        }
        if calls := message.get("tool_calls"):
            for call in calls:
                ids.setdefault(call["id"], len(ids))
            said["tool_calls"] = [[ids[c["id"]], c["function"]["name"], _arguments(c["function"]["arguments"])] for c in calls]
        if (answered := message.get("tool_call_id")) is not None:
            said["tool_call_id"] = ids.get(answered, answered)
        found.append(said)
    return found


def plain_text(text: str) -> str:
    """The text in Unicode's composed form (NFC), with one space for each stretch of white space, and none at its ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _arguments(arguments: str) -> Any:
    """The arguments of a call; as text if they are no JSON."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
