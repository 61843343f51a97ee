"""The public set of classic environments, which this project did not write: small local data, a scripted model, stock verifiers beside it.

`RLX_PUBLIC_ENVIRONMENTS` names the folder of the sets; otherwise it is looked for beside the checkout. Without it, tests are skipped.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import verifiers as vf
from policy_stand_in import SAMPLING, policy_of, tiny_chat
from public_installed import installed
from traces import turns_of
from verifiers.clients.client import Client
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from rlx.config.schema import EnvConfig
from rlx.envs.verifiers_v0 import VerifiersEnvironment, load_environment, without_old_task
from rlx.rollout.samples import samples_of
from rlx.trace import Turn
from rlx.types import Group, Rollout, Task

CONTEXT = 20_000  # the tiny tokenizer spells prompts in characters
OURS = ("requests_beside", "reward_error")  # metrics that rlx adds


def folder() -> Path:
    """The folder of the classic set. Skips the test if there is none."""
    root = Path(__file__).resolve().parent.parent
    named = os.environ.get("RLX_PUBLIC_ENVIRONMENTS")
    places = [Path(named)] if named else [above / "shared" / "environments" for above in (root.parent, root.parent.parent)]
    for place in places:
        if (place / "classic-2026-01").is_dir():
            return place / "classic-2026-01"
    pytest.skip("no public environments: RLX_PUBLIC_ENVIRONMENTS is not set to their folder")


PARAGRAPH = ". ".join(f"This is sentence number {number} of a text that nobody has to remember for long" for number in range(9))
ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [{"question": f"What is {n} + 2?", "answer": f"Adding.\n#### {n + 2}"} for n in range(1100)],
    "chiayewken/competition_math": [
        {"problem": f"Find $x + 1$ for $x = {n}$.", "solution": f"It is $\\boxed{{{n + 1}}}$.", "level": "Level 1", "type": "Algebra"}
        for n in range(1100)
    ],
    "PrimeIntellect/Hendrycks-Math": [{"question": "What is 2 + 2?", "answer": "4"}],
    "PrimeIntellect/Reverse-Text-RL": [{"prompt": text} for text in ("abc", "hello", "rewards")],
    "kalomaze/alphabetic-arxiv-authors-it1": [
        {"names": [f"{first}{last}" for first in ("Ann", "Bob", "Cy", "Di") for last in ("Lee", "Ray", "Fox", "Ng", "Orr")]}
    ]
    * 4,
    "agentlans/wikipedia-paragraphs": [{"text": PARAGRAPH}] * 4,
    "google/civil_comments": [{"text": "you are kind", "toxicity": 0.0}, {"text": "you fool", "toxicity": 0.9}],
    "willcb/wiki-trivia-questions-v4": [{"question": "Who wrote notes on an engine?", "answer": "Ada", "filename": "ada"}],
    "willcb/rare-wiki-pages": [{"id": "ada", "title": "Ada", "content": "# Life\nAda wrote notes.\n# Work\nAn engine."}],
}


WORDS = ["crane", "slate", "house", "apple", "water", "light"]


def local_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small local rows in place of a hub's data sets."""
    import datasets

    def load_dataset(name: str, *_: Any, split: str | None = None, **__: Any) -> Any:
        rows = datasets.Dataset.from_list(ROWS[name])
        return rows if split is not None else {"train": rows, "test": rows}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    local_words(monkeypatch)


def local_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few words in place of nltk's lists, for the word games."""
    if importlib.util.find_spec("nltk") is None:
        return
    nltk = importlib.import_module("nltk")
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    monkeypatch.setattr(nltk, "pos_tag", lambda words: [(word, "NN") for word in words])
    monkeypatch.setattr(nltk.corpus, "words", SimpleNamespace(words=lambda *_: WORDS))


@dataclass(frozen=True, slots=True)
class Said:
    """One scripted answer."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()  # (tool, arguments)
    truncated: bool = False  # cut by a length limit

    @property
    def written(self) -> str:
        """As the tiny model writes it."""
        calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in self.calls]
        return self.text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


Script = Sequence[Said]  # the answer to each request of a rollout; the last one repeats


def nth(script: Script, number: int) -> Said:
    return script[min(number, len(script) - 1)]


class Scripted:
    """Samples the script's answers. Keeps the turns, the members and the parameters of all requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.turns: list[Turn] = []
        self.members: list[int] = []
        self.sampling: list[dict[str, Any]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        member, _, number = map(int, request_id.split("-")[-3:])
        chat = tiny_chat()
        ids = [*chat.tokenizer.encode(nth(self.script, number).written), chat.stop_token_ids[0]]
        rng = random.Random(sampling["seed"])
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            completion_ids=np.asarray(ids, np.int32),
            logprobs=np.array([-rng.random() for _ in ids], np.float32),
            versions=np.full(len(ids), 3 + number, np.int32),
            temperature=sampling["temperature"],
            finish_reason="stop",
        )
        self.turns.append(turn)
        self.members.append(member)
        self.sampling.append(sampling)
        return turn


