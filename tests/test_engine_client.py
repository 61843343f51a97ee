"""vLLM's JSON, one request over HTTP, and the middleware that asks for the run's secret."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from server_stand_in import Stand

from rlx.inference import client as http
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.middleware import Secret
from rlx.inference.wire import InferenceError, RequestRefused, Sampling, ServerUnreachable
from rlx.trace import Turn

CHOICE = {
    "token_ids": [7, 8, 9],
    "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}, {"token_id": 9, "logprob": 0.0}]},
    "finish_reason": "length",
    "weight_versions": [{"version": "3@run", "start": 0, "end": 2}, {"version": "4@run", "start": 2, "end": 3}],
}


def body(**changed: Any) -> bytes:
    return msgspec.json.encode({"request_id": "a", "choices": [CHOICE | changed]})


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{"token_id": 1, "logprob": value} for value in values]}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def turn_of(answer: bytes) -> Turn:
    return wire.turn_of("server x", answer, np.array([1], np.int32), 1.0, lambda label: int(label.partition("@")[0]))


def test_a_completion_has_ids_float32_logprobs_and_version_spans() -> None:
    turn = turn_of(body())
    assert turn.completion_ids.tolist() == [7, 8, 9]
    assert turn.logprobs.tolist() == [-0.5, -1.5, 0.0]
    assert (turn.completion_ids.dtype, turn.logprobs.dtype) == (np.int32, np.float32)
    assert (turn.finish_reason, turn.versions.tolist()) == ("length", [3, 3, 4])
    empty = turn_of(body(token_ids=[], logprobs=None, weight_versions=[], finish_reason="abort"))
    assert (len(empty.completion_ids), empty.finish_reason) == (0, "abort")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"<html>", "something else than a completion"),
        (b'{"choices": []}', "something else than a completion"),
        (body().replace(b"-1.5", b"NaN"), "something else than a completion"),
        (body(logprobs=logprobs(-1.0, None, -1.0)), "something else than a completion"),
        (
            body(logprobs=logprobs(-1.0, -9999.0, -1.0)),
            "3 tokens with 3 log-probabilities, of which 2 are finite",
        ),  # vLLM's word for NaN and for none
        (body(logprobs=logprobs(-1.0, -1.0)), "3 tokens with 2 log-prob"),
        (body(logprobs=None), "3 tokens with 0 log-prob"),
        (body(weight_versions=None), "3 tokens with the version spans"),
        (body(weight_versions=[span("3@run", 0, 2)]), "3 tokens with the version spans"),
        (body(weight_versions=[span("3@run", 0, 1), span("4@run", 2, 3)]), "3 tokens with the version spans"),
        (body(finish_reason="error"), "failed a request"),
        (body(token_ids=None), "failed a request"),
    ],
)
def test_what_is_not_a_whole_completion_with_finite_logprobs_is_not_used(answer: bytes, why: str) -> None:
    with pytest.raises(InferenceError, match=f"server x.*{why}"):
        turn_of(answer)


def test_a_request_names_every_sampling_parameter_because_vllm_takes_missing_ones_from_the_model() -> None:
    def sent(model: str | None = None, **parameters: Any) -> dict[str, Any]:
        sampling = msgspec.convert({"max_tokens": 3} | parameters, Sampling)
        return msgspec.json.decode(wire.generate_body(np.array([1, 2], np.int32), sampling, "id", model))

    request = sent()
    assert (request["request_id"], request["token_ids"], "model" in request) == ("id", [1, 2], False)
    parameters = request["sampling_params"]
    assert parameters.keys() >= set(Sampling.__struct_fields__) - {"seed"}
    assert (parameters["logprobs"], parameters["detokenize"], parameters["temperature"]) == (0, False, 1.0)
    assert sent("4@run", seed=5)["model"] == "4@run"
    assert sent(seed=5)["sampling_params"]["seed"] == 5
    assert sent(stop=["\n"])["sampling_params"]["detokenize"] is True
    assert sent(logit_bias={3: -1.5})["sampling_params"]["logit_bias"] == {"3": -1.5}
    with pytest.raises(msgspec.ValidationError, match="top_q"):
        sent(top_q=0.5)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"error": {"message": "no such model", "code": 404}}',
        b'{"error": "no such model"}',
        b'{"detail": "no such model"}',
        b"no such model",
    ],
)
def test_the_message_of_a_refusal_is_found_in_all_of_vllms_forms(answer: bytes) -> None:
    error = wire.error_of("server x", 404, answer)
    assert isinstance(error, RequestRefused)
    assert str(error) == "server x (404): no such model"


async def test_metrics_and_models_are_read() -> None:
    async with Stand() as stand, Client() as client:
        found = wire.metrics_of(await client.ask(stand.endpoint, wire.METRICS))
        assert found == {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.25,
            "num_preemptions_total": 3,
            "request_success_total": 0,
            "generation_tokens_total": 70,
            "prompt_tokens_total": 40,
            "prefix_cache_queries_total": 40,
            "prefix_cache_hits_total": 10,
        }
        assert wire.models_of(await client.ask(stand.endpoint, wire.MODELS)) == [("policy", "model", 64)]


async def test_a_method_of_the_extension_returns_a_record_of_each_rank_and_a_server_without_it_is_refused_with_the_remedy() -> None:
    async with Stand(ranks=2) as stand, Client() as client:
        stand.errors["rlx_check"] = {"error": "no such file"}
        assert await client.call_workers(stand.endpoint, "rlx_check", "folder") == [
            {"rank": 0, "ready": True},
            {"rank": 1, "error": "no such file"},
        ]
        stand.extension = False
        with pytest.raises(RequestRefused, match=r"does not know `rlx_check`(.|\n)*fix: .*--worker-extension-cls"):
            await client.call_workers(stand.endpoint, "rlx_check", "folder")


async def test_a_connection_is_used_again_and_closed_before_the_server_would_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE", 0.2)
    async with Stand() as stand, Client() as client:
        for _ in range(3):
            await client.ask(stand.endpoint, wire.HEALTH)
        assert len(stand.connections) == 1
        await asyncio.sleep(0.6)
        await client.ask(stand.endpoint, wire.HEALTH)
        assert len(stand.connections) == 2
    assert http.IDLE < 5, "vLLM's own limit"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"]
)
async def test_no_answer_half_of_one_and_503_are_an_outage(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server, Client() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=url):
            await client.ask(Endpoint(url, "key"), wire.HEALTH)


def test_the_middleware_lets_nobody_in_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_SECRET", "word")
    entered: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        entered.append(scope["type"])

    def ask(kind: str, *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(Secret(app)({"type": kind, "headers": headers} if kind != "lifespan" else {"type": kind}, None, send))
        return sent

    for headers in (
        (),
        ((b"authorization", b"Bearer other"),),
        ((b"authorization", b"word"),),
        ((b"authorization", "Bearer wörd".encode()),),
    ):
        assert [message.get("status") for message in ask("http", *headers)] == [401, None]
        assert ask("websocket", *headers) == [{"type": "websocket.close", "code": 1008}]
    assert entered == []
    for kind in ("http", "websocket"):
        ask(kind, (b"authorization", b"Bearer word"))
    ask("lifespan")
    assert entered == ["http", "websocket", "lifespan"]
