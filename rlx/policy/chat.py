"""Turns messages into token ids and back, for one model.

The `renderers` package has a typed renderer for some families of models. It renders, continues and parses conversations. Other models use
their chat template; its calls and reasoning are read by `rlx.policy.parsers`. Either way a later turn keeps the sampled tokens if that is
provably right. If not, the conversation is rendered afresh, and `rlx.rollout.samples` begins a new sample.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Int
from rlx.config.chat_format import arguments_of, family_of, unread
from rlx.config.schema import ModelConfig
from rlx.json_values import utf8
from rlx.policy.base import Call, Message, NotShown, Reply
from rlx.policy.parsers import CLOSE, OPEN, TOOL_PARSERS, UNREADABLE, arguments_as_json, read_reasoning
from rlx.policy.templates import REMEDIES, decoded, problems, traits_of
from rlx.process import today
from rlx.trace import TraceBuilder, Turn

BREAK = "\u200b"  # shown as nothing
# Special tokens by which parsers of calls find them; cut once they were read.
CALL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>")
TAGS = (OPEN, CLOSE, "<tool_call>", "</tool_call>")  # special tokens of some tokenizers, but part of what the model says
FRAME = re.compile(r"<[|｜][^\s<>|｜{}'\"]+[|｜]>|\[/?INST\]")  # what templates write around roles
_TAIL = 16  # tokens at the end of a prompt that may hold an open `<think>`
_CACHED_PROMPTS = 4096  # first prompts kept; the members of a group share theirs


class Chat:
    """The chat format of one model. The sampled tokens are never changed: parsing only decides what the environment reads."""

    def __init__(
        self,
        tokenizer: Any,
        renderer: Any | None = None,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        keeps_tokens: bool = True,
        keeps_thinking: bool = True,
        ends: Sequence[int] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`renderer`: a typed renderer of the `renderers` package; None uses the tokenizer's chat template, and the parsers by name.

        `keeps_tokens`: later prompts keep sampled tokens if that is provably right. False renders every prompt from the template.
        `keeps_thinking`: they also keep the reasoning of earlier turns if a renderer can do that (`chat.thinking`).
        `ends`: tokens that end an answer besides the tokenizer's and the template's; a renderer knows its own.
        `arguments`: what the template gets besides messages and tools (`model.chat_template_kwargs`); a renderer has its own. Raises
        ValueError for one that the template does not read.
        """
        if missing := unread(arguments, str(tokenizer.chat_template)) if arguments else []:
            known = ", ".join(sorted(arguments_of(str(tokenizer.chat_template)))) or "none"
            what = f"model.chat_template_kwargs names {', '.join(missing)}, but the chat template does not read it: no effect"
            raise ValueError(f"{what}. It reads {known}")
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.keeps_tokens, self.keeps_thinking = keeps_tokens, keeps_thinking
        self.plain = self  # the same format, where later turns see of earlier reasoning what the template shows
        self.described: Any = None  # `rlx.policy.spec.spec_of`, once it was asked for
        self.made_of: tuple[ModelConfig, bool, Sequence[int], bool] | None = None  # the arguments of `load_chat`
        self._arguments = dict(arguments or {})
        self._decodes_arguments = False
        self._one_call = False  # the template refuses an answer with two calls
        self.closing = 0  # stop tokens that follow that of the last answer in a transcript, to end the whole conversation (Phi)
        self._prompts: dict[tuple, list[int]] = {}
        self._served: set[tuple[str, ...]] = set()  # names of tools that the format was seen to serve
        special = [mark for mark in tokenizer.all_special_tokens if mark not in TAGS]
        ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
        self._read = {mark: ids.pop(mark) for mark in CALL_MARKS if mark in ids}
        self._cut = np.array(list(ids.values()), dtype=np.int64)
        # Families list few of their special tokens; Llama 3 leaves out those around a role's name.
        # DeepSeek's before a role are not special, and a base model's ChatML is of ordinary characters: those around turns count.
        template = str(tokenizer.chat_template)
        turns = self._turns(template)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special or token.content in turns]
        spelled = sorted({mark for mark in (*special, *added, *FRAME.findall(template)) if mark.strip()} - {*TAGS}, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        if renderer is not None:
            self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids())
            self.tool_parser, self.reasoning_parser = None, None
        else:
            traits = traits_of(self.show, str(tokenizer.chat_template))
            self._decodes_arguments, self._one_call = traits.decodes_arguments, traits.one_call
            marks = sorted(mark for mark in tokenizer.all_special_tokens if traits.end.startswith(mark))
            self.stop_token_ids = list(dict.fromkeys([tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, marks), *ends]))
            closing = tokenizer.encode(traits.end, add_special_tokens=False)
            self.closing = max(0, sum(token in self.stop_token_ids for token in closing) - 1)
            self.tool_parser = traits.tool_parser if tool_parser == "auto" else tool_parser
            self.reasoning_parser = reasoning_parser if reasoning_parser != "auto" else "qwen3" if traits.thinks else "none"
        self._stops = frozenset(self.stop_token_ids)

    def render(self, messages: Sequence[Message], tools: list[dict] | None = None) -> list[int]:
        """Token ids [P] of the prompt for the assistant's next answer.

        Raises NotShown if the template refuses the messages, or loses these tools, calls of them or their results.
        """
        key = None
        if tools and (names := tuple(tool["function"]["name"] for tool in tools)) not in self._served:
            if lost := list(problems(self, tools)):
                raise NotShown("; ".join(["the chat format does not serve these tools", *lost]) + ". " + REMEDIES)
            self._served.add(names)
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

    def marks_in(self, text: str) -> list[str]:
        """The special tokens that the text spells. In a rendered conversation it would begin or end turns."""
        return self._marks.findall(text)

    def inert(self, value: Any) -> Any:
        """A message or a tool whose texts spell no special token: an invisible character breaks them up, so nothing that an environment,
        a row or the policy itself says becomes a turn. The tokens of an answer that was sampled stay as they are."""
        if isinstance(value, str):
            return self._marks.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
        if isinstance(value, Mapping):
            own = {"arguments": self._inert_json}
            return {self.inert(key): own.get(key, self.inert)(each) for key, each in value.items()}
        return [self.inert(each) for each in value] if isinstance(value, list | tuple) else value

    def _inert_json(self, value: Any) -> Any:
        """The arguments of a call, inert: as JSON they may spell a mark by escapes (`\\u003c`), which some renderers decode."""
        try:
            found = json.loads(value) if isinstance(value, str) else None
        except (ValueError, RecursionError):
            found = None
        safe = self.inert(found)
        return self.inert(value) if found == safe else json.dumps(safe, ensure_ascii=False)

    def raw(self, text: str) -> list[int]:
        """Token ids of a prompt that is raw text, with what the tokenizer puts before a sequence; once, if the text spells it itself."""
        ids, begins = list(self.tokenizer.encode(text)), str(self.tokenizer.special_tokens_map.get("bos_token"))
        return ids[1:] if text.startswith(begins) and ids[:1] == ids[1:2] else ids

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, special tokens included, without any tidying of spaces."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """The text as ids, without tokens that begin or end a sequence."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _turns(self, template: str) -> str:
        """What the template writes around turns without tools; itself if it refuses them."""
        said: list[Message] = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "user")]
        for messages in (said, said[1:]):
            with contextlib.suppress(Exception):  # whatever a template may raise
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=today().strftime, **self._arguments))
        return template

    def show(self, messages: list[Message], tools: list[dict] | None = None, answer: bool = True) -> str:
        """The conversation as text. Raises NotShown if the template refuses the messages."""
        return self.tokenizer.decode(self._render(messages, tools, answer), skip_special_tokens=False)

    def _render(self, messages: list[Message], tools: list[dict] | None, answer: bool = True) -> list[int]:
        if self._decodes_arguments:
            messages = [decoded(message) for message in messages]
        messages, tools = self.inert(messages), self.inert(tools)
        if self.renderer is not None:
            return list(self.renderer.render_ids(messages, tools=tools, add_generation_prompt=answer))
        try:
            options = {"add_generation_prompt": answer, "tokenize": False, "strftime_now": today().strftime, **self._arguments}
            return self.encode(self.tokenizer.apply_chat_template(messages, tools=tools, **options))  # in two calls: a quarter cheaper
        except Exception as error:  # a template is a program of the model's makers and may raise anything
            raise NotShown(f"the chat template cannot show this conversation: {type(error).__name__}: {error}") from error

    def extend(
        self, asked: Int, answer: Int, before: Sequence[Message], new: Sequence[Message], tools: list[dict] | None = None
    ) -> list[int]:
        """The prompt after an answer and the messages `new` that follow it.

        `asked` [P], `answer` [C]: its prompt and its tokens. `before`: the messages up to the answer, and the answer.

        It keeps the sampled tokens if that is provably right; otherwise it is `render` of all the messages.
        """
        if not self.keeps_tokens:
            return self.render([*before, *new], tools)
        if self.renderer is not None and self.keeps_thinking:
            bridged = self.renderer.bridge_to_next_turn(asked.tolist(), answer.tolist(), self.inert(list(new)), tools=self.inert(tools))
            return list(bridged.token_ids) if bridged is not None else self.render([*before, *new], tools)
        whole = self.render([*before, *new], tools)
        sampled = [*asked.tolist(), *answer.tolist()]
        if whole[: len(sampled)] == sampled:
            return whole
        return self._joined(sampled, before, new, whole, tools) or whole

    def _joined(
        self, sampled: list[int], before: Sequence[Message], new: Sequence[Message], whole: list[int], tools: list[dict] | None
    ) -> list[int] | None:
        """`sampled` with what follows the turn in `whole`. None unless `whole` differs from it only in how the answers are written.

        The template spells an answer in its own way: other tokens for the same text, other spaces in a call's JSON. What was sampled may
        stand in place of that, if the template shows the same conversation up to the answer as before the new messages came, and the
        answer with its reasoning. Then it dropped nothing because of them.
        """
        prompt, said = self.render(before[:-1], tools), self.transcript(before, tools)
        start = len(prompt)
        # Ends in the answer: more than one if its text spells such a token. Phi's template also ends the conversation, but only at its end.
        count = sum(token in self._stops for token in said[start:]) - self.closing
        ends = [position for position in range(start, len(whole)) if whole[position] in self._stops][:count]
        if count < 1 or len(ends) < count or whole[:start] != prompt:
            return None
        end, last = ends[-1], sampled[-1]
        shown, follows = (self.tokenizer.decode(whole[at:], skip_special_tokens=False) for at in (start, end))
        if any(text in shown and text not in follows for text in (str(message["content"]).strip() for message in self.inert(new))):
            return None  # the end was not that of the answer
        reasoning = self.inert(before[-1].get("reasoning_content"))
        if reasoning and reasoning.strip() not in self.tokenizer.decode(whole[start:end], skip_special_tokens=False):
            return None
        if last in self._stops and last != whole[end]:
            return None
        return sampled + whole[end + (last == whole[end]) :]  # a turn that a length limit cut gets its end here

    def parse(self, turn: Turn, tools: list[dict] | None = None) -> Reply:
        """Read the completion. If one of its tool calls cannot be read, all of it stays text, as in vLLM.

        It does, too, if it has several calls and the template shows one at most: no later prompt could be rendered.
        Calls have the ids that the model wrote, or none.
        """
        if self.renderer is not None:
            return self._parse_typed(turn, tools)
        ids = turn.completion_ids
        end = len(ids)
        while end and int(ids[end - 1]) in self._stops:
            end -= 1
        # Special tokens that were sampled are cut by their ids: their texts may have been sampled as ordinary characters.
        said = ids[:end][~np.isin(ids[:end], self._cut)]  # an array, because decoding a list checks every element
        text = self.tokenizer.decode(said, skip_special_tokens=False)
        reasoning = None
        if self.reasoning_parser != "none":
            tail = self.tokenizer.decode(turn.prompt_ids[-_TAIL:], skip_special_tokens=False)
            reasoning, text = read_reasoning(text, str(self.reasoning_parser), tail)
        calls: tuple[Call, ...] = ()
        read = TOOL_PARSERS[str(self.tool_parser)](text, tools) if tools and self.tool_parser != "none" else None
        if read is not None and (len(read[1]) == 1 or not self._one_call):
            text, calls = read[0], tuple(Call(call_id, utf8(name), utf8(arguments)) for name, arguments, call_id in read[1])
        for mark in [mark for mark, token in self._read.items() if token in said]:
            text = text.replace(mark, "")
        return Reply(text, reasoning or None, calls)

    def _parse_typed(self, turn: Turn, tools: list[dict] | None) -> Reply:
        ids = turn.completion_ids.tolist()
        end = len(ids)
        while end and ids[end - 1] in self._stops:
            end -= 1
        try:
            parsed = self.renderer.parse_response(ids, tools=tools, prompt_ids=turn.prompt_ids.tolist())  # type: ignore[union-attr]
        except UNREADABLE:  # the renderer catches only JSON's own errors, and the model may write a number of 5000 digits
            return Reply(self.tokenizer.decode(ids[:end]))
        content, attempts = parsed.content or "", parsed.tool_calls
        if attempts and not (tools and all(map(_readable, attempts))):  # without tools there is nothing to call: it is an answer in JSON
            span = attempts[0].token_span
            if span is not None and content in self.tokenizer.decode(ids[: span[0]]):  # else what it has of later text would come twice
                return Reply(content + self.tokenizer.decode(ids[span[0] : end]), parsed.reasoning_content or None)
            blocks = [self.tokenizer.decode(ids[slice(*call.token_span)]) if call.token_span else call.raw for call in attempts]
            return Reply(content + "".join(blocks), parsed.reasoning_content or None)
        calls = tuple(Call(call.id or "", utf8(call.name), utf8(arguments_as_json(call.arguments))) for call in attempts)
        return Reply(content, parsed.reasoning_content or None, calls)


