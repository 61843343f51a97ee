"""A teacher behind an endpoint: a stand-in that is overloaded, slow, dead or wrong; and a real vLLM server (slow)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from inference_server import CONTEXT, EXACT, Run, prompts
from traces import trace_of
from trainer_examples import make_samples, step_batch

from rlx.inference.endpoints import Endpoint
from rlx.models.tiny import build_tokenizer
from rlx.policy import teacher_client
from rlx.policy.teacher_client import LOWEST, TeacherClient, TeacherError, probe_texts
from rlx.rollout.teacher_logprobs import TeacherLogprobs
from rlx.trace import Turn
from rlx.types import Rollout, Task, TrainingSample

TOKENIZER = build_tokenizer(CONTEXT)
Answer = Callable[[int], Awaitable[web.Response | None]]
SEQUENCES = [np.array(ids, dtype=np.int32) for ids in ([5, 6, 7], [8, 9], [5, 6, 7, 8, 9, 10], [11, 12, 13])]


def expected(ids: np.ndarray) -> list[float]:
    """What the stand-in says of a sequence: minus a tenth of each token."""
    return [0.0, *(-token / 10 for token in ids[1:])]


class StandIn:
    """A server with vLLM's routes, whose log-probabilities are known. `first` answers instead, if it returns a response."""

    def __init__(self, first: Answer | None = None, *, shift: int = 0, models: tuple[str, ...] = ("big",), context: int = 1000) -> None:
        self.first, self.shift, self.models, self.context = first, shift, models, context
        self.asked: list[dict[str, Any]] = []
        self.open = self.most = self.version = 0

    async def label(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": f"{self.version}@run"})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body | {"key": request.headers.get("Authorization")})
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0.005)
            if self.first is not None and (said := await self.first(len(self.asked))) is not None:
                return said
            ids = [TOKENIZER.encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in body["prompt"]]
            ids = [[token + self.shift for token in one] if isinstance(body["prompt"][0], str) else one for one in ids]
            choices = [
                {"index": n, "prompt_logprobs": [None, *({str(t): {"logprob": -t / 10, "rank": 1}} for t in one[1:])]}
                for n, one in enumerate(ids)
            ]
            return web.json_response({"choices": choices[::-1]})
        finally:
            self.open -= 1

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name, "max_model_len": self.context} for name in self.models]})


@contextlib.asynccontextmanager
async def served(stand_in: StandIn) -> AsyncIterator[str]:
    app = web.Application()
    gets = [web.get("/v1/models", stand_in.list_models), web.get("/weight_info", stand_in.label)]
    app.add_routes([web.post("/v1/completions", stand_in.completions), *gets])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def status(code: int, text: str = "no", **headers: str) -> web.Response:
    return web.Response(status=code, text=text, headers=headers)


def talk(stand_in: StandIn, conversation: Callable[[TeacherClient], Awaitable[Any]], more: tuple[str, ...] = (), **keys: Any) -> Any:
    async def whole() -> Any:
        async with served(stand_in) as url, TeacherClient([*more, f"{url}/v1/"], **{"model": "big", "deadline": 60.0, **keys}) as teacher:
            return await conversation(teacher)

    return asyncio.run(whole())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "FIRST_WAIT", 0.01)


async def tried(teacher: TeacherClient) -> tuple[list[np.ndarray], int, list[str]]:
    """(what is scored, attempts that failed, why)."""
    return await teacher.score(SEQUENCES), teacher.take_retries(), teacher.trouble


def same(found: list[np.ndarray]) -> bool:
    return all(np.allclose(one, expected(ids)) for one, ids in zip(found, SEQUENCES, strict=True))


def test_every_sequence_gets_its_own_log_probabilities():
    server = StandIn()
    found, retries, _ = talk(server, tried, api_key="secret")
    assert same(found)
    assert (retries, [body["key"] for body in server.asked]) == (0, ["Bearer secret"])


