"""An OpenAI-compatible endpoint for tests: it reverses the last message, and fails on demand. `python api_stand_in.py PORT_FILE MODE`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "secret-key-of-the-test"


def completion(content: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "c1", "object": "chat.completion", "created": 0, "model": "m-2026", "choices": [choice], "usage": usage}


class Api:
    """`mode`: `flaky` answers every third request 429 with Retry-After and every fifth 500, each request only once; `down` fails; `slow`
    takes half a second.

    """

    def __init__(self, mode: str) -> None:
        self.mode, self.count, self.refused = mode, 0, 0
        self.known: set[tuple[object, str]] = set()  # seed and text of the requests that were refused

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.count += 1
        if request.headers["Authorization"] != f"Bearer {KEY}":
            text = f"Incorrect API key provided: {request.headers['Authorization'].removeprefix('Bearer ')}"
            return web.json_response({"error": {"message": text}}, status=401)
        what = asked.get("seed"), str(asked["messages"])
        flaky = self.mode == "flaky" and what not in self.known
        if flaky and self.count > 3 and self.count % 3 == 0:
            self.refused += 1
            self.known.add(what)
            return web.json_response({"error": {"message": "too many requests"}}, status=429, headers={"Retry-After": "1"})
        if flaky and self.count % 5 == 0:
            self.known.add(what)
        if (flaky and self.count % 5 == 0) or (self.mode == "down" and self.count > 1):
            return web.json_response({"error": {"message": "overloaded"}}, status=500, headers={"retry-after-ms": "20"})
        if self.mode == "slow":
            await asyncio.sleep(0.5)
        return web.json_response(completion(asked["messages"][-1]["content"][::-1]))


async def serve(file: Path, mode: str) -> None:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", Api(mode).answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    temporary = file.with_suffix(".new")
    temporary.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    temporary.rename(file)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
