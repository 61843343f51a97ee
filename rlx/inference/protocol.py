"""What client and server say to each other, and the errors that carry it.

`/generate` speaks msgpack with token arrays as raw little-endian bytes, so that a completion of thousands of tokens costs microseconds;
everything else speaks JSON. Knows neither vLLM nor aiohttp.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")


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
    """Body of `POST /generate`."""

    request_id: str
    prompt_ids: bytes  # int32 [P]
    sampling: Sampling
    version: int = 0  # the version that the client knows this server to have; a server with an older one refuses


class Completion(msgspec.Struct, frozen=True):
    """Answer of `POST /generate`."""

    token_ids: bytes  # int32 [C]
    logprobs: (
        bytes  # float32 [C] of each sampled token in what it was drawn from: at the sampling temperature, truncated by top_p and its like
    )
    versions: list[tuple[int, int]]  # runs `(version, tokens)` in order; their tokens add up to C
    finish_reason: str  # "stop", "length" or "abort"


class PolicyState(msgspec.Struct, frozen=True):
    """Answer of `GET /policy`, and of a weight update."""

    version: int
    model: str  # path of version 0
    context_length: int  # tokens of prompt and completion together
    running: int = 0  # requests being decoded
    waiting: int = 0  # requests queued
    kv_cache_usage: float = 0.0  # share of the key-value cache in use
    preemptions: int = 0  # since the server started; a weight update counts the requests it makes recompute


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /update_weights`."""

    weight_dir: str
    version: Annotated[int, Meta(ge=0)]


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
    """A server has an older version than the run, and the weights that would bring it up to date are not known or gone."""


def pack_ids(ids: object) -> bytes:
    """Token ids [N] as bytes."""
    return np.asarray(ids, dtype=INT).tobytes()
