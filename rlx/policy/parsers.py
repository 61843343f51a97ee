"""Reads tool calls and reasoning from the text of an answer, for models whose chat format is a template.

    read_reasoning("<think>\\nsum\\n</think>\\n\\nFive.", ...)                              → ("\\nsum\\n", "\\n\\nFive.")
    TOOL_PARSERS["hermes"]('Let me add.<tool_call>{"name": "add", …}</tool_call>', tools) → ("Let me add.", [("add", '{"x": 2}', "")])

The names are vLLM's, whose parsers work only inside its server. A tool parser returns None if the text has no call, or one that it cannot
read; the answer then stays text, as in vLLM. What is trained does not depend on any parser: it is the sampled tokens.
Models of the `renderers` package are parsed by their renderer (`rlx.policy.chat`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]]
Said = tuple[str, str, str]
"""Name, arguments (JSON) and id of a call. The id is empty if the format has none."""
Calls = tuple[str, list[Said]]
"""The text before the first call, or beside the calls, and the calls."""

OPEN, CLOSE = "<think>", "</think>"
UNREADABLE = (ValueError, RecursionError, MemoryError, SyntaxError)  # of json and ast, also for nesting that is too deep


def read_reasoning(text: str, name: str, prompt_tail: str) -> tuple[str | None, str]:
    """Split an answer into reasoning and the rest. Reasoning that is cut off before its end is all there is.

    `name`: `qwen3`: the answer begins with `<think>`, or the prompt ended with it (`prompt_tail`). `deepseek_r1`: every answer begins
    with reasoning, also without `<think>`. `none`: there is no reasoning.
    """
    if name == "none":
        return None, text
    body = text.lstrip()
    if body.startswith(OPEN):
        body = body[len(OPEN) :]
    elif name == "deepseek_r1" or prompt_tail.rstrip().endswith(OPEN):
        body = text
    else:
        return None, text
    reasoning, _, rest = body.partition(CLOSE)
    return reasoning, rest


def hermes(text: str, _: Tools) -> Calls | None:
    """`<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>`, any number of them. The last end tag may be missing."""
    before, blocks = _blocks(text)
    return _all(before, map(_from_json, blocks)) if blocks else None


def qwen3_coder(text: str, tools: Tools) -> Calls | None:
    """`<tool_call><function=add><parameter=x>2</parameter></function></tool_call>`. Values have the types of the tool's schema."""
    before, blocks = _blocks(text)
    return _all(before, (_from_xml(block, tools) for block in blocks)) if blocks else None


def llama3_json(text: str, _: Tools) -> Calls | None:
    """`{"name": "add", "parameters": {"x": 2}}`, also after `<|python_tag|>`, and several of them, separated by `;`."""
    decoder, start, found = json.JSONDecoder(), text.find("{"), []
    before = text[: max(start, 0)].replace("<|python_tag|>", "")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except UNREADABLE:
            return None
        found.append(_call(value))
        start = text.find("{", end)
    return _all(before, found) if found else None


def pythonic(text: str, _: Tools) -> Calls | None:
    """`[add(x=2, y=3), add(x=1, y=1)]`: a list of calls with literal keyword arguments.

    It is the whole answer, or stands between LFM2's marks, with text before or after; the end mark may be missing.
    """
    before, marked, rest = text.partition("<|tool_call_start|>")
    if marked:
        source, _mark, after = rest.partition("<|tool_call_end|>")
        after = after.rpartition("<|tool_call_end|>")[2]  # LFM2 may repeat the calls and end them once more; vLLM drops that, too
        said = "\n".join(filter(None, (before.strip(), after.strip())))
    else:
        source, said = text.replace("<|python_tag|>", ""), ""
    source = source.strip()
    if not (source.startswith("[") and source.endswith("]")):
        return None
    try:
        tree = ast.parse(source, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return _all(said, [_from_python(call) for call in calls]) if calls else None
    except (*UNREADABLE, TypeError):  # TypeError: a literal that JSON does not have (a set, bytes, `...`)
        return None


def mistral(text: str, _: Tools) -> Calls | None:
    """`[TOOL_CALLS] [{"name": "add", "arguments": {"x": 2}, "id": "…"}]`, or, since version 11, `[TOOL_CALLS]add[CALL_ID]…[ARGS]{"x": 2}`.

    The template shows an id with the call's result, so it must stay. Ids that templates refuse are left out.
    """
    before, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return None
    if rest.lstrip().startswith("["):
        try:
            values, _end = json.JSONDecoder().raw_decode(rest.lstrip())
        except UNREADABLE:
            return None
        return _all(before, (_call(value, marked=True) for value in values)) if values else None
    found = []
    for block in rest.split("[TOOL_CALLS]"):
        head, brace, arguments = block.replace("[ARGS]", "").partition("{")
        name, _mark, call_id = head.partition("[CALL_ID]")
        said = json.dumps({"name": name.strip(), "id": call_id.strip()})[:-1] + ', "arguments": {' + arguments.strip() + "}"
        found.append(_from_json(said) if brace else None)
    return _all(before, found)


TOOL_PARSERS: dict[str, Callable[[str, Tools], Calls | None]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}


def arguments_as_json(arguments: Any) -> str:
    """The arguments of a call as JSON. A `str` is passed on: it is JSON, or the environment tells the model that it is not."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _blocks(text: str) -> tuple[str, list[str]]:
    """The text before the first `<tool_call>`, and the content of each."""
    before, *rest = text.split("<tool_call>")
    return before, [block.partition("</tool_call>")[0] for block in rest]


def _all(before: str, calls: Iterable[Said | None]) -> Calls | None:
    """The calls, if every one could be read."""
    found = list(calls)
    read = [call for call in found if call is not None]
    return (before, read) if len(read) == len(found) else None


def _call(value: Any, marked: bool = False) -> Said | None:
    """A call that was JSON. Without the key of its arguments it is data with a name, such as `{"name": "Paris"}`; so it is in vLLM.

    `marked`: the format's own mark says that it is a call, and a call without arguments may lack the key.
    """
    if not (isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]):
        return None
    if not marked and not value.keys() & {"arguments", "parameters"}:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    kept = call_id if isinstance(call_id, str) and re.fullmatch("[A-Za-z0-9]{9}", call_id) else ""
    return (value["name"], arguments_as_json(arguments), kept) if arguments is None or isinstance(arguments, dict | str) else None


def _from_json(block: str) -> Said | None:
    try:
        return _call(json.loads(block))
    except UNREADABLE:
        return None


def _from_xml(block: str, tools: Tools) -> Said | None:
    _, found, rest = block.partition("<function=")
    name, closed, body = rest.partition(">")
    if not (found and closed and name.strip()):
        return None
    types = _types(name.strip(), tools)
    arguments: dict[str, Any] = {}
    for part in body.partition("</function>")[0].split("<parameter=")[1:]:
        key, named, value = part.partition(">")
        value, ended, _ = value.partition("</parameter>")
        if not (named and ended):
            return None
        arguments[key.strip()] = _typed(value.removeprefix("\n").removesuffix("\n"), types.get(key.strip()))
    return name.strip(), json.dumps(arguments, ensure_ascii=False), ""


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """The declared type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _typed(value: str, declared: Any) -> Any:
    """A value of an XML call: text where the schema says so, otherwise JSON if it is JSON."""
    if declared in ("string", ["string"]):
        return value
    try:
        return json.loads(value)
    except UNREADABLE:
        return value


def _from_python(call: ast.expr) -> Said | None:
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute) and not call.args):
        return None
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    if len(arguments) < len(call.keywords):
        return None
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False), ""