def _readable(call: Any) -> bool:
    """Whether a call that a renderer found has a name, and arguments. The renderer passes on what the JSON holds, of any type."""
    from renderers import ToolCallParseStatus

    if not (isinstance(call.name, str) and call.name and isinstance(call.arguments, dict | str | None)):
        return False
    # XML formats say INVALID_JSON of a value that is plain text; the call is readable all the same.
    # UNKNOWN_TOOL: the environment tells the model that there is no such tool.
    return call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL) or isinstance(call.arguments, dict)


def continued(chat: Chat, said: TraceBuilder, prompt: list[Message], tools: list[dict] | None) -> list[int]:
    """The prompt's ids. If it extends an earlier turn (its messages, then only messages of the environment), it may keep its tokens.

    Not if the tools are others now: the earlier tokens show those of then.
    """
    before = said.before(prompt, tools)
    if before is None:
        return chat.render(prompt, tools)
    depth = said.depth(before)
    return chat.extend(*said.tokens(before), prompt[:depth], prompt[depth:], tools)


def load_chat(tokenizer: Any, model: ModelConfig, keeps_tokens: bool = True, ends: Sequence[int] = (), keeps_thinking: bool = True) -> Chat:
    """The chat format of a model. The other arguments: see `Chat`.

    Raises ValueError if the tokenizer does not fit `model.renderer`.
    """
    family = family_of(model)
    if family is None:
        parsers: dict[str, Any] = {"tool_parser": model.tool_call_parser, "reasoning_parser": model.reasoning_parser}
        chat = Chat(tokenizer, **parsers, keeps_tokens=keeps_tokens, ends=ends, arguments=model.chat_template_kwargs)
        chat.made_of = model, keeps_tokens, ends, keeps_thinking
        return chat
    from renderers import config_from_name, create_renderer

    config = config_from_name(family)
    assert config is not None, family
    try:
        retention = {"thinking_retention": "all"} if keeps_tokens and keeps_thinking else {}
        # A renderer would put the day of its own making into every prompt (gpt-oss), so it gets the run's, as templates do.
        dates = {name: today().date().isoformat() for name in type(config).model_fields if name.endswith("_date")}
        config = type(config)(**(dates | model.chat_template_kwargs), **retention)
        renderer = create_renderer(tokenizer, config)
    except Exception as error:  # each renderer raises errors of its own if tokens are missing
        given = f" with {model.chat_template_kwargs}" if model.chat_template_kwargs else ""
        raise ValueError(
            f"the tokenizer of {model.name} does not fit the renderer {family}{given}: {type(error).__name__}: {error}.\n"
            "Set model.renderer to the model's own family, or to default, which uses its chat template."
        ) from error
    chat = Chat(tokenizer, renderer, keeps_tokens=keeps_tokens, keeps_thinking=keeps_thinking)
    chat.made_of = model, keeps_tokens, ends, keeps_thinking
    if keeps_tokens and keeps_thinking:
        chat.plain = load_chat(tokenizer, model, keeps_thinking=False)
    return chat
