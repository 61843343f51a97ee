"""The environments of the public sets, which this project did not write: where they are, their small local data, and stock verifiers.

`RLX_PUBLIC_ENVIRONMENTS` names their folder; otherwise it is looked for beside the checkout. Where it is absent, their tests are skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import public_servers
import pytest
from policy_stand_in import SAMPLING, StandIn, policy_of, tiny_chat
from public_classic import local_words
from public_installed import installed

from rlx.config.schema import EnvConfig
from rlx.trace import Turn
from rlx.types import Rollout, Task

V1 = "v1-2026-08"


def folder(which: str = V1) -> Path:
    """The folder of one set. Without one the test is skipped, and fails if RLX_PUBLIC_ENVIRONMENTS names another folder."""
    named = os.environ.get("RLX_PUBLIC_ENVIRONMENTS")
    root = Path(__file__).resolve().parent.parent
    places = [Path(named)] if named else [above / "shared" / "environments" for above in (root.parent, root.parent.parent)]
    found = next((place / which for place in places if (place / which).is_dir()), None)
    if found is None:
        if named:
            pytest.fail(f"no public environments: RLX_PUBLIC_ENVIRONMENTS={named} has no folder {which}", pytrace=False)
        pytest.skip("no public environments: RLX_PUBLIC_ENVIRONMENTS is not set to their folder")
    return found


def on_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package of the v1 set, and make it importable in this process and its children. Other packages of its name go."""
    place = str(installed(folder() / name))
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", place)


ROWS = {
    "openai/gsm8k": [{"question": f"What is {n} + 2?", "answer": f"Adding.\n#### {n + 2}"} for n in range(4)],
    "PrimeIntellect/Reverse-Text-RL": [{"prompt": text} for text in ("abc", "hello", "rewards")],
    "kalomaze/alphabetic-arxiv-authors-it1": [{"names": ["AnnLee", "BobRay", "CarlDoe", "DanFox", "EveKim", "FayNg", "GusOrr"]}] * 2,
    "willcb/wiki-trivia-questions-v4": [{"question": "Who?", "answer": "Ada", "filename": "a"}],
}