def test_an_overloaded_or_failing_teacher_is_asked_again_and_a_dead_server_is_borne_while_another_lives():
    async def first(number: int) -> web.Response | None:
        return {1: status(429, "slow down"), 2: status(503), 3: status(500)}.get(number)

    found, retries, trouble = talk(StandIn(first), tried)
    assert same(found)
    assert retries == 3
    assert "(429): slow down" in trouble[0]
    found, _, trouble = talk(StandIn(), tried, more=("http://127.0.0.1:9",))
    assert same(found)
    assert "http://127.0.0.1:9 cannot be reached" in trouble[0]


@pytest.mark.parametrize(("answer", "text"), [
    (status(400, "maximum context length is 3"), r"the teacher refused a request: .*\(400\): maximum context length is 3"),
    (status(401, "who are you"), r"refused a request: .*\(401\)"),
    (web.json_response({"choices": [{"index": n} for n in range(4)]}), "missing required field `prompt_logprobs`"),
    (web.json_response({"choices": []}), "returned 0 choices for 4 prompts"),
    (web.Response(text="<html>"), "gave an answer that cannot be read"),
    (web.json_response({"choices": [{"index": n, "prompt_logprobs": [None]} for n in range(4)]}),
     "returned 1 log-probabilities for 3 tokens"),
    (web.json_response({"choices": [{"index": n, "prompt_logprobs": [None, *([{"99": {"logprob": -1}}] * (len(ids) - 1))]}
                                    for n, ids in enumerate(SEQUENCES)]}), "no log-probability of token 6 at place 1"),
])  # fmt: skip
def test_an_answer_that_is_none_is_named_at_once(answer: web.Response, text: str):
    async def first(_: int) -> web.Response:
        return answer

    server = StandIn(first)
    with pytest.raises(TeacherError, match=text):
        talk(server, lambda teacher: teacher.score(SEQUENCES))
    assert len(server.asked) == 1


def test_an_impossible_token_has_a_bounded_log_probability():
    ids = np.array([3, 100_000], dtype=np.int32)
    assert talk(StandIn(), lambda teacher: teacher.score([ids]))[0].tolist() == [0, LOWEST]


def test_the_probe_has_the_whole_vocabulary_in_short_texts():
    texts = probe_texts(TOKENIZER, 64)
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    assert max(map(len, ids)) <= 64
    roles = set(range(4, 8))  # tokens that only a template makes, and no text
    assert {token for one in ids for token in one} == set(range(len(TOKENIZER))) - roles


@pytest.mark.parametrize(("server", "keys", "text"), [
    (StandIn(shift=1), {}, "has another tokenizer than the policy"),
    (StandIn(models=("small", "large")), {"model": None}, r"serves small, large, and teacher\.model=null .*\n  fix: name the teacher"),
    (StandIn(models=("small",)), {"model": "large"}, r"serves small, and teacher\.model=large is not"),
    (StandIn(context=64), {}, r"context is too short: .* seq_len=64 .* takes 64\.\n  fix: serve it with --max-model-len 65"),
])  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused_before_any_work(server: StandIn, keys: dict[str, Any], text: str):
    with pytest.raises(TeacherError, match=text):
        talk(server, lambda teacher: teacher.check(TOKENIZER, 64), **keys)


def test_a_teacher_that_fits_is_found_and_one_that_is_not_there_is_named():
    async def name(teacher: TeacherClient) -> str | None:
        await teacher.check(TOKENIZER, 64)
        return teacher.model

    assert talk(StandIn(models=("only",)), name, model=None) == "only"
    with pytest.raises(TeacherError, match=r"in 0\.4 s \(teacher\.deadline\): http://127\.0\.0\.1:9 cannot be reached"):
        talk(StandIn(), name, more=("http://127.0.0.1:9",), deadline=0.4)


# samples


def at_temperature_1(samples: list[TrainingSample]) -> list[TrainingSample]:
    return [replace(sample, temperature=np.ones_like(sample.temperature)) for sample in samples]


def turn_of(sample: TrainingSample, shown: list[int] | None = None) -> Turn:
    """The turn that gives this sample."""
    start = int(np.flatnonzero(sample.loss_mask)[0])
    return Turn(
        prompt_ids=sample.token_ids[:start],
        completion_ids=sample.token_ids[start:],
        logprobs=sample.inference_logprobs[start:],
        versions=sample.versions[start:],
        temperature=1.0,
        finish_reason="stop",
        teacher_prompt_ids=None if shown is None else np.array(shown, dtype=np.int32),
    )


