"""HTTP to inference servers: one session for all servers of a run, without retries (`sampler.py` and `fleet.py` have them)."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from rlx.inference import wire
from rlx.inference.endpoints import Endpoint
from rlx.inference.wire import RequestRefused, ServerUnreachable, error_of

CONNECT = 10.0  # seconds for opening a connection; a host that vanished does not refuse it
IDLE = 3.0  # seconds after which an idle connection is closed: vLLM closes it after 5, perhaps just when a request is sent
UNKNOWN_METHOD = b"is not implemented"  # vLLM's words for a method that its workers do not have


class Client:
    """An async context manager. Belongs to one event loop."""

    async def __aenter__(self) -> Client:
        connector, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE), aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def send(self, endpoint: Endpoint, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a POST, or without a JSON body to a GET.

        Raises ServerUnreachable if there is none, if it is cut, or if the server is going down (503).
        """
        method, headers = ("GET", endpoint.headers) if body is None else ("POST", endpoint.headers | {"Content-Type": "application/json"})
        try:
            async with self._session.request(method, endpoint.url + path, data=body, headers=headers) as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise ServerUnreachable(f"{endpoint.name} does not answer: {error or type(error).__name__}", connected) from error
        if status == 503 or (status == 401 and endpoint.superseded):
            raise ServerUnreachable(str(error_of(endpoint.name, status, content)))
        return status, content

    async def ask(self, endpoint: Endpoint, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of an answer with status 200. Raises `send`'s errors, RequestRefused for 4xx and InferenceError for 5xx."""
        status, content = await self.send(endpoint, path, None if body is None else msgspec.json.encode(body))
        if status != 200:
            raise error_of(endpoint.name, status, content)
        return content

    async def call_workers(self, endpoint: Endpoint, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call a method of rlx's worker extension; one record for each rank of the server's engine.

        Raises RequestRefused if the server was started without the extension. An error of a rank is in its record (`error`).
        """
        status, body = await self.send(endpoint, wire.RPC, msgspec.json.encode({"method": method, "args": list(arguments)}))
        if status == 404 or (status >= 500 and UNKNOWN_METHOD in body):
            raise RequestRefused(
                f"{endpoint.name} does not know `{method}` ({status}: {wire.text_of(body)}).\n  fix: start it with the options that "
                "`rlx train … dry_run=true` prints, among them VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls"
            )
        if status != 200:
            raise error_of(endpoint.name, status, body)
        return list(msgspec.json.decode(body)["results"])
