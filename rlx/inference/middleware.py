"""A middleware for vLLM that asks for the run's secret on every route: `--api-key` leaves `/pause`, `/collective_rpc` and others open.

RLX_SECRET=… vllm serve … --middleware rlx.inference.middleware.Secret
"""

from __future__ import annotations

import hmac
import os
from typing import Any

SECRET = "RLX_SECRET"


class Secret:
    """A pure ASGI middleware: requests without `Authorization: Bearer $RLX_SECRET` get 401, and WebSockets are closed."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, b"Bearer " + os.environ[SECRET].encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