def groups_of(samples: list[TrainingSample], shown: list[int] | None = None) -> list[list[Rollout]]:
    """The groups that give these samples."""
    turns: dict[tuple[int, int], list[Turn]] = {}
    for sample in samples:
        turns.setdefault((sample.group, sample.member), []).append(turn_of(sample, shown))
    groups: dict[int, list[Rollout]] = {}
    for (group, member), own in turns.items():
        task = Task(env=next(sample.env for sample in samples if sample.group == group), example_id=0, index=group, row={})
        keys: dict[str, Any] = {"prompt": "", "completion": "", "reward": 0.0, "rewards": {}, "metrics": {}, "status": "ok", "stop": ""}
        groups.setdefault(group, []).append(Rollout(task=task, member=member, trace=trace_of(*own), **keys))
    return list(groups.values())


async def scored(teachers: dict[str, TeacherClient], samples: list[TrainingSample], unscored: str = "fail") -> Any:
    return await TeacherLogprobs(teachers, unscored).score(step_batch(3, [samples]), groups_of(samples))


def test_the_samples_of_an_environment_with_a_teacher_get_scores_where_the_policy_sampled():
    samples = at_temperature_1(make_samples(groups=2))
    mine = [replace(sample, env="taught") if sample.group else sample for sample in samples]
    batch, values = talk(StandIn(), lambda teacher: scored({"taught": teacher}, mine))
    for before, after in zip(mine, batch.mini_batches[0], strict=True):
        if before.env == "taught":
            wanted = np.where(before.loss_mask, expected(before.token_ids), np.nan)
            assert np.allclose(after.teacher_logprobs, wanted, equal_nan=True)
            assert after.teacher_logprobs.dtype == np.float32
        else:
            assert after is before
    assert values["teacher/unscored"] == values["teacher/retries"] == 0


