"""Orders to all workers of an engine, through vLLM's `collective_rpc`.

    await obeyed(core.collective_rpc_async, "load_policy")   →   every worker's `obey("load_policy", …)`   →   (why not, answer), …

A worker that fails must not raise. vLLM's executor of several workers stops at the first error and leaves the answers of the others unread:
each later call would then get the answers of the one before it. And an exception that crosses processes loses its type.
So `obey` answers with the reason as text, and it is raised here, when all have answered.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)


class Disobeyed(RuntimeError):
    """Some workers could not obey an order. The text is what the first of them says."""


class Obedient:
    """The worker's end: a mixin of what has the methods."""

    def obey(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, Any]:
        """Call the method. Returns why it failed, or an empty text, and its result."""
        try:
            return "", getattr(self, method)(*arguments, **named)
        except Exception as error:
            log.warning("%s failed", method, exc_info=True)
            return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", None


async def obeyed(call: Callable[..., Awaitable[Sequence[Any]]], method: str, *arguments: Any, **named: Any) -> list[Any]:
    """The results of all workers. `call`: the engine's `collective_rpc_async`. Raises Disobeyed."""
    answers = await call("obey", None, (method, arguments, named))
    if refused := [why for why, _ in answers if why]:
        raise Disobeyed(refused[0])
    return [result for _, result in answers]