class StockClient(Client):
    """verifiers' side of the same script: messages in, messages out."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.script, self.number = script, 0

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict]:
        return messages, {}

    async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Said:
        said = nth(self.script, self.number)
        self.number += 1
        return said

    async def raise_from_native_response(self, response: Any) -> None:
        pass

    async def from_native_response(self, response: Said) -> Response:
        calls = [ToolCall(id=f"stock_{i}", name=name, arguments=json.dumps(how)) for i, (name, how) in enumerate(response.calls)]
        message = ResponseMessage(
            content=response.text,
            tool_calls=calls or None,
            finish_reason="length" if response.truncated else "tool_calls" if calls else "stop",
            is_truncated=response.truncated,
        )
        usage = Usage(prompt_tokens=1, reasoning_tokens=0, completion_tokens=1, total_tokens=2)
        return Response(id=f"r{self.number}", created=0, model="m", usage=usage, message=message)

    async def close(self) -> None:
        pass


@dataclass
class Endpoint:
    """An OpenAI-compatible stand-in for judges and embeddings. Every judgement is `verdict`."""

    verdict: str = "yes"
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


@contextmanager
def judge(verdict: str) -> Iterator[Endpoint]:
    endpoint = Endpoint(verdict)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            endpoint.asked.append(asked)
            if self.path.endswith("/embeddings"):
                texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
                rows = [{"object": "embedding", "index": i, "embedding": [1.0, 0.5, float(i)]} for i in range(len(texts))]
                answer: dict[str, Any] = {"object": "list", "data": rows, "model": "e", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
            else:
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": endpoint.verdict}}
                answer = {"id": "j", "object": "chat.completion", "created": 0, "model": "j", "choices": [choice]}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()


def on_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package of the set, and make it importable."""
    fresh(name)
    monkeypatch.syspath_prepend(str(installed(folder() / name)))
    importlib.invalidate_caches()


def fresh(name: str) -> None:
    """Forget the package, so that the next import runs it again: its random numbers then begin anew."""
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def ours(
    name: str, arguments: Mapping[str, Any], script: Script, members: int = 1, row: int = 0
) -> tuple[VerifiersEnvironment, list[Rollout], Scripted]:
    """One example, the `row`-th, played by rlx."""
    random.seed(0)
    env = load_environment(name, EnvConfig(id=name, args=dict(arguments)), SAMPLING, 60.0)
    generator = Scripted(script)
    env.policy = policy_of(generator, context_length=CONTEXT)
    example = env.rows[row]
    task = Task(env=name, example_id=example["example_id"], index=0, row=example)

    async def main() -> list[Rollout]:
        rollouts = await env.play(task, range(members), 0)
        await env.close()
        return rollouts

    return env, asyncio.run(main()), generator


def stock(name: str, arguments: Mapping[str, Any], script: Script, row: int = 0) -> Any:
    """The same example, played by verifiers alone. An old task name is taken from the row, because verifiers refuses such rows."""
    env, example = stock_example(name, arguments, row)

    async def main() -> Any:
        output = await env.run_rollout(example, StockClient(script), "m", {}, state_columns=["trajectory"])
        await env._teardown()
        return output

    return asyncio.run(main())


def stock_group(name: str, arguments: Mapping[str, Any], scripts: Sequence[Script], row: int = 0) -> Any:
    """The same group of one turn each, played by verifiers alone."""
    env, example = stock_example(name, arguments, row)

    async def main() -> Any:
        client = StockClient([script[0] for script in scripts])
        outputs = await env.run_group([example] * len(scripts), client, "m", {}, state_columns=["trajectory"])
        await env._teardown()
        return outputs

    return asyncio.run(main())


def stock_example(name: str, arguments: Mapping[str, Any], row: int) -> tuple[vf.Environment, Any]:
    fresh(name)
    random.seed(0)
    env = vf.load_environment(name, **arguments)
    return env, without_old_task(env.get_dataset()[row])


def check_tokens(rollout: Rollout, sampled: Sequence[Turn]) -> None:
    """Every sampled token is trained once, with its context, log-probability, version, temperature and advantage."""
    group = Group(id=7, task=rollout.task, rollouts=(rollout,), advantages=np.array([0.5], np.float32))
    trained = []
    for sample in samples_of(group, strategy="interleaved"):
        for place in np.flatnonzero(sample.loss_mask):
            values = (sample.inference_logprobs, sample.versions, sample.temperature, sample.advantages)
            trained.append((tuple(sample.token_ids[: place + 1].tolist()), *(float(value[place]) for value in values)))
    expected = []
    for turn in sampled:
        known = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        for number, (logprob, version) in enumerate(zip(turn.logprobs, turn.versions, strict=True), len(turn.prompt_ids) + 1):
            expected.append((tuple(known[:number]), float(logprob), float(version), float(np.float32(turn.temperature)), 0.5))
    assert sorted(trained) == sorted(expected)


def check_as_stock(rollout: Rollout, expected: Any) -> None:
    """The rollout says, earns and measures what verifiers' output has."""
    assert rollout.status == "ok", rollout.error
    assert plain(rollout.completion) == plain(expected["completion"])
    assert plain(rollout.prompt) == plain(expected["prompt"])
    assert rollout.reward == pytest.approx(expected["reward"])
    got = rollout.rewards | {key: value for key, value in rollout.metrics.items() if key not in OURS}
    assert got == pytest.approx(expected["metrics"])
    assert (rollout.stop, rollout.is_truncated) == (expected["stop_condition"], expected["is_truncated"])
    assert len(turns_of(rollout)) == len(expected["trajectory"])


def plain(messages: Any) -> list[dict[str, Any]]:
    """Messages by what they say: no ids of calls, no keys without a value."""
    found = []
    for message in messages:
        entry = message if isinstance(message, dict) else message.model_dump()
        calls = [
            json.loads(call) if isinstance(call, str) else call if isinstance(call, dict) else call.model_dump()
            for call in entry.get("tool_calls") or []
        ]
        functions = [call.get("function", call) for call in calls]
        said = [(one["name"], json.loads(one["arguments"])) for one in functions]
        found.append({"role": entry["role"], "content": entry["content"] or "", "calls": said})
    return found