def test_a_sample_without_scores_is_left_out_and_counted_or_ends_the_run():
    async def first(number: int) -> web.Response | None:
        return status(503, "broken") if number > 1 else None

    samples, keys = at_temperature_1(make_samples(groups=2)), {"batch_size": 1, "max_concurrent": 1, "deadline": 0.5}

    def score(unscored: str) -> Any:
        return talk(StandIn(first), lambda teacher: scored({"test": teacher}, samples, unscored), **keys)

    batch, values = score("drop")
    assert len(batch.mini_batches[0]) == 1
    assert values["teacher/unscored"] == len(samples) - 1
    left = int(batch.mini_batches[0][0].loss_mask.sum())
    assert values["teacher/unscored_tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples) - left
    with pytest.raises(TeacherError, match=r"not score \d+ of \d+ samples of step 3 in 0\.5 s .*\(503\): broken\.\n  fix: teacher"):
        score("fail")


def test_tokens_that_an_environment_sampled_at_another_temperature_are_refused():
    def score(samples: list[TrainingSample]) -> Any:
        return talk(StandIn(), lambda teacher: scored({"test": teacher}, samples))

    samples = make_samples(groups=2)
    with pytest.raises(TeacherError, match=r"environment test sampled \d+ tokens of rollout 1/0 at temperature 0\.7.*\n.*ref_kl_weights"):
        score(samples)
    without = [replace(s, ref_kl_weights=np.where(s.temperature == 1, 1, 0).astype(np.float32)) for s in samples]
    assert len(score(without)[0].mini_batches[0]) == len(samples)


def test_groups_are_scored_as_they_finish_and_once() -> None:
    samples = at_temperature_1(make_samples(groups=6, members=2))
    groups = groups_of(samples)
    server = StandIn()

    async def conversation(teacher: TeacherClient) -> Any:
        teaching = TeacherLogprobs({"test": teacher})
        for group in groups[:-1]:  # the last one is of a checkpoint
            teaching.begin(group)
            teaching.begin(group)  # a second time changes nothing
        while not server.asked:
            await asyncio.sleep(0.01)
        return await teaching.score(step_batch(0, [samples]), groups), teaching

    (batch, values), teaching = talk(server, conversation, max_concurrent=2)
    assert server.most == 2
    assert sorted(len(body["prompt"]) for body in server.asked) == [3] * 6
    assert all(sample.teacher_logprobs is not None for sample in batch.mini_batches[0])
    assert values["teacher/unscored"] == 0
    assert not teaching._requests, "what a batch has taken is forgotten"


def test_the_teacher_of_self_distillation_reads_the_demonstration_and_its_numbers_belong_to_the_policys_tokens():
    samples = [sample for sample in at_temperature_1(make_samples(groups=2, members=1)) if sample.member == 0]
    server, shown = StandIn(), [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5]

    async def conversation(teacher: TeacherClient) -> Any:
        teaching = TeacherLogprobs({"test": teacher})
        done = await teaching.score(step_batch(0, [samples]), groups_of(samples, shown))
        teacher.context = 12
        with pytest.raises(TeacherError, match=r"has \d+ tokens with what the teacher reads; .* take 12\.\n.*inference\.max_model_len"):
            teaching.begin(groups_of(samples, shown)[0])
        return done

    batch, _ = talk(server, conversation)
    for sample, taught in zip(samples, batch.mini_batches[0], strict=True):
        start = int(np.flatnonzero(sample.loss_mask)[0])
        assert [*shown, *sample.token_ids[start:].tolist()] in [ids for body in server.asked for ids in body["prompt"]]
        assert np.allclose(taught.teacher_logprobs, np.where(sample.loss_mask, -sample.token_ids / 10, np.nan), equal_nan=True)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_server_of_the_run_that_restarted_does_not_score_before_it_has_the_runs_version(adapters: bool):
    async def first(_: int) -> web.Response | None:
        return status(404, "The model `3@run` does not exist.") if server.version < 3 and adapters else None

    server, names = StandIn(first, models=("policy", "2@run")), ["3@run" if adapters else None]

    async def whole() -> Any:
        async with served(server) as url:
            server.version = 2
            own = [Endpoint(url, "key")]
            async with TeacherClient([], own=lambda: own, version=lambda: 3, adapter=lambda: names[-1]) as teacher:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.4):
                        raise AssertionError(await teacher.score(SEQUENCES))
                late = asyncio.ensure_future(teacher.score(SEQUENCES)) if adapters else None
                await asyncio.sleep(0.1)  # its first attempt is refused; the next one has the adapter's new name
                server.version, server.models = 3, ("policy", "2@run", "3@run", "4@run")
                names.append("4@run" if adapters else None)
                await teacher.check(TOKENIZER, 100)
                return teacher.trouble, await (late or teacher.score(SEQUENCES))

    trouble, found = asyncio.run(whole())
    assert ("(404): The model `3@run`" if adapters else "has version 2@run, the run has 3") in trouble[0]
    assert same(found)
    assert server.asked[-1]["model"] == (names[-1] or "policy")


# a real server


@pytest.mark.long
@pytest.mark.slow
def test_vllm_scores_as_hugging_face_does_and_its_tokenizer_is_the_policys(tmp_path: Path):
    run = Run(tmp_path, tied=True)
    run.start()
    try:
        (endpoint,) = run.ready()

        async def whole() -> Any:
            async with TeacherClient([endpoint.url], api_key=endpoint.api_key, batch_size=3) as teacher:
                await teacher.check(TOKENIZER, CONTEXT - 1)
                with pytest.raises(TeacherError, match="context is too short"):
                    await teacher.check(TOKENIZER, CONTEXT)
                return await teacher.score([np.array(ids, dtype=np.int32) for ids in sequences])

        sequences = [ids[: 5 + 4 * n] for n, ids in enumerate(prompts(8))]
        scores = asyncio.run(whole())
        for ids, found in zip(sequences, scores, strict=True):
            with torch.no_grad():
                logits = run.models[0](torch.tensor([ids])).logits[0, :-1].double()
            wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
            assert np.abs(found[1:] - wanted).max() < EXACT
    finally:
        run.stop()
