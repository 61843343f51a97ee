"""The servers that three public v1 tasksets ask, small and local: NeMo Gym's weather, an OpenEnv word game, a wiki with its search model.

Each is a context that gives the environment's `args`. The servers behave as the originals do towards verifiers: the first speaks NeMo Gym's
HTTP and MCP, the second is OpenEnv's own server around a small game, the third is the taskset's own tool server with data from a hub.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import hub
from public_classic import judge


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an ASGI application that runs in a thread."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def weather(_: Path, __: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A resource server as NeMo Gym's `example_mcp_weather`: a tool over MCP. The reward is 1 if the last message is what it said."""
    from mcp.server.fastmcp import FastMCP
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    mcp = FastMCP("weather", stateless_http=True)

    @mcp.tool()
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return sentence_of(city)

    def sentence_of(city: str) -> str:
        return f"The weather in {city} is cold."

    async def seed(_: Request) -> JSONResponse:
        return JSONResponse({"mcp": {"url_path": "mcp", "headers": {"x-session": "1"}}})

    async def verify(request: Request) -> JSONResponse:
        asked = await request.json()
        output = asked["response"]["output"]
        called = any(item["type"] == "function_call" and item["name"] == "get_weather" for item in output)
        said = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        right = called and said[-1:] == [sentence_of(asked["verifier_metadata"]["expected_city"])]
        return JSONResponse(
            {"reward": float(right), "called": float(called)} | {key: asked[key] for key in ("responses_create_params", "response")}
        )

    mcp.custom_route("/seed_session", methods=["POST"])(seed)
    mcp.custom_route("/verify", methods=["POST"])(verify)
    with served(mcp.streamable_http_app()) as url:
        yield {"taskset": {"task": {"resources_url": url}}}


@contextmanager
def word_game(_: Path, __: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """OpenEnv's server around a game of three guesses: each guess is told how many of its letters are in place."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        message: str

    class Seen(Observation):
        text: str = ""

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.guesses = 0

        def reset(self, *_: Any, **__: Any) -> Seen:
            self.guesses = 0
            return Seen(text="Guess a word of five letters.")

        def step(self, action: Guess, *_: Any, **__: Any) -> Seen:
            self.guesses += 1
            right = sum(one == other for one, other in zip(action.message, "crane", strict=False))
            return Seen(text=f"{right} in place", reward=right / 5, done=right == 5 or self.guesses == 3)

        @property
        def state(self) -> State:
            return State(step_count=self.guesses)

    with served(create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=8)) as url:
        yield {"taskset": {"base_url": url}}


@contextmanager
def wiki(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A judge that says yes, a hub with two pages, and in the home folder a model of 256 vectors where chromadb keeps its own."""
    pages = folder / "hub" / "datasets" / "willcb" / "rare-wiki-pages"
    pages.mkdir(parents=True)
    rows = [
        {"id": "ada", "title": "Ada", "content": "# Life\nAda wrote notes.\n# Work\nAn engine."},
        {"id": "bob", "title": "Bob", "content": "# Life\nBob sailed."},
    ]
    (pages / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    search_model(folder / "home" / ".cache" / "chroma" / "onnx_models" / "all-MiniLM-L6-v2" / "onnx")
    with ExitStack() as stack:
        address, _ = stack.enter_context(hub(folder / "hub"))
        judging = stack.enter_context(judge("yes"))
        for name, value in {"HF_ENDPOINT": address, "HF_HOME": folder / "hf", "HOME": folder / "home"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # the tool server, a process of its own, fetches the pages
        yield {"taskset": {"task": {"judges": [{"id": "wiki-search", "base_url": judging.url}]}}}


def search_model(folder: Path) -> None:
    """Write an ONNX model that looks up a vector for each character, and its tokenizer, as files of chromadb's search model."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers

    def field(number: int, value: bytes | int) -> bytes:
        """One field of a protocol buffer."""
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    def varint(value: int) -> bytes:
        parts = bytearray()
        while value >= 128:
            parts.append(value % 128 + 128)
            value //= 128
        return bytes([*parts, value])

    def tensor(name: str, kind: int) -> bytes:
        sizes = b"".join(field(1, field(2, size)) for size in (b"batch", b"tokens"))
        return field(1, name.encode()) + field(2, field(1, field(1, kind) + field(2, sizes)))

    folder.mkdir(parents=True)
    table = np.random.default_rng(0).standard_normal((256, 16)).astype(np.float32)
    rows = b"".join(field(1, size) for size in table.shape) + field(2, 1) + field(8, b"table") + field(9, table.tobytes())
    node = field(1, b"table") + field(1, b"input_ids") + field(2, b"vectors") + field(4, b"Gather")
    inputs = b"".join(field(11, tensor(name, 7)) for name in ("input_ids", "attention_mask", "token_type_ids"))
    output = field(12, field(1, b"vectors") + field(2, field(1, field(1, 1))))
    graph = field(1, node) + field(2, b"g") + field(5, rows) + inputs + output
    (folder / "model.onnx").write_bytes(field(1, 8) + field(8, field(2, 13)) + field(7, graph))
    characters = {"[PAD]": 0, "[UNK]": 1} | {chr(code): code for code in itertools.chain(range(32, 127))}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("config.json", "special_tokens_map.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).touch()
