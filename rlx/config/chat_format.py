"""Which chat format a model has: a typed renderer of the `renderers` package, or the chat template of its tokenizer.

The package is imported inside the functions, because that takes half a second.
"""

from __future__ import annotations

from rlx.config.schema import ModelConfig


def family_of(model: ModelConfig) -> str | None:
    """The renderer that writes and reads this model's conversations; None: the chat template does.

    `model.renderer=auto` takes the renderer that the package has for the exact hub name, unless `model.chat_template` is set.
    """
    if model.renderer != "auto":
        return None if model.renderer == "default" else model.renderer
    if model.chat_template is not None:
        return None
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(model.name)


def families() -> list[str]:
    """The names that `model.renderer` may have besides `auto` and `default`."""
    from renderers.base import MODEL_RENDERER_MAP

    return sorted(set(MODEL_RENDERER_MAP.values()))
