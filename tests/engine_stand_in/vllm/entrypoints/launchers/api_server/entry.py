"""A stand-in for vLLM's server where a test is about something else: it starts in a second and has the routes that rlx uses.

With this folder in PYTHONPATH, `rlx.roles.inference` starts it by the same command line. It completes a prompt with its last user text
reversed, or, drawn from the request's seed, as it is; every token has the same log-probability.
"""

from __future__ import annotations

import os
import random
import sys
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from rlx.process import die_with_parent
from rlx.weights.files import identity

NUMBERS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "request_success_total",
    "generation_tokens_total",
)


class Engine:
    def __init__(self, model: str, context: int) -> None:
        self.tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.label, self.model, self.context, self.loaded, self.start = "default", model, context, None, uuid.uuid4().hex
        self.tokens = 0

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body["sampling_params"]
        rng = random.Random(asked.get("seed"))
        prompt = self.tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        user = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        text = user if rng.random() < 0.5 else user[::-1]
        ids = [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.end]
        finish = "stop" if len(ids) <= asked["max_tokens"] else "length"
        ids = ids[: asked["max_tokens"]]
        ids += [0] * (asked["min_tokens"] - len(ids))
        self.tokens += len(ids)
        spans = [{"version": self.label, "start": 0, "end": len(ids)}]
        logprobs = {"content": [{"token_id": token, "logprob": -1.5} for token in ids]}
        return {"choices": [{"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "weight_versions": spans}]}

    def rlx_state(self) -> dict[str, Any]:
        device = {"device": "", "peak_memory": 1 << 20, "memory": 0, "context": self.context}
        return device | {"start": self.start, "label": self.loaded, "model": self.model, "identity": identity(Path(self.model))}

    def rlx_check(self, folder: str, expected: str) -> dict[str, Any]:
        return {"ready": True}

    def rlx_load(self, folder: str, label: str) -> dict[str, Any]:
        self.model, self.loaded = (folder, None) if label.startswith("0@") else (self.model, label)
        return {"seconds": 0.0}

    def rlx_compare(self, folder: str) -> dict[str, Any]:
        return {"equal": 1, "different": 0, "served": 1, "names": [], "seconds": 0.0}

    async def receive(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {os.environ['RLX_SECRET']}":
            return web.Response(status=401)
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/inference/v1/generate":
                return web.json_response(self.complete(body))
            case "/collective_rpc":
                return web.json_response({"results": [{"rank": 0, **getattr(self, body["method"])(*body.get("args", []))}]})
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/v1/models":
                return web.json_response({"data": [{"id": "policy", "root": self.model, "max_model_len": self.context}]})
            case "/metrics":
                return web.Response(text="".join(f'vllm:{name}{{engine="0"}} {self.tokens}.0\n' for name in NUMBERS[-1:]))
        return web.json_response({})


if __name__ == "__main__":
    die_with_parent()
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    engine = Engine(given["--model"], int(given["--max-model-len"]))
    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/{path:.*}", engine.receive)
    web.run_app(application, host=given["--host"], port=int(given["--port"]), print=None)
