"""What a model's chat template does with tools and reasoning, found by rendering a made-up conversation.

Templates are programs of the models' makers, and some lose what a policy needs: SmolLM2's shows neither tools nor the model's own calls,
without a word. A run with such a model would train on prompts that never say what the tools are. So the conversation below is rendered
before anything is played, and what is lost is refused with what helps.

    user: …                                 with the tool probe_tool(probe_key)?
    assistant: calls probe_tool(probe_key="probe_value")
    tool: probe_result
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.chat_format import template_path
from rlx.config.schema import ModelConfig
from rlx.policy.base import PolicyError
from rlx.policy.parsers import CLOSE, TOOL_PARSERS, UNREADABLE

if TYPE_CHECKING:
    from rlx.policy.chat import Chat

ANSWER, VALUE, RESULT = "probe-answer", "probe_value", "probe_result"
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}
USER = {"role": "user", "content": "probe question"}
CALL = {"type": "function", "id": "call00000", "function": {"name": "probe_tool", "arguments": f'{{"probe_key": "{VALUE}"}}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLING_TWICE = {**CALLING, "tool_calls": [CALL, {**CALL, "id": "call00001"}]}
RETURNED = {"role": "tool", "tool_call_id": "call00000", "name": "probe_tool", "content": RESULT}

Show = Callable[[list[dict], list[dict] | None, bool], str]
"""(messages, tools, whether an answer is asked for) → the conversation as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a template does."""

    decodes_arguments: bool  # it wants the arguments of a call as a mapping, not as JSON
    tool_parser: str  # the parser that reads the calls that it writes; "none" if no one does
    one_call: bool  # it refuses a message with two calls, as Llama 3.1's does
    thinks: bool  # it knows reasoning between <think> and </think>
    end: str  # what follows the assistant's answer


def traits_of(show: Show, template: str) -> Traits:
    """The traits of a template. `show` renders arguments as they are given; `template` is its source."""
    end = _continuation(show, [USER], {"role": "assistant", "content": ANSWER}, None).partition(ANSWER)[2]
    written = _continuation(show, [USER], decoded(CALLING), [TOOL])
    decodes = VALUE in written
    if not decodes:
        written = _continuation(show, [USER], CALLING, [TOOL])
    return Traits(
        decodes_arguments=decodes,
        tool_parser=next((name for name in TOOL_PARSERS if _reads(name, written.removesuffix(end))), "none"),
        one_call=bool(written) and not _continuation(show, [USER], decoded(CALLING_TWICE) if decodes else CALLING_TWICE, [TOOL]),
        thinks=CLOSE in template or "reasoning_content" in template,
        end=end,
    )


def decoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as mappings, if they are JSON."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with contextlib.suppress(*UNREADABLE):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def problems(chat: Chat, tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the chat format loses of these tools, their calls and their results: one sentence each, without a remedy."""
    offered = [dict(tool) for tool in tools]
    names = [str(tool["function"]["name"]) for tool in offered]
    try:
        prompt = chat.show([USER], offered)
    except Exception as error:
        yield f"it cannot show the tools ({_short(names)}): {_said(error)}"
        return
    if missing := [name for name in names if name not in prompt]:
        yield f"it ignores tools: the prompt does not name {_short(missing)}"
    try:
        later = chat.show([USER, CALLING, RETURNED], [TOOL])
    except Exception as error:
        yield f"it cannot show a conversation with a tool call: {_said(error)}"
        return
    if VALUE not in later:
        yield "it loses the model's own tool call: a later prompt does not show it"
    if RESULT not in later:
        yield "it loses the tool's result: the next prompt does not show it"
    if VALUE in later and chat.tool_parser == "none":
        yield f"no parser reads the calls that it writes (model.tool_call_parser has {', '.join(TOOL_PARSERS)})"


REMEDIES = """\
Use a model that was made for tools; or give its tokenizer a template that shows tools: model.chat_template=FILE; or, if the package
`renderers` has the model's family, name it: model.renderer=FAMILY."""


def refusal(model: str, chat: Chat, tools: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Why the model's chat format does not serve the environments with tools, and what helps; None if it does.

    `tools`: the functions that each environment offers, by its name.
    """
    found = {name: list(problems(chat, offered)) for name, offered in tools.items() if offered}
    wrong = {name: texts for name, texts in found.items() if texts}
    if not wrong:
        return None
    lines = [f"  envs.{name}: {text}" for name, texts in wrong.items() for text in texts]
    return "\n".join([f"the chat format of {model} does not serve environments with tools:", *lines, REMEDIES])


def tokenizer_of(source: str, model: ModelConfig) -> Any:
    """The tokenizer of the model at `source` (folder or hub name), with `model.chat_template` if it is set."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(model.chat_template)
    return tokenizer


def ends_of(source: str) -> list[int]:
    """The tokens that end an answer, of the generation settings of the model at `source` (folder or hub name). vLLM stops at these, too."""
    from transformers.utils import cached_file

    for name in ("generation_config.json", "config.json"):
        options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(source, name, **options)
        if file is not None:
            found = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
            return found if isinstance(found, list) else [] if found is None else [found]
    return []


def read_template(path: str) -> str:
    """The text of `model.chat_template`."""
    return template_path(path).read_text()


def _continuation(show: Show, prompt: list[dict], answer: dict, tools: list[dict] | None) -> str:
    """How the template writes an answer: what it has behind the prompt. Empty if it refuses these messages."""
    try:
        before, whole = show(prompt, tools, True), show([*prompt, answer], tools, False)
    except Exception:
        return ""
    # A prompt may open a reasoning that later prompts do not show, so the answer begins where the two differ.
    return whole[next((at for at, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before)) :]


def _reads(name: str, written: str) -> bool:
    """Whether a parser reads the call in what the template wrote, and leaves nothing of it but reasoning."""
    read = TOOL_PARSERS[name](written.strip(), [TOOL])
    if read is None or read[0].rpartition(CLOSE)[2].strip():
        return False
    return [call[0] for call in read[1]] == ["probe_tool"] and VALUE in read[1][0][1]


def _short(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"
