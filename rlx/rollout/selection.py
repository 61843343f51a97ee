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
from collections.abc import Iterable, Mapping
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
    said = [[_said(one.prompt), _said(one.completion), _said(list(one.tools))] for one in candidate.transcripts]
    return json.dumps(said, sort_keys=True, ensure_ascii=False, default=repr)


def _said(value: Any) -> Any:
    """A text, messages or calls in a form in which equal sayings are equal."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, Mapping):
        own = {
            key: _said(_arguments(one) if key == "arguments" else one) for key, one in value.items() if key not in ("id", "tool_call_id")
        }
        return {key: one for key, one in own.items() if one not in ("", None)}
    return [_said(one) for one in value] if isinstance(value, list | tuple) else value


def _arguments(arguments: Any) -> Any:
    """The arguments of a call; as they are if they are no JSON."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
