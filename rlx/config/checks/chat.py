"""The rules for chat formats: renderers, templates, parsers, reasoning.

What a template does with tools is found by rendering it, once its tokenizer is known (`rlx.policy.templates`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.chat_format import arguments_of, families, family_of, fields_of, template_names, template_path, unread
from rlx.config.rules import Rule, Show, check_of, problem, table
from rlx.config.schema import PlayRoot
from rlx.config.tree import Problem

FORMATS: list[Rule[PlayRoot]] = [
    Rule(
        "model.renderer",
        lambda c: c.model.renderer not in ("auto", "default") and c.model.renderer not in families(),
        "there is no such renderer",
        "auto, default (the chat template), or a family of the package `renderers`, such as qwen3",
    ),
    Rule(
        "model.chat_template model.renderer",
        lambda c: c.model.chat_template is not None and c.model.renderer not in ("auto", "default"),
        "a renderer does not read a chat template",
        "remove one; model.renderer=default uses the template",
    ),
    Rule(
        "model.tool_call_parser model.reasoning_parser model.renderer",
        lambda c: (c.model.tool_call_parser, c.model.reasoning_parser) != ("auto", "auto") and family_of(c.model) is not None,
        "the model's renderer reads answers itself, so no parser is used",
        "auto for both, or model.renderer=default, which uses the chat template",
    ),
    Rule(
        "model.name model.strips_thinking orchestrator.trajectory_strategy model.renderer",
        lambda c: (
            c.plays
            and c.model.strips_thinking
            and c.orchestrator.trajectory_strategy == "interleaved"
            and c.model.chat_template is None
            and c.chat.thinking != "template"
            and family_of(c.model) is None  # a renderer keeps all reasoning (rlx.policy.chat)
        ),
        "the chat template removes the reasoning of earlier turns, so later prompts do not extend earlier ones",
        "the renderer of the model's family, such as model.renderer=qwen3; or chat.thinking=template: several samples a rollout",
    ),
]
table(PlayRoot, FORMATS)


@check_of(PlayRoot)
def template_is_read(cfg: PlayRoot, of: Show) -> Iterator[Problem]:
    model, keys = cfg.model, ["model.chat_template", "model.chat_template_kwargs"]
    given, missing, known = model.chat_template_kwargs, [], []
    if model.chat_template is not None:
        try:
            template = template_path(model.chat_template).read_text()
            missing, known = unread(given, template), sorted(arguments_of(template))
        except (OSError, ValueError) as error:
            fix = f"the path of a Jinja file, or a template of rlx by its name: {', '.join(template_names())}"
            yield problem(f"the chat template cannot be read ({error})", keys[:1], fix, of)
    elif given and model.warm_start is not None:
        missing = list(given)
    elif given and (family := family_of(model)) in families():
        known = sorted(fields_of(str(family)))
        missing = sorted({*given} - {*known})
    if missing:
        why = f"the chat format does not read {', '.join(missing)}, so they would have no effect"
        yield problem(why, keys[1:], f"leave them out; it reads {', '.join(known) or 'none'}", of)
