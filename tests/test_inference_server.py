"""One inference server on real vLLM on CPU: sampling and weight updates. `test_inference_lifetime.py` tests starts and ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import ANY

import aiohttp
import numpy as np
import pytest
from inference_server import CONTEXT, EXACT, Run, prompts, running, same, sample, seal, under_load
from run_servers import Servers
from safetensors.torch import load_file, save_file

from rlx.inference.endpoints import endpoint_file
from rlx.inference.protocol import ContextTooLong, RequestRefused, UpdateRefused
from rlx.inference.telling import Manner
from rlx.models.tiny import build_tokenizer
from rlx.policy.base import PolicyError, PromptTooLong, Reply
from rlx.policy.endpoint import Capabilities, check
from rlx.policy.openai import OpenAIPolicy
from rlx.types import Task, Turn

pytestmark = pytest.mark.slow
T = TypeVar("T")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("run"), tied=True)
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", temporary)  # a short path: vLLM's sockets are there, too
        run.start()
        run.ready()
        yield run
        run.stop()
        left = [file.name for file in Path(temporary).glob("vllm_dist_*")]
        assert left == [], "vLLM leaves such a file at every start, unless it is given another place"


def talk(run: Run, conversation: Callable[[Servers], Awaitable[T]]) -> T:
    """Run a scene with the server. It has version 0 before and after."""

    async def whole() -> T:
        async with Servers(run.ready(), request_timeout=120) as client:
            await client.fleet.wait_ready(300)
            return await conversation(client)

    return asyncio.run(whole())


def test_log_probabilities_are_those_of_hugging_face_at_the_sampling_temperature(run: Run) -> None:
    async def conversation(client: Servers) -> list[Turn]:
        return await asyncio.gather(*[sample(client, ids, seed, temperature=0.7) for seed, ids in enumerate(prompts(32))])

    turns = talk(run, conversation)
    assert run.worst(turns, 0.7) < EXACT
    assert run.worst(turns, 1.0) > 0.1
    assert {version for turn in turns for version in turn.versions.tolist()} == {0}
    assert len({turn.completion_ids.tobytes() for turn in turns}) > 25
    assert {turn.finish_reason for turn in turns} == {"stop", "length"}


def test_a_seed_gives_the_same_bits_alone_and_in_a_batch(run: Run) -> None:
    ids = prompts(16, seed=1)

    async def conversation(client: Servers) -> tuple[list[Turn], list[Turn]]:
        together = await asyncio.gather(*[sample(client, ids[seed % 16], seed) for seed in range(48)])
        alone = [await sample(client, ids[seed % 16], seed) for seed in range(6)]
        return together, alone

    together, alone = talk(run, conversation)
    assert all(same(one, other) for one, other in zip(together, alone, strict=False))
    assert not same(together[0], together[16])  # one prompt, two seeds


def test_updates_in_flight_are_exact(run: Run) -> None:
    """Three updates while 24 requests are decoded. Each token has the log-probability of its claimed version, also with the tied head."""
    folders = {version: run.version(version) for version in (1, 2, 3)}

    ids = prompts(24, seed=2)

    async def conversation(client: Servers) -> tuple[list[Turn], list[Turn]]:
        async def change() -> None:
            for version, folder in folders.items():
                await running(client, 16)
                await asyncio.sleep(0.3)
                await client.update(folder, version)

        flying = await under_load(client, ids, change)
        assert await client.fleet.versions() == [3]
        # The same prompts and seeds again, so that cached keys and values of version 0 would be noticed.
        return flying, await asyncio.gather(*[sample(client, ids[seed], seed) for seed in range(24)])

    flying, later = talk(run, conversation)
    assert run.worst(flying + later, 1.0) < EXACT
    assert {version for turn in flying for version in turn.versions.tolist()} == {0, 1, 2, 3}
    assert sum(len(set(turn.versions.tolist())) > 1 for turn in flying) >= 16
    assert all((np.diff(turn.versions) >= 0).all() for turn in flying)
    assert all(set(turn.versions.tolist()) == {3} for turn in later)


def test_a_drained_update_lets_what_is_in_flight_end_under_the_old_version(run: Run) -> None:
    """Requests that arrive while the update waits are sampled only under the new version. With one long request left, nothing waits."""
    folder = run.version(1)
    ids = prompts(12, seed=3)

    async def conversation(client: Servers) -> list[list[Turn]]:
        async with Servers(run.ready(), request_timeout=120, manner=Manner(drain_tokens=60)) as draining:
            flying = [asyncio.create_task(sample(client, one, seed, max_tokens=60, min_tokens=55)) for seed, one in enumerate(ids)]
            await running(client, len(ids))
            update = asyncio.create_task(draining.update(folder, 1))
            await asyncio.sleep(0.1)
            late: list[Turn] = []
            while not any(1 in turn.versions for turn in late):  # until the update has checked its files, new ones are in flight, too
                if update.done():
                    update.result()
                late += await asyncio.gather(*[sample(client, one, seed) for seed, one in enumerate(ids)])
            await update
            await client.fleet.wait_ready(300)  # back to version 0
            long = [asyncio.create_task(sample(client, one, seed, max_tokens=200, min_tokens=190)) for seed, one in enumerate(ids)]
            await running(client, len(ids))
            async with Servers(run.ready(), request_timeout=120, manner=Manner(drain_tokens=8)) as impatient:
                await impatient.update(folder, 1)
            return [await asyncio.gather(*flying), late, await asyncio.gather(*long)]

    flying, late, long = talk(run, conversation)
    assert {version for turn in flying for version in turn.versions.tolist()} == {0}
    assert all(len(set(turn.versions.tolist())) == 1 for turn in late)
    assert all(set(turn.versions.tolist()) == {0, 1} for turn in long)
    assert run.worst(late, 1.0) < EXACT


def test_an_earlier_runs_version_is_taken_back_to_the_initial_model(run: Run) -> None:
    async def first(client: Servers) -> None:
        await client.update(run.version(1), 1)
        assert [state.attested for state in await client.fleet.states()] == [1.0], "all served weights were compared with the written ones"

    async def second(client: Servers) -> tuple[Turn, list[int]]:
        assert [state.attested for state in await client.fleet.states()] == [1.0], (
            "version 0, which has no manifest, is compared with its files"
        )
        return await sample(client, prompts(1)[0], 0), await client.fleet.versions()

    talk(run, first)
    turn, versions = talk(run, second)
    assert versions == [0]
    assert set(turn.versions.tolist()) == {0}
    assert run.worst([turn], 1.0) < EXACT


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5000] ^= 16
    path.write_bytes(content)


def forget_the_marker(folder: Path) -> None:
    (folder / "COMPLETE").unlink()


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    (folder / "COMPLETE").unlink()
    seal(folder, 1)


def drop_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))


def change_a_shape(folder: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))


def add_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.9.input_layernorm.weight": tensors["model.norm.weight"].clone()}))


def claim_another_version(folder: Path) -> None:
    (folder / "COMPLETE").unlink()
    seal(folder, 7)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (truncate, "bytes"),
        (flip_a_bit, "checksum"),
        (forget_the_marker, "COMPLETE"),
        (drop_a_tensor, "missing: model.layers.2.mlp.up_proj.weight"),
        (change_a_shape, "wrong shape: model.layers.1.self_attn.o_proj.weight"),
        (add_a_tensor, "unknown: model.layers.9.input_layernorm.weight"),
        (claim_another_version, "version 7, not 1"),
    ],
)
def test_wrong_weights_are_refused_and_the_old_version_generates_on(
    run: Run, tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(run.version(1), folder)
    spoil(folder)

    async def conversation(client: Servers) -> list[Turn]:
        work = [asyncio.create_task(sample(client, ids, seed, max_tokens=120)) for seed, ids in enumerate(prompts(4))]
        await asyncio.sleep(0.05)
        with pytest.raises(UpdateRefused, match=complaint):
            await client.update(folder, 1)
        assert client.fleet.version == 0
        assert await client.fleet.versions() == [0]
        return [*await asyncio.gather(*work), await sample(client, prompts(1)[0], 0)]

    turns = talk(run, conversation)
    assert run.worst(turns, 1.0) < EXACT
    assert {version for turn in turns for version in turn.versions.tolist()} == {0}


def test_a_prompt_without_room_is_refused_and_a_completion_ends_with_the_context(run: Run) -> None:
    async def conversation(client: Servers) -> list[Turn]:
        for length in (CONTEXT, CONTEXT + 50):
            with pytest.raises(ContextTooLong, match=f"{length} tokens, the context {CONTEXT}"):
                await sample(client, prompts(1, length)[0], 0)
        return await asyncio.gather(*[sample(client, ids, seed, max_tokens=500) for seed, ids in enumerate(prompts(16, CONTEXT - 4))])

    turns = talk(run, conversation)
    full = [turn for turn in turns if turn.finish_reason == "length"]
    assert full
    assert {len(turn.completion_ids) for turn in full} == {4}


def test_wrong_sampling_parameters_are_refused_with_vllms_own_words(run: Run) -> None:
    async def conversation(client: Servers) -> None:
        for sampling, complaint in (
            ({"temperature": -1.0}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"nucleus": 1}, "nucleus"),
            ({"max_tokens": 0}, "max_tokens"),
        ):
            with pytest.raises(RequestRefused, match=complaint):
                await sample(client, [10, 11], 0, **sampling)
        with pytest.raises(RequestRefused, match="vocab"):
            await sample(client, [10, 5000], 0)

    talk(run, conversation)


def test_stop_tokens_and_greedy_decoding(run: Run) -> None:
    async def conversation(client: Servers) -> tuple[Turn, Turn, Turn]:
        ids = prompts(1)[0]
        greedy, again = [await sample(client, ids, seed, temperature=0.0) for seed in (0, 1)]
        return greedy, again, await sample(client, ids, 0, temperature=0.0, stop_token_ids=[int(greedy.completion_ids[5])])

    greedy, again, stopped = talk(run, conversation)
    assert same(greedy, again)
    first = greedy.completion_ids.tolist().index(greedy.completion_ids[5])
    assert stopped.completion_ids.tolist() == greedy.completion_ids[: first + 1].tolist()
    assert stopped.finish_reason == "stop"


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(run: Run) -> None:
    decode = build_tokenizer(CONTEXT).decode

    async def conversation(client: Servers) -> tuple[list[Turn], list[Turn], list[str]]:
        whole = await asyncio.gather(*[sample(client, ids, seed, max_tokens=200) for seed, ids in enumerate(prompts(8))])
        texts = [decode(turn.completion_ids, skip_special_tokens=True) for turn in whole]
        wanted = [text[len(text) // 2 :][:3] or "zzz" for text in texts]
        cut = await asyncio.gather(
            *[sample(client, ids, seed, max_tokens=200, stop=["never said", wanted[seed]]) for seed, ids in enumerate(prompts(8))]
        )
        async with asyncio.timeout(300):
            while (await client.fleet.stats())["perf/running"]:  # the engine has ended them, too
                await asyncio.sleep(0.05)
        return whole, cut, wanted

    whole, cut, wanted = talk(run, conversation)
    assert any(len(short.completion_ids) < len(long.completion_ids) for short, long in zip(cut, whole, strict=True))
    for short, long, stop in zip(cut, whole, wanted, strict=True):
        length = len(short.completion_ids)
        assert short.completion_ids.tolist() == long.completion_ids[:length].tolist(), "the tokens are those that were sampled"
        assert short.logprobs.tobytes() == long.logprobs[:length].tobytes()
        assert short.finish_reason == "stop"
        if stop != "zzz":
            assert stop in decode(short.completion_ids, skip_special_tokens=True)
            assert stop not in decode(short.completion_ids[:-1], skip_special_tokens=True)


def test_penalties_and_biases_reach_the_engine_and_the_turn_says_its_temperature(run: Run) -> None:
    async def conversation(client: Servers) -> list[Turn]:
        ids, asked = prompts(1)[0], [{}, {"logit_bias": {20: 100.0}}, {"repetition_penalty": 5.0}, {"presence_penalty": 2.0}]
        asked += [{"frequency_penalty": 2.0}, {"temperature": 0.001}, {"temperature": 0.0}]
        return await asyncio.gather(*[sample(client, ids, 0, **one) for one in asked])

    plain, biased, repetition, presence, frequency, cold, greedy = talk(run, conversation)
    assert set(biased.completion_ids.tolist()) == {20}
    assert not any(same(plain, other) for other in (repetition, presence, frequency))
    assert [turn.temperature for turn in (plain, cold, greedy)] == [1.0, 0.01, 1.0], "vLLM raises 0.001, and scores greedy tokens at 1"


def test_a_request_that_is_given_up_leaves_the_engine(run: Run) -> None:
    async def conversation(client: Servers) -> None:
        work = [asyncio.create_task(sample(client, ids, seed, max_tokens=200, min_tokens=200)) for seed, ids in enumerate(prompts(8))]
        await running(client, 8)
        for task in work[1:]:
            task.cancel()
        async with asyncio.timeout(300):
            while (await client.fleet.stats())["perf/running"] != 1:
                await asyncio.sleep(0.02)
        assert len((await work[0]).completion_ids) == 200

    talk(run, conversation)


def test_everything_but_health_asks_for_the_key(run: Run) -> None:
    (endpoint,) = run.ready()

    async def status(method: str, path: str, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with aiohttp.request(method, endpoint.url + path, headers=headers, json={}) as answer:
            return answer.status

    async def conversation() -> None:
        assert await status("GET", "/health", None) == 200
        for method, path in (
            ("POST", "/update_weights"),
            ("POST", "/reload_weights"),
            ("GET", "/policy"),
            ("GET", "/v1/models"),
        ):
            for key in (None, "", endpoint.api_key + "x", endpoint.api_key[:-1]):
                assert await status(method, path, key) == 401, (path, key)
        assert await status("GET", "/policy", endpoint.api_key) == 200
        assert await status("POST", "/policy", endpoint.api_key) == 405
        assert await status("POST", "/generate", endpoint.api_key) == 404
        async with aiohttp.ClientSession() as session:
            for key in ("", endpoint.api_key + "x"):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await session.ws_connect(endpoint.url + "/generate", headers={"Authorization": f"Bearer {key}"})
                assert refused.value.status == 403

    asyncio.run(conversation())
    file = endpoint_file(run.paths, 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(endpoint.api_key) >= 32
    assert json.loads(file.read_text())["pid"] == run.process.pid  # type: ignore[union-attr]
    assert endpoint.url.startswith("http://127.0.0.1:")


def test_our_server_is_an_openai_endpoint_too(run: Run) -> None:
    (endpoint,) = run.ready()
    task = Task(env="e", example_id=0, index=0, row={})

    async def conversation() -> tuple[Reply, Reply, Reply]:
        policy = OpenAIPolicy(f"{endpoint.url}/v1", endpoint.api_key, "tiny", sampling={"max_tokens": 5, "top_k": 50, "min_tokens": 5})
        try:
            reply = await policy.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}])
            again = await policy.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}])
            short = await policy.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}], None, {"max_tokens": 1, "min_tokens": 1})
            with pytest.raises(PromptTooLong, match="context length"):
                await policy.episode(task, 0, 0).respond([{"role": "user", "content": "a" * 2 * CONTEXT}])
            assert await check(policy, tokens=True) == Capabilities(no_tokens=None, no_tools=ANY)
            with pytest.raises(PolicyError, match=r"does not take tools: .*auto.*tool"):
                await check(policy, tools=True)
            exact = policy.asking_for(tokens=True).episode(task, 0, 0)
            known = await exact.respond([{"role": "user", "content": "abc"}])
            assert exact.turns == (known.turn,)
            assert (known.content, known.num_prompt_tokens) == (reply.content, len(known.turn.prompt_ids))
            assert len(known.turn.completion_ids) == len(known.turn.logprobs) == 5
            assert (known.turn.logprobs < 0).all()
            wrong = OpenAIPolicy(f"{endpoint.url}/v1", "guess", "tiny", max_retries=0)
            with pytest.raises(PolicyError, match=r"\(401\)"):
                await wrong.episode(task, 0, 0).respond([{"role": "user", "content": "abc"}])
            await wrong.close()
            return reply, again, short
        finally:
            await policy.close()

    reply, again, short = asyncio.run(conversation())
    assert short.num_tokens == 1
    assert (reply.turn, reply.num_tokens, reply.truncated) == (None, 5, True)
    assert reply.num_prompt_tokens > 3
    assert reply.content == again.content, "the same seed"


def test_vllms_own_routes_answer_beside_ours(run: Run) -> None:
    (endpoint,) = run.ready()
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}

    async def conversation() -> tuple[dict, dict]:
        async with aiohttp.ClientSession(endpoint.url, headers=headers) as session:
            models = await (await session.get("/v1/models")).json()
            body = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, "logprobs": True}
            chat = await (await session.post("/v1/chat/completions", json=body)).json()
            return models, chat

    models, chat = asyncio.run(conversation())
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert len(chat["choices"][0]["logprobs"]["content"]) <= 5
