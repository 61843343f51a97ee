"""The prompt that the teacher of self-distillation reads: the policy's own, with a demonstration in its first user message.

The environment's row holds the demonstration. The policy never sees it: it answers the request as the environment makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.config.schema_teacher import FIELDS
from rlx.policy.base import Message, PolicyError


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """How a demonstration enters a prompt."""

    column: str  # of the rows; `info.solution` reads inside `info`
    template: str  # the first user message, with FIELDS

    def messages(self, messages: Sequence[Message], row: Mapping[str, Any]) -> list[Message]:
        """The conversation with the demonstration of `row`. Raises PolicyError if there is none, or no user message to put it into."""
        place = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
        if place is None:
            raise PolicyError("a demonstration enters the first user message, and this conversation has none")
        changed = {**messages[place], "content": self.text(str(messages[place]["content"]), row)}
        return [*messages[:place], changed, *messages[place + 1 :]]

    def text(self, prompt: str, row: Mapping[str, Any]) -> str:
        """A text prompt with the demonstration of `row`."""
        values = dict(zip(FIELDS, (prompt, self.of(row)), strict=True))
        return re.sub("|".join(map(re.escape, FIELDS)), lambda found: values[found[0]], self.template)

    def of(self, row: Mapping[str, Any]) -> str:
        """The demonstration of a row. Of messages, it is what the assistant says."""
        value: Any = row
        for part in self.column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise PolicyError(f"the row has no demonstration: no column {self.column} (teacher.demonstration); it has {', '.join(row)}")
            value = value[part]
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = "\n".join(str(one["content"]) for one in value if isinstance(one, Mapping) and one.get("role") == "assistant")
        if not isinstance(value, str | int | float) or value == "":
            raise PolicyError(f"the demonstration in the column {self.column} (teacher.demonstration) is no text: {value!r:.80}")
        return str(value)
