"""Sampling parameters on real vLLM, and vLLM's own routes on a run's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from inference_server import CONTEXT, EXACT, Run, prompts, same, sample, sample_all
from run_servers import Servers

from rlx.models.tiny import build_tokenizer
from rlx.policy.base import PolicyError, PromptTooLong, Reply
from rlx.policy.openai import OpenAIPolicy
from rlx.trace import Turn
from rlx.types import Task

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def run(engines: Callable[[str], Run]) -> Run:
    return engines("tied")


def test_stop_tokens_and_greedy_decoding(run: Run) -> None:
    async def scene(client: Servers) -> tuple[Turn, Turn, Turn]:
        ids = prompts(1)[0]
        greedy, again = [await sample(client, ids, seed, temperature=0.0) for seed in (0, 1)]
        return greedy, again, await sample(client, ids, 0, temperature=0.0, stop_token_ids=[int(greedy.completion_ids[5])])

    greedy, again, stopped = run.talk(scene)
    assert same(greedy, again)
    assert run.worst([greedy]) < EXACT
    first = greedy.completion_ids.tolist().index(greedy.completion_ids[5])
    assert stopped.completion_ids.tolist() == greedy.completion_ids[: first + 1].tolist()
    assert stopped.finish_reason == "stop"


def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(run: Run) -> None:
    decode = build_tokenizer(CONTEXT).decode

    async def scene(client: Servers) -> tuple[list[Turn], list[Turn], list[str]]:
        whole = await sample_all(client, prompts(8), max_tokens=200)
        texts = [decode(turn.completion_ids, skip_special_tokens=True) for turn in whole]
        wanted = [text[len(text) // 2 :][:3] or "zzz" for text in texts]
        stops = [["not in it", each] for each in wanted]
        cut = await asyncio.gather(*[sample(client, ids, seed, max_tokens=200, stop=stops[seed]) for seed, ids in enumerate(prompts(8))])
        async with asyncio.timeout(60):
            while (await client.fleet.stats())["perf/running"]:  # the engine has ended them, too
                await asyncio.sleep(0.05)
        return whole, cut, wanted

    whole, cut, wanted = run.talk(scene)
    assert any(len(short.completion_ids) < len(long.completion_ids) for short, long in zip(cut, whole, strict=True))
    for short, long, stop in zip(cut, whole, wanted, strict=True):
        length = len(short.completion_ids)
        assert short.completion_ids.tolist() == long.completion_ids[:length].tolist(), "the tokens are those that were sampled"
        assert short.logprobs.tobytes() == long.logprobs[:length].tobytes()
        assert short.finish_reason == "stop"
        if stop != "zzz":
            assert stop in decode(short.completion_ids, skip_special_tokens=True)
            assert stop not in decode(short.completion_ids[:-1], skip_special_tokens=True)


def test_penalties_and_biases_reach_the_engine_and_the_turn_has_its_temperature(run: Run) -> None:
    async def scene(client: Servers) -> list[Turn]:
        ids, asked = prompts(1)[0], [{}, {"logit_bias": {20: 100.0}}, {"repetition_penalty": 5.0}, {"presence_penalty": 2.0}]
        asked += [{"frequency_penalty": 2.0}, {"temperature": 0.001}, {"temperature": 0.0}]
        return await asyncio.gather(*[sample(client, ids, 0, **one) for one in asked])

    plain, biased, repetition, presence, frequency, cold, greedy = run.talk(scene)
    assert set(biased.completion_ids.tolist()) == {20}
    assert not any(same(plain, other) for other in (repetition, presence, frequency))
    assert [turn.temperature for turn in (plain, cold, greedy)] == [1.0, 0.01, 1.0], "vLLM raises 0.001, and scores greedy tokens at 1"
    assert run.worst([cold], 0.01) < 100 * EXACT


def test_a_server_is_an_openai_endpoint_too(run: Run) -> None:
    (endpoint,) = run.ready()
    task = Task(env="e", example_id=0, index=0, row={})

    async def scene() -> tuple[Reply, Reply, Reply]:
        policy = OpenAIPolicy(f"{endpoint.url}/v1", endpoint.api_key, "policy", sampling={"max_tokens": 5, "top_k": 50, "min_tokens": 5})
        try:
            reply = await policy.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}])
            again = await policy.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}])
            short = await policy.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}], None, {"max_tokens": 1, "min_tokens": 1})
            with pytest.raises(PromptTooLong, match="context length"):
                await policy.episode(task, 0, 0).respond([{"role": "user", "content": "a" * 2 * CONTEXT}])
            await policy.check(tools=False)
            with pytest.raises(PolicyError, match=r"auto.*tool"):
                await policy.check(tools=True)
            wrong = OpenAIPolicy(f"{endpoint.url}/v1", "guess", "policy", max_retries=0)
            with pytest.raises(PolicyError, match=r"\(401\)"):
                await wrong.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}])
            await wrong.close()
            return reply, again, short
        finally:
            await policy.close()

    reply, again, short = asyncio.run(scene())
    assert short.num_tokens == 1
    assert (reply.turn, reply.num_tokens, reply.truncated) == (None, 5, True)
    assert reply.num_prompt_tokens > 3
    assert reply.content == again.content, "the same seed"
