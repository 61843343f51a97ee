"""Chat formats: what is sampled is what is trained, whatever a template does with it.

The templates are in the manner of known ones (`chat_templates`); the known ones themselves are tested where packages ship them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import CLOSING, HERMES, LLAMA, OPENING, PLAIN, RETAINING, STRIPPING, small_tokenizer, spelled
from policy_stand_in import policy_of
from traces import merge, tokens_of

from rlx.config.schema import ModelConfig
from rlx.envs.load import load_tokenizer
from rlx.models.tiny import build_tokenizer
from rlx.paths import RunPaths, write_text
from rlx.policy.base import Message, PolicyError
from rlx.policy.chat import Chat, load_chat
from rlx.policy.templates import REMEDIES, ends_of, problems, refusal
from rlx.trace import Turn
from rlx.types import Task

TASK = Task(env="e", example_id=0, index=0, row={})
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "One."}}, "required": ["x"]},
    },
}


def turn_of(prompt: Sequence[int], completion: Sequence[int], finish_reason: str = "stop") -> Turn:
    return Turn(
        prompt_ids=np.asarray(prompt, np.int32),
        completion_ids=np.asarray(completion, np.int32),
        logprobs=-np.arange(1, len(completion) + 1, dtype=np.float32),
        versions=np.zeros(len(completion), np.int32),
        temperature=1.0,
        finish_reason=finish_reason,
    )


CALLS = {
    "hermes": '<tool_call>\n{"name":"add","arguments":{"x":2}}\n</tool_call>',
    "llama3_json": '{"name":"add","parameters":{"x":2}}',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "[add(x=2)]",
}


class Sampled:
    """A policy that says random things in random spellings: reasoning, text, calls, broken calls, cut off or not."""

    def __init__(self, chat: Chat, state: random.Random, format: str, *, thinks: bool = True, limit: int = 400) -> None:
        self.chat, self.state, self.format, self.thinks, self.limit = chat, state, format, thinks, limit

    def text(self, prompt: str) -> str:
        state, text = self.state, ""
        if self.thinks and state.random() < 0.7:
            text = "" if prompt.rstrip().endswith("<think>") else "<think>"
            text += state.choice(["\nsum\n", " two and  three\n\n"]) + "</think>\n\n"
        call, answer = CALLS[self.format], state.choice(["Five. ", " the answer  is five\n", ""])
        return text + state.choice([answer, answer + call, call, call[:-7] + "}", call])

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        tokenizer = self.chat.tokenizer
        ids = [*spelled(tokenizer, self.text(tokenizer.decode(prompt_ids[-8:])), self.state), self.chat.stop_token_ids[-1]]
        cut = self.state.random() < 0.15
        ids = ids[: self.state.randint(1, len(ids) - 1)] if cut and len(ids) > 1 else ids
        return turn_of(prompt_ids, ids, "length" if cut else "stop")


def converse(chat: Chat, state: random.Random, format: str, *, turns: int = 4, users: bool = True, thinks: bool = True) -> tuple[Any, list]:
    """An episode: answers get tool results if they call, otherwise another question (`users`). Returns it and all of its requests."""
    sampled = Sampled(chat, state, format, thinks=thinks)
    policy = policy_of(sampled, chat, context_length=10_000)
    episode = policy.episode(TASK, 0, 0)
    messages: list[Message] = [{"role": "user", "content": "add two and three"}]
    replies = []
    for _ in range(turns):
        reply = asyncio.run(episode.respond(messages, [ADD]))
        replies.append(reply)
        shown = chat.tokenizer.decode(reply.turn.prompt_ids)
        assert all(shown.count(text) == [m["content"] for m in messages].count(text) for text in ("add two and three", "are you  sure?"))
        results = [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "5"} for call in reply.calls]
        if not results and not users:
            break
        messages = [*messages, reply.message, *(results or [{"role": "user", "content": "are you  sure?"}])]
    return episode, replies


def check_exactly_once(replies: list[Any], drafts: list[Any]) -> None:
    """Every sampled token is in one sample, marked, and in the context in which it was sampled."""
    turns = [reply.turn for reply in replies]
    placed = [(draft, start, turn) for draft in drafts for start, turn in draft.spans]
    assert sorted(id(turn) for _, _, turn in placed) == sorted(map(id, turns))
    for draft, start, turn in placed:
        assert start == len(turn.prompt_ids)
        assert draft.ids[:start].tolist() == turn.prompt_ids.tolist()
        assert draft.ids[start : start + len(turn.completion_ids)].tolist() == turn.completion_ids.tolist()
    for draft in drafts:
        covered = [position for start, turn in draft.spans for position in range(start, start + len(turn.completion_ids))]
        assert len(covered) == len(set(covered))


FORMATS = {"hermes": HERMES, "closing": CLOSING, "stripping": STRIPPING, "retaining": RETAINING, "opening": OPENING, "llama3_json": LLAMA}


def chat_of(name: str, **options: Any) -> Chat:
    return Chat(small_tokenizer(FORMATS[name], "<|eot_id|>" if name in ("llama3_json", "closing") else "<|im_end|>"), **options)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
def test_every_sampled_token_is_trained_once_in_its_own_context(name: str, strategy: str) -> None:
    chat = chat_of(name, keeps_tokens=strategy == "interleaved")
    format = chat.tool_parser
    assert format == ("llama3_json" if name == "llama3_json" else "hermes")
    for seed in range(12):
        _, replies = converse(chat, random.Random(seed), str(format))
        drafts = merge([reply.turn for reply in replies], strategy)
        check_exactly_once(replies, drafts)
        if strategy == "branching":
            assert len(drafts) == len(replies)


@pytest.mark.parametrize(("name", "thinks"), [("retaining", True), ("hermes", False), ("closing", False), ("llama3_json", False)])
def test_a_template_that_keeps_everything_gives_one_growing_sample(name: str, thinks: bool) -> None:
    chat = chat_of(name)
    grown = 0
    for seed in range(12):
        _, replies = converse(chat, random.Random(seed), str(chat.tool_parser), thinks=thinks)
        if all(reply.turn.finish_reason == "stop" for reply in replies):
            assert len(merge([reply.turn for reply in replies], "interleaved")) == 1, seed
            grown += 1
    assert grown > 3


def test_a_template_that_strips_reasoning_begins_a_sample_when_a_user_speaks_again() -> None:
    chat = chat_of("stripping")
    think = "<think>\nsum\n</think>\n\n"
    said = iter([think + CALLS["hermes"], think + "Five.", "Yes.", "Sure."])

    class Script(Sampled):
        def text(self, prompt: str) -> str:
            return next(said)

    state = random.Random(2)
    state.random = lambda: 1.0  # type: ignore[method-assign]  # no answer is cut
    episode = policy_of(Script(chat, state, "hermes"), chat, context_length=10_000).episode(TASK, 0, 0)
    messages: list[Message] = [{"role": "user", "content": "add two and three"}]
    counts = []
    turns = []
    for new in ({"role": "tool", "tool_call_id": "", "content": "5"}, *({"role": "user", "content": "sure?"} for _ in range(3))):
        reply = asyncio.run(episode.respond(messages, [ADD]))
        turns.append(reply.turn)
        messages = [*messages, reply.message, dict(new)]
        counts.append(len(merge(turns, "interleaved")))
    assert counts == [1, 1, 2, 2], "reasoning stays while tools answer; it goes when a user speaks, and there is none afterwards"


def test_the_spelling_of_the_template_does_not_replace_what_was_sampled() -> None:
    chat = chat_of("hermes")
    ids = spelled(chat.tokenizer, 'Five. \n<tool_call>{"arguments":{"x":2},"name":"add"}</tool_call>', random.Random(0))
    prompt: list[Message] = [{"role": "user", "content": "add"}]
    result = [{"role": "tool", "tool_call_id": "call00000", "content": "5"}]
    for end, closes in ((chat.stop_token_ids, False), ([], True)):  # said to its end, or cut by a limit
        turn = turn_of(chat.render(prompt, [ADD]), [*ids, *end])
        before = [*prompt, {**chat.parse(turn, [ADD]).message}]
        known = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        later = chat.extend(*tokens_of(turn), before, result, [ADD])
        assert later[: len(known)] == known
        added = chat.tokenizer.decode(later[len(known) :])
        shown = "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert added == ("<|im_end|>" if closes else "") + shown
        assert Chat(chat.tokenizer, keeps_tokens=False).extend(*tokens_of(turn), before, result, [ADD]) == chat.render(
            [*before, *result], [ADD]
        )


def test_a_message_behind_another_end_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("closing")
    monkeypatch.setattr(chat, "closing", 0)  # as a template whose ends are counted wrongly
    prompt: list[Message] = [{"role": "user", "content": "add"}]
    turn = turn_of(chat.render(prompt), [*map(chat.tokenizer.convert_tokens_to_ids, "five"), chat.stop_token_ids[-1]])
    before = [*prompt, chat.parse(turn).message]
    for text in ("why?", " the answer\n"):
        new = [{"role": "user", "content": text}]
        assert chat.extend(*tokens_of(turn), before, new) == chat.render([*before, *new])


@pytest.mark.parametrize("form", ["template", "renderer"])
def test_tools_that_change_are_shown_anew(form: str) -> None:
    chat = chat_of("hermes") if form == "template" else qwen3()
    other = {**ADD, "function": {**ADD["function"], "name": "subtract"}}

    class Calls(Sampled):
        def text(self, prompt: str) -> str:
            return CALLS["hermes"]

    state = random.Random(0)
    state.random = lambda: 1.0  # type: ignore[method-assign]  # no answer is cut
    episode = policy_of(Calls(chat, state, "hermes"), chat, context_length=10_000).episode(TASK, 0, 0)
    messages: list[Message] = [{"role": "user", "content": "add"}]
    turns = []
    for tools in ([ADD], [ADD], [other], None):
        reply = asyncio.run(episode.respond(messages, tools))
        turns.append(reply.turn)
        result = {"role": "tool", "tool_call_id": reply.calls[0].id, "name": "add", "content": "5"} if reply.calls else None
        if tools == [other]:
            assert reply.turn.prompt_ids.tolist() == chat.render(messages, tools)
        messages = [*messages, reply.message, result or {"role": "user", "content": "?"}]
    names = [
        {name for name in ("add", "subtract") if f'"name": "{name}", "description"' in chat.tokenizer.decode(turn.prompt_ids)}
        for turn in turns
    ]
    assert names == [{"add"}, {"add"}, {"subtract"}, set()]
    assert len(merge(turns, "interleaved")) == 3, "equal tools extend, other tools begin a sample"


def test_calls_have_ids_of_their_own_in_all_of_a_rollout() -> None:
    chat = chat_of("hermes")

    class Calls(Sampled):
        def text(self, prompt: str) -> str:
            return CALLS["hermes"] * 2

    state = random.Random(0)
    state.random = lambda: 1.0  # type: ignore[method-assign]
    episode = policy_of(Calls(chat, state, "hermes"), chat, context_length=10_000).episode(TASK, 0, 0)
    ids = []
    for _ in range(3):
        ids += [call.id for call in asyncio.run(episode.respond([{"role": "user", "content": "add"}], [ADD])).calls]
    assert ids == ["call00000", "call00001", "call00100", "call00101", "call00200", "call00201"]


def test_a_call_that_cannot_be_read_reaches_the_environment_as_text() -> None:
    chat = chat_of("hermes")
    broken = 'Now.<tool_call>{"name": "add", "arguments": {</tool_call>'
    turn = turn_of([1], [*chat.tokenizer.encode(broken), *chat.stop_token_ids])
    reply = chat.parse(turn, [ADD])
    assert (reply.content, reply.calls) == (broken, ())


@pytest.mark.parametrize(("name", "between", "count"), [("llama3_json", "; ", 0), ("hermes", "\n", 2)])
def test_several_calls_stay_text_if_the_template_could_not_show_them_later(name: str, between: str, count: int) -> None:
    chat = chat_of(name)
    said = between.join([CALLS[name]] * 2)
    prompt: list[Message] = [{"role": "user", "content": "add"}]
    turn = turn_of(chat.render(prompt, [ADD]), [*chat.tokenizer.encode(said), *chat.stop_token_ids[-1:]])
    reply = chat.parse(turn, [ADD])
    assert (reply.content, len(reply.calls)) == ("" if count else said, count)
    later = chat.extend(*tokens_of(turn), [*prompt, reply.message], [{"role": "user", "content": "one at once"}], [ADD])
    assert "one at once" in chat.tokenizer.decode(later)


# what templates lose


def test_a_template_that_ignores_tools_is_refused_with_the_remedies() -> None:
    chat = Chat(small_tokenizer(PLAIN))
    text = refusal("me/smol", chat, {"sums": [ADD], "plain": []})
    assert text == (
        "the chat format of me/smol does not serve environments with tools:\n"
        "  envs.sums: it ignores tools: the prompt does not name add\n"
        "  envs.sums: it loses the model's own tool call: a later prompt does not show it\n" + REMEDIES
    )
    assert refusal("me/smol", chat, {"plain": []}) is None


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (HERMES.replace("{%- for call in message.tool_calls or [] %}", "{%- for call in [] %}"), "it loses the model's own tool call"),
        (HERMES.replace("message.content + '</tool_response>", "'</tool_response>"), "it loses the tool's result"),
        (HERMES.replace("<tool_call>", "<call>"), "no parser reads the calls that it writes"),
        (HERMES + "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}", "no tools here"),
        ("{{ messages[0].content }}{% if tools %}{{ raise_exception('never') }}{% endif %}", "it cannot show the tools (add)"),
    ],
)
def test_each_loss_is_named(template: str, lost: str) -> None:
    found = list(problems(Chat(small_tokenizer(template)), [ADD]))
    assert len([text for text in found if lost in text]) == 1, found


def test_the_end_of_the_templates_turn_stops_the_model_also_if_the_tokenizers_end_is_another() -> None:
    chat = Chat(small_tokenizer(HERMES, eos="<|eot_id|>"))
    assert chat.tokenizer.convert_ids_to_tokens(chat.stop_token_ids) == ["<|eot_id|>", "<|im_end|>"]


def test_ends_that_only_the_generation_settings_know_end_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer(LLAMA, "<|eot_id|>")
    monkeypatch.setattr("rlx.envs.load.tokenizer_of", lambda source, model: tokenizer)  # transformers takes seconds to load one
    eom, eot = tokenizer.convert_tokens_to_ids(["[INST]", "<|eot_id|>"])
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eom, eot]}))
    paths = RunPaths(tmp_path / "run")
    write_text(paths.initial_model, f"{tmp_path}\n")
    config: Any = SimpleNamespace(
        model=model_config(),
        orchestrator=SimpleNamespace(trajectory_strategy="interleaved"),
        keeps_thinking=True,
        inference=SimpleNamespace(startup_timeout=1.0),
    )
    chat = load_tokenizer(config, paths, lambda phase: None)
    assert chat.stop_token_ids == [eot, eom]
    messages: list[Message] = [{"role": "user", "content": "add"}]
    turn = turn_of(chat.render(messages), [*tokenizer.encode("five", add_special_tokens=False), eom])
    before = [*messages, chat.parse(turn).message]
    assert before[-1]["content"] == "five"
    assert chat.extend(*tokens_of(turn), before, messages) == chat.render([*before, *messages]), (
        "the template ends its turns with another token"
    )

    (tmp_path / "generation_config.json").unlink()
    assert ends_of(str(tmp_path)) == [3], "as in vLLM"
    (tmp_path / "config.json").unlink()
    assert ends_of(str(tmp_path)) == []


def test_what_a_template_refuses_is_an_error_of_the_policy() -> None:
    chat = chat_of("llama3_json")
    call = {"type": "function", "id": "a", "function": {"name": "add", "arguments": "{}"}}
    with pytest.raises(PolicyError, match=r"the chat template cannot show this conversation: TemplateError: one call at once"):
        chat.render([{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [call, call]}])


def model_config(**keys: Any) -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads"), 1)
    return ModelConfig(name="./mine", context_length=4, num_parameters=1.0, vocab_size=2, **sizes, **keys)


def test_a_renderer_that_does_not_fit_the_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the tokenizer of \./mine does not fit the renderer llama-3: "):
        load_chat(build_tokenizer(64), model_config(renderer="llama-3"))


def qwen3() -> Chat:
    """The renderer of Qwen3 over the small tokenizer."""
    tokenizer = small_tokenizer(None)
    tokenizer.add_tokens(["<|endoftext|>", "<tool_response>", "</tool_response>"])
    return load_chat(tokenizer, model_config(renderer="qwen3"))


def test_a_renderer_keeps_reasoning_in_one_growing_sample() -> None:
    chat = qwen3()
    samples = 0
    for seed in range(12):
        _, replies = converse(chat, random.Random(seed), "hermes")
        drafts = merge([reply.turn for reply in replies], "interleaved")
        check_exactly_once(replies, drafts)
        samples += len(drafts)
    assert samples <= 15, "only turns that a limit cut begin another sample"


NO_CALLS = [
    '{"name": ["add"], "arguments": {}}',
    '{"name": 5, "arguments": {}}',
    '{"name": {"add": 1}, "arguments": {}}',
    '{"name": "add", "arguments": [2]}',
    '{"name": "add", "arguments": {"x": ' + "1" * 5000 + "}}",  # json refuses to make a number of it
    '{"name": "add", "arguments": ' + "[" * 5000,
]


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ('Now.<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>', "Now.", ["add"]),
        ('Now.<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', "Now.", ["other"]),
        ('Now.<tool_call>\n{"name": "add"</tool_call>', 'Now.<tool_call>\n{"name": "add"</tool_call>', []),
        ('<think>\nhm\n</think>\n\nNow.<tool_call>\n{"na', 'Now.<tool_call>\n{"na', []),
        (
            "<tool_call>\nx\n</tool_call> and <tool_call>\ny\n</tool_call> so",
            "<tool_call>\nx\n</tool_call> and <tool_call>\ny\n</tool_call> so",
            [],
        ),
        *((f"Now.<tool_call>{said}</tool_call>", f"Now.<tool_call>{said}</tool_call>", []) for said in NO_CALLS),
    ],
)
def test_what_a_renderer_cannot_read_reaches_the_environment_as_text(said: str, content: str, calls: list[str]) -> None:
    chat = qwen3()
    reply = chat.parse(turn_of([1], [*chat.tokenizer.encode(said), *chat.stop_token_ids[:1]]), [ADD])
    assert (reply.content, [call.name for call in reply.calls]) == (content, calls)
    assert (reply.reasoning is not None) == ("think" in said)


def test_without_tools_a_renderer_reads_no_calls() -> None:
    chat = qwen3()
    said = 'Five.<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'
    reply = chat.parse(turn_of([1], [*chat.tokenizer.encode(f"<think>\nhm\n</think>\n\n{said}"), *chat.stop_token_ids[:1]]))
    assert (reply.content, reply.reasoning, reply.calls) == (said, "hm", ())
