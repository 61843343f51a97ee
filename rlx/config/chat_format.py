"""Which chat format a model has: a typed renderer of the `renderers` package, or the chat template of its tokenizer or of a file.

The package is imported inside the functions, because that takes half a second.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.config.schema import ModelConfig

GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token")  # to every template
# Arguments of transformers' `apply_chat_template` itself: they would not reach the template.
OWN = (
    "conversation", "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
HUB_NAME = re.compile(r"[^/]+/[^/]+")
TEMPLATES = Path(__file__).with_name("chat_templates")


def template_names() -> list[str]:
    """The templates that are part of rlx, by name."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def template_path(named: str) -> Path:
    """The file of `model.chat_template`: one of `template_names`, otherwise a path."""
    return TEMPLATES / f"{named}.jinja" if named in template_names() else Path(named).expanduser()


def with_absolute_files(model: ModelConfig) -> ModelConfig:
    """The section with absolute paths of its files, so that a process in another folder finds them. A shipped template keeps its name."""
    files: dict[str, Any] = {}
    if model.chat_template and model.chat_template not in template_names():
        files["chat_template"] = str(Path(model.chat_template).expanduser().absolute())
    return replace(model, **files)


def arguments_of(template: str) -> set[str]:
    """The names that a chat template (Jinja) reads from outside, without those that every template is given.

    Raises ValueError if it is not valid Jinja. Knows what transformers adds to it: `break` and `continue` in loops, `{% generation %}`.
    """
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols, Generation])
    try:
        return meta.find_undeclared_variables(environment.parse(template)) - set(GIVEN) - {"raise_exception", "strftime_now"}
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None


def unread(kwargs: Collection[str], template: str) -> list[str]:
    """The names of `model.chat_template_kwargs` that a template does not read, so that they would have no effect."""
    return sorted(set(kwargs) - (arguments_of(template) - set(OWN)))


def family_of(model: ModelConfig) -> str | None:
    """The renderer that writes and reads this model's conversations; None: the chat template does.

    `model.renderer=auto` takes the renderer that the package has for the exact hub name, unless `model.chat_template` is set.
    """
    if model.renderer != "auto":
        return None if model.renderer == "default" else model.renderer
    if model.chat_template is not None or not HUB_NAME.fullmatch(model.name):
        return None  # importing the package takes a second
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(model.name)


def families() -> list[str]:
    """The names that `model.renderer` may have besides `auto` and `default`."""
    from renderers.base import MODEL_RENDERER_MAP

    return sorted(set(MODEL_RENDERER_MAP.values()))


def fields_of(family: str) -> frozenset[str]:
    """The template arguments that a renderer takes (`enable_thinking`, …)."""
    from renderers import config_from_name

    config = config_from_name(family)
    return frozenset() if config is None else config.template_field_names()
