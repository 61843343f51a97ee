"""What client and server say to each other, and the errors that carry it.

`/generate` is a WebSocket: a client has one connection to a server, and a message carries all requests, or all completions, that are
ready at that moment, because at a few hundred small requests a step HTTP itself was the larger part of their cost. It speaks msgpack with
token arrays as raw little-endian bytes, so that a completion of thousands of tokens costs microseconds; everything else speaks JSON.
Knows neither vLLM nor aiohttp.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")
PAUSE = 0.25  # seconds between two attempts at a server that does not answer
RESTART = 60.0  # seconds a server may be away before what is asked of it fails


class Sampling(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """How to sample, by vLLM's names. The server refuses what is out of range."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: float = 1.0
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []


class GenerateRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """One completion to be sampled."""

    request_id: str
    prompt_ids: bytes  # int32 [P]
    sampling: Sampling
    version: int = 0  # the version that the client knows this server to have; a server with an older one refuses


class Completion(msgspec.Struct, frozen=True):
    """What was sampled."""

    token_ids: bytes  # int32 [C]
    logprobs: (
        bytes  # float32 [C] of each sampled token in what it was drawn from: at the sampling temperature, truncated by top_p and its like
    )
    versions: list[tuple[int, int]]  # runs `(version, tokens)` in order; their tokens add up to C
    finish_reason: str  # "stop", "length" or "abort"


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A message to the server. A request's number is the client's choice, unlike those of its other open requests on the connection."""

    requests: list[tuple[int, GenerateRequest]] = []
    given_up: list[int] = []  # open requests whose completion is not wanted any more; they are not answered


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A request's end; a message to the client is a list of them."""

    number: int
    status: int  # as HTTP has it: 200, 400 wrong, 409 the server has an older version, 413 no room for a new token, 503 ask again
    completion: Completion | None = None
    error: str = ""


class PolicyState(msgspec.Struct, frozen=True):
    """Answer of `GET /policy`, and of a weight update."""

    version: int
    model: str  # path of version 0
    context_length: int  # tokens of prompt and completion together
    running: int = 0  # requests being decoded
    waiting: int = 0  # requests queued
    kv_cache_usage: float = 0.0  # share of the key-value cache in use
    attested: float = 0.0  # share of this version's weights that were compared, as they are served, with what the trainer wrote
    preemptions: int = 0  # since the server started; a weight update counts the requests it makes recompute


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /update_weights`."""

    weight_dir: str
    version: Annotated[int, Meta(ge=0)]
    drain_tokens: Annotated[int, Meta(ge=0)] = 0  # requests in flight end first when each has at most so many tokens to go


class Failure(msgspec.Struct, omit_defaults=True, frozen=True):
    """Body of every answer that is not 200."""

    error: str
    version: int | None = None  # of the server, where its version is the trouble


class InferenceError(RuntimeError):
    """A server did not do what it was asked; the message names the server."""


class ServerUnreachable(InferenceError):
    """A server did not answer, also not after retries."""


class RequestRefused(InferenceError):
    """A server found the request wrong (4xx): asking again is no use."""


class ContextTooLong(RequestRefused):
    """The prompt leaves no room for a new token in the model's context."""


class UpdateRefused(RequestRefused):
    """New weights were found wrong before anything was changed; the server still serves the old version."""


class StaleServer(InferenceError):
    """A server has an older version than the run, and could not be brought up to date."""


_failure = msgspec.json.Decoder(Failure)


def error_of(server: str, status: int, answer: bytes | str) -> InferenceError:
    """What an answer other than 200 means for the caller. `server` is its name in messages, `answer` a body or what it says."""
    if isinstance(answer, str):
        text = answer
    else:
        try:
            text = _failure.decode(answer).error
        except msgspec.MsgspecError:
            text = answer[:500].decode(errors="replace")
    kind = ContextTooLong if status == 413 else RequestRefused if 400 <= status < 500 else InferenceError
    return kind(f"{server} ({status}): {text}")


def pack_ids(ids: object) -> bytes:
    """Token ids [N] as bytes."""
    return np.asarray(ids, dtype=INT).tobytes()