def local_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small local rows in place of a hub's data sets."""
    import datasets

    def load_dataset(name: str, *_: Any, **__: Any) -> Any:
        return datasets.Dataset.from_list(ROWS[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    local_words(monkeypatch)


class Answers(StandIn):
    """A model: a function of the prompt's text. It keeps every turn that it sampled."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__(tiny_chat(), error=0.0)
        self.of_prompt = answer
        self.turns: list[Turn] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        one = StandIn(self.chat, lambda _: self.of_prompt(self.chat.tokenizer.decode(prompt_ids)), error=0.0)
        one.version = 5
        turn = await one.generate(prompt_ids, sampling, request_id, affinity)
        self.turns.append(turn)
        return turn


def one_of(*texts: str) -> Callable[[str], str]:
    """A model that says one of these, by the prompt."""
    return lambda prompt: texts[zlib.crc32(prompt.encode()) % len(texts)]


def calling(name: str, arguments: Mapping[str, Any], then: Callable[[str], str]) -> Callable[[str], str]:
    """A model that calls a tool once and says something about its result."""
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"  # as the tiny model writes it
    return lambda prompt: then(prompt) if "<|im_start|>tool" in prompt or "tool_response" in prompt else call


@dataclass
class Case:
    """How one v1 environment is played."""

    name: str
    model: Callable[[str], str]
    args: dict[str, Any] = field(default_factory=dict)
    agent: str = "agent"  # that trains
    turns: int = 1  # of the trained agent; 0: not said
    stock: int = 2  # so many rollouts of two are played by stock verifiers, too
    free: bool = True  # an episode ends well whatever the model says
    needs: tuple[str, ...] = ()  # modules that rlx does not install
    servers: Callable[..., AbstractContextManager[dict[str, Any]]] | None = None  # that it asks; they give the `args`

    @contextmanager
    def served(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
        """The case while its servers run, if it has any. `folder`: an empty one for their files."""
        if self.servers is None:
            yield self
            return
        with self.servers(folder, monkeypatch) as args:
            yield replace(self, args=args)


LOCAL = {"runtime": {"type": "subprocess"}}
PROBLEM = '{"problem": "What is 3 + 4?", "answer": 7}'


def cards(prompt: str) -> str:
    legal = [word for word in ("check", "bet", "fold", "call") if f"[{word}]" in prompt.rpartition("legal actions:")[2].partition("<|")[0]]
    return one_of("I see.", *(f"[{word}]" for word in legal))(prompt)


SOLUTIONS = itertools.cycle(("7", "7", "8", "8"))  # two episodes that run together get a right and a wrong one each


def proposes(prompt: str) -> str:
    return PROBLEM if "word problem" in prompt else next(SOLUTIONS)


KUHN = Case("kuhn_poker", cards, agent="player1", turns=1, free=False, stock=1)
CASES = [
    KUHN,
    Case("kuhn_poker", cards, agent="player0", turns=1, free=False, stock=1),
    Case("reverse_text", lambda prompt: "<reversed_text>cbx</reversed_text>"),
    Case("alphabet_sort", one_of("<alphabetical_sorted>\nAnnLee\n</alphabetical_sorted>"), turns=0),
    Case("gsm8k", one_of("I add.\n#### 2", "#### 3"), {"agent": LOCAL}, stock=1),
    Case("code_golf", one_of("```python\nprint(5050)\n```"), {"golfer": LOCAL, "attempts": 1}, agent="golfer"),
    Case(
        "glossary", calling("facts_lookup", {"name": "Ada Lovelace"}, lambda prompt: "<answer>first programmer</answer>"), turns=2, stock=1
    ),
    Case("scratchpad", calling("scratchpad_roundtrip", {"word": "alpha"}, lambda prompt: "alpha"), turns=2, stock=1),
    Case("interception", one_of("DETERMINISTIC_BLOCK"), {"taskset": {"task": {"judge": {"base_url": "http://127.0.0.1:9/v1"}}}}),
    Case("proposer_solver", proposes, {"n": 2}, agent="solver", free=False, stock=1),
    Case("proposer_solver", proposes, {"n": 2}, agent="proposer", free=False, stock=1),
    Case("wordle", one_of("I say [crane]", "[slate]"), agent="player", turns=0, needs=("nltk", "textarena")),
    Case(
        "nemo_gym_weather",
        calling("get_weather", {"city": "Paris"}, lambda prompt: "The weather in Paris is cold."),
        turns=2,
        stock=1,
        servers=public_servers.weather,
    ),
    # A random reply may be JSON, such as a number, which OpenEnv's server refuses as a guess.
    Case(
        "openenv_wordle",
        one_of("slate", "craze"),
        agent="player",
        turns=3,
        free=False,
        needs=("openenv",),
        servers=public_servers.word_game,
    ),
    Case(
        "wiki_search",
        calling("wiki_search_pages", {"query": "Ada"}, lambda prompt: "Ada"),
        turns=2,
        stock=1,
        needs=("chromadb",),
        servers=public_servers.wiki,
    ),
]


async def played(env: Any, answers: Answers, task: Task, members: Sequence[int]) -> list[Rollout]:
    """The rollouts of rlx."""
    env.policy = policy_of(answers, context_length=8000, sampling={**SAMPLING, "max_tokens": 400})
    try:
        return await env.play(task, members, 0)
    finally:
        await env.close()


class Replayed:
    """A model that says again what was sampled: the next of the turns that begin with the same prompt."""

    away = 0.0

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        place = next((n for n, turn in enumerate(self.turns) if turn.prompt_ids.tolist() == list(prompt_ids)), None)
        assert place is not None, f"nobody was asked {tiny_chat().tokenizer.decode(prompt_ids)}"
        return self.turns.pop(place)


async def stock(case: Case, row: Mapping[str, Any], answers: Any, task: Task, run: int = 0) -> Any:
    """The trace of the case's agent, in its `run`-th run, by stock verifiers.

    Its own harness in a process of its own, its own client, over HTTP, the same model behind it.
    """
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.utils.loaders import load_environment

    from rlx.envs.verifiers_v1 import block_of

    episode = policy_of(answers, context_length=8000, sampling={**SAMPLING, "max_tokens": 400}).episode(task, 0, 0)

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        known = {"temperature", "top_p", "max_tokens"}
        reply = await episode.respond(body["messages"], body.get("tools"), {key: value for key, value in body.items() if key in known})
        message = reply.message | ({"content": None} if reply.calls and not reply.content else {})
        finish = "length" if reply.truncated else "tool_calls" if reply.calls else "stop"
        total = reply.num_prompt_tokens + reply.num_tokens
        usage = {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": reply.num_tokens, "total_tokens": total}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        kind = {"id": reply.request_id, "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**kind, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    block, _ = block_of("envs.e", EnvConfig(id=case.name, args=case.args))
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY")
    env = load_environment(block)
    data = type(env.taskset).task_type().data_type().model_validate(row["task"])
    try:
        async with env.serving(), asyncio.timeout(600):
            (slot,) = env.slots(type(env.taskset).task_type()(data, env.config.taskset.task))
            played = await env.run_slot(slot, vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig()))
    finally:
        await runner.cleanup()
    assert played.ok, [error.message for one in [played, *played.traces] for error in one.errors]
    traces = [trace for trace in played.traces if trace.agent.name == case.agent]
    return sorted(traces, key=lambda trace: trace.timing.start)[run % len(traces)]


def check_as_stock(rollout: Rollout, trace: Any) -> None:
    """The rollout says, earns and measures what the trace of stock verifiers has."""
    messages = [*rollout.prompt, *rollout.completion]
    assert [(one.role, one.content or "") for one in trace.messages] == [(one["role"], one["content"]) for one in messages]
    assert {name: value.score for name, value in trace.rewards.items()} == rollout.rewards
    assert trace.reward == rollout.reward
    assert (trace.stop_condition, trace.is_truncated) == (rollout.stop, rollout.is_truncated)
    ours = {name for name in rollout.metrics if name.endswith("/reward")} | {"latency", "reward_error", "tasks_differ"}
    measured = {name: value for name, value in rollout.metrics.items() if name not in ours}
    assert {name: value for name, value in trace.metrics.items() if name != "latency"} == measured
