"""The rules for chat formats: renderers, templates, parsers, reasoning.

What a template does with tools is found by rendering it, once its tokenizer is known (`rlx.policy.templates`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from rlx.config.chat_format import families, family_of
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


@rule("model.chat_template", "model.renderer")
def template_is_used(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.chat_template is None:
        return
    if cfg.model.renderer not in ("auto", "default"):
        yield (
            f"a renderer does not read a chat template: {of('model.chat_template')} with {of('model.renderer')}.\n"
            "Remove one of them; model.renderer=default uses the template."
        )
    if not Path(cfg.model.chat_template).expanduser().is_file():
        yield f"there is no such file: {of('model.chat_template')}; the current directory is {Path.cwd()}. Correct the path."


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


@rule("model.strips_thinking", "model.name", "model.renderer", "model.chat_template", "orchestrator.trajectory_strategy")
def thinking_templates(cfg: Config, of: Show) -> Iterator[str]:
    if not cfg.model.strips_thinking or cfg.orchestrator.trajectory_strategy != "interleaved" or cfg.model.chat_template is not None:
        return
    if family_of(cfg.model) is None:  # a renderer keeps all reasoning (rlx.policy.chat)
        unknown = f"does not know {of('model.name')}" if cfg.model.renderer == "auto" else f"is not used: {of('model.renderer')}"
        yield (
            "the chat template removes the reasoning of earlier turns, so later prompts do not extend earlier ones: "
            f"{of('model.strips_thinking')} with {of('orchestrator.trajectory_strategy')}.\n"
            f"The package `renderers` could keep the reasoning, but {unknown}. Name the model's family, for example "
            "model.renderer=qwen3, or use orchestrator.trajectory_strategy=branching."
        )
