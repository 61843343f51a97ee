"""Turns messages into token ids and back, for one model.

The `renderers` package has a typed renderer for some models, chosen by hub name. It renders, continues and parses conversations: the
next turn keeps sampled tokens verbatim if the renderer can prove that this is right. Other models use their own chat template. Then every
turn is rendered afresh, and `rlx.rollout.samples` checks whether it extends the turn before. Besides this module, only a configuration
rule (`rlx.config.checks`) uses `renderers`, to see which models it supports.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from rlx.policy.base import Call, Message, Reply
from rlx.types import Turn

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CACHED_PROMPTS = 4096  # first prompts kept; the members of a group share theirs


class Chat:
    """The chat format of one model."""

    def __init__(self, tokenizer: Any, renderer: Any | None = None) -> None:
        """`renderer`: a typed renderer of the `renderers` package; None uses the tokenizer's chat template."""
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids()) if renderer else [tokenizer.eos_token_id]
        self._stops = frozenset(self.stop_token_ids)
        self._marks = [mark for mark in tokenizer.all_special_tokens if mark not in ("<think>", "</think>")]
        self._prompts: dict[tuple, list[int]] = {}

    def render(self, messages: Sequence[Message], tools: list[dict] | None = None) -> list[int]:
        """Token ids [P] of the prompt for the assistant's next answer."""
        key = None
        if not tools and all(len(m) == 2 and isinstance(m["content"], str) for m in messages):
            key = tuple((m["role"], m["content"]) for m in messages)
            if key in self._prompts:
                return self._prompts[key]
        ids = self._render(list(messages), tools)
        if key is not None:
            if len(self._prompts) >= _CACHED_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = ids
        return ids

    def transcript(self, messages: Sequence[Message], tools: list[dict] | None = None) -> list[int]:
        """Token ids [L] of the conversation as it stands, without the head of a next answer."""
        return self._render(list(messages), tools, answer=False)

    def _render(self, messages: list[Message], tools: list[dict] | None, answer: bool = True) -> list[int]:
        if self.renderer is not None:
            return list(self.renderer.render_ids(messages, tools=tools, add_generation_prompt=answer))
        decoded = [_with_decoded_arguments(message) for message in messages]
        return list(
            self.tokenizer.apply_chat_template(decoded, tools=tools, add_generation_prompt=answer, tokenize=True, return_dict=False)
        )

    def extend(self, turn: Turn, new: Sequence[Message], tools: list[dict] | None = None) -> list[int] | None:
        """The prompt after `turn` and the messages `new` that follow it, with sampled tokens verbatim; None if that cannot be proven."""
        if self.renderer is None:
            return None
        bridged = self.renderer.bridge_to_next_turn(turn.prompt_ids.tolist(), turn.completion_ids.tolist(), list(new), tools=tools)
        return None if bridged is None else list(bridged.token_ids)

    def parse(self, turn: Turn, tools: list[dict] | None = None) -> Reply:
        """Parse the completion. Tool calls without a name are ignored."""
        ids = turn.completion_ids
        if self.renderer is not None:
            parsed = self.renderer.parse_response(ids.tolist(), tools=tools, prompt_ids=turn.prompt_ids.tolist())
            named = [call for call in parsed.tool_calls if call.name]
            calls = tuple(Call(call.id or f"call_{i}", call.name, _as_json(call.arguments)) for i, call in enumerate(named))
            return Reply(parsed.content or "", parsed.reasoning_content or None, calls)
        end = len(ids)
        while end and int(ids[end - 1]) in self._stops:
            end -= 1
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=False)  # an array, because decoding a list checks every element
        for mark in self._marks:
            if mark in text:
                text = text.replace(mark, "")
        return _parse_hermes(text) if tools else Reply(text)


def load_chat(tokenizer: Any, model_name: str, keep_reasoning: bool = True) -> Chat:
    """The chat format of a model, by its exact hub name. Models unknown to the `renderers` package use their chat template.

    `keep_reasoning` keeps the reasoning of earlier turns in later prompts, so that the turns of a rollout stay one sample.
    """
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    family = MODEL_RENDERER_MAP.get(model_name)
    if family is None:
        return Chat(tokenizer)
    config = config_from_name(family)
    assert config is not None, family
    if keep_reasoning:
        config = config.model_copy(update={"thinking_retention": "all"})
    return Chat(tokenizer, create_renderer(tokenizer, config))


def _parse_hermes(text: str) -> Reply:
    """Parse calls written as `<tool_call>{"name": …, "arguments": …}</tool_call>`. Other blocks are ignored."""
    calls: list[Call] = []
    for block in _TOOL_CALL.findall(text):
        try:
            call = json.loads(block)
        except json.JSONDecodeError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]:
            calls.append(Call(f"call_{len(calls)}", call["name"], _as_json(call.get("arguments"))))
    if not calls:
        return Reply(text)
    return Reply(text[: text.index("<tool_call>")], None, tuple(calls))


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def _with_decoded_arguments(message: Message) -> Message:
    """Decode the arguments of earlier calls, because chat templates expect a mapping. Text that is not JSON stays text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with contextlib.suppress(json.JSONDecodeError):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
