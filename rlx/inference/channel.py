"""The client's end of its one connection to a server. The connection carries all requests of the client.

Requests made in one turn of the event loop leave in one message. When the connection ends, every open request fails.
There are no retries here (`rlx.inference.sampler`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import aiohttp
import msgspec

from rlx.inference.protocol import Answer, Asked, GenerateRequest, RequestRefused

AT_ONCE = 8  # answers handed out in one turn of the event loop

_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(list[Answer])


class Channel:
    """An open connection. `connect` makes it. It belongs to one event loop."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._requests: list[tuple[int, GenerateRequest]] = []
        self._given_up: list[int] = []
        self._ready = asyncio.Event()  # set when there is something to send
        self._ended: str | None = None
        self._tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive())]

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], run: str = "") -> Channel:
        """`run`: see `protocol.Claim`.

        Raises aiohttp's errors: ClientConnectionError, or WSServerHandshakeError with the status of a refusal.
        """
        return cls(await session.ws_connect(url, headers=headers, params={"run": run} if run else None, compress=0, max_msg_size=0))

    @property
    def ended(self) -> bool:
        return self._ended is not None

    async def ask(self, request: GenerateRequest) -> Answer:
        """Send the request and return its answer. Cancelling the call aborts the request.

        Raises ConnectionError if the connection ends, RequestRefused if the request cannot be sent.
        """
        if self._ended is not None:
            raise ConnectionError(self._ended)
        try:
            _encode(request.sampling)
        except (TypeError, ValueError, OverflowError) as error:  # alone, so that it does not end the other requests
            raise RequestRefused(f"the sampling parameters {request.sampling} cannot be sent: {error}") from error
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._requests.append((number, request))
        self._ready.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._open.pop(number, None) is not None:
                self._given_up.append(number)
                self._ready.set()
            raise

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._end("the connection was closed")
        await self._socket.close()

    async def _send(self) -> None:
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                message = Asked(self._requests, self._given_up)
                self._requests, self._given_up = [], []
                await self._socket.send_bytes(_encode(message))
        except Exception as error:
            self._end(str(error) or type(error).__name__)

    async def _receive(self) -> None:
        cause, count = "the server closed the connection", 0
        try:
            async for message in self._socket:
                for answer in _answers.decode(message.data):
                    count += 1  # over all messages: the next one may be here already
                    if count % AT_ONCE == 0:
                        await asyncio.sleep(0)  # let the rollouts go on, and everything else of the event loop
                    future = self._open.pop(answer.number, None)
                    if future is not None and not future.done():
                        future.set_result(answer)
        except Exception as error:
            cause = str(error) or type(error).__name__
        self._end(cause)

    def _end(self, cause: str) -> None:
        if self._ended is None:
            self._ended = cause
        for future in self._open.values():
            if not future.done():
                future.set_exception(ConnectionError(cause))
        self._open.clear()
