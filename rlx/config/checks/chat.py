"""The rules for chat formats: renderers, templates, parsers, reasoning.

What a template does with tools is found by rendering it, once its tokenizer is known (`rlx.policy.templates`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from rlx.config.chat_format import GIVEN, OWN, arguments_of, families, family_of, fields_of, template_names, template_path, unread
from rlx.config.rules import Show, rule
from rlx.config.schema import Config


@rule("model.renderer")
def renderer_exists(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.renderer in ("auto", "default"):
        return
    known = families()
    if cfg.model.renderer not in known:
        close = difflib.get_close_matches(cfg.model.renderer, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        yield (
            f"there is no such renderer: {of('model.renderer')}.{hint}\n"
            f"Use auto, default (the chat template), or one of {', '.join(known)}."
        )


@rule("model.chat_template", "model.chat_template_kwargs", "model.renderer")
def template_is_used(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.chat_template is None:
        return
    if cfg.model.renderer not in ("auto", "default"):
        yield (
            f"a renderer does not read a chat template: {of('model.chat_template')} with {of('model.renderer')}.\n"
            "Remove one of them; model.renderer=default uses the template."
        )
    if not template_path(cfg.model.chat_template).is_file():
        yield (
            f"there is no such file: {of('model.chat_template')}; the current directory is {Path.cwd()}. Correct the path, "
            f"or use a template of rlx by its name: {', '.join(template_names())}."
        )
        return
    try:
        template = template_path(cfg.model.chat_template).read_text()
        known = arguments_of(template)
    except ValueError as error:
        yield f"the chat template is not valid Jinja, {error}: {of('model.chat_template')}. Correct the file."
        return
    if missing := unread(cfg.model.chat_template_kwargs, template):
        yield _not_read(missing, "the template", sorted(known), of)


@rule("model.chat_template", "model.chat_template_kwargs", "model.renderer", "model.name", "model.warm_start")
def arguments_are_read(cfg: Config, of: Show) -> Iterator[str]:
    given = cfg.model.chat_template_kwargs
    if owned := sorted({*GIVEN, *OWN} & set(given)):
        yield f"rlx itself gives {', '.join(owned)} to the template: {of('model.chat_template_kwargs')}. Remove {', '.join(owned)}."
    elif given and cfg.model.warm_start is not None and cfg.model.chat_template is None:
        yield f"the template of a model that rlx makes takes no arguments: {of('model.chat_template_kwargs')}. Remove them."
    elif given and (family := family_of(cfg.model)) is not None and family in families():
        known = sorted(fields_of(family))
        if missing := sorted(set(given) - set(known)):
            yield _not_read(missing, f"the renderer {family}", known, of)


def _not_read(missing: list[str], whose: str, known: list[str], of: Show) -> str:
    close = [name for one in missing for name in difflib.get_close_matches(one, known, n=1)]
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    can = f"It reads {', '.join(known)}." if known else "It reads none."
    return (
        f"{whose} does not read {', '.join(missing)}, so {_them(missing)} would have no effect: "
        f"{of('model.chat_template_kwargs')}.{hint}\n{can}"
    )


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "they"


@rule("model.tool_call_parser", "model.reasoning_parser", "model.renderer", "model.chat_template", "model.name")
def parsers_are_used(cfg: Config, of: Show) -> Iterator[str]:
    chosen = [key for key in ("tool_call_parser", "reasoning_parser") if getattr(cfg.model, key) != "auto"]
    if chosen and (family := family_of(cfg.model)) is not None:
        keys = " and ".join(of(f"model.{key}") for key in chosen)
        whose = of("model.renderer") if cfg.model.renderer != "auto" else f"the renderer {family} of {of('model.name')}"
        yield (
            f"the parser would not be used: {keys}, but {whose} reads answers itself.\n"
            "Leave it at auto, or set model.renderer=default, which uses the chat template."
        )


@rule("model.strips_thinking", "model.name", "model.renderer", "model.chat_template", "orchestrator.trajectory_strategy", "chat.thinking")
def thinking_templates(cfg: Config, of: Show) -> Iterator[str]:
    if (
        not cfg.plays
        or not cfg.model.strips_thinking
        or cfg.orchestrator.trajectory_strategy != "interleaved"
        or cfg.model.chat_template is not None
        or cfg.chat.thinking == "template"
    ):
        return
    if family_of(cfg.model) is None:  # a renderer keeps all reasoning (rlx.policy.chat)
        unknown = f"does not know {of('model.name')}" if cfg.model.renderer == "auto" else f"is not used: {of('model.renderer')}"
        yield (
            "the chat template removes the reasoning of earlier turns, so later prompts do not extend earlier ones: "
            f"{of('model.strips_thinking')} with {of('orchestrator.trajectory_strategy')}.\n"
            f"The package `renderers` could keep the reasoning, but {unknown}. Name the model's family, for example "
            "model.renderer=qwen3; or accept several samples a rollout with chat.thinking=template."
        )
