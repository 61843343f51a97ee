"""The messages between client and server, and the client's errors.

`/generate` is a WebSocket. A client has one connection to a server, and one message carries all requests (or all completions) that are
ready at that moment: with a few hundred small requests a step, HTTP itself was most of their cost. The messages are msgpack with token
arrays as raw little-endian bytes, so a completion of thousands of tokens costs microseconds. All other routes use JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")
PAUSE = 0.25  # seconds between two attempts to reach a server
CONNECT = 10.0  # seconds for opening a connection; a host that vanished does not refuse it
RESTART = 60.0  # seconds for which a server may be unreachable before requests to it fail, if its owner does not say
FAILING = 60.0  # seconds for which servers may fail a request (500) before it fails
HELD = 60.0  # seconds without a word from the run that claimed a server, after which another run may claim it
LEFT = 10.0  # the same if its connections to the server have closed as well


class Sampling(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """Sampling parameters by vLLM's names. The server refuses values out of range."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: float = 1.0
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    stop: list[str] = []  # the answer ends with the token that completes one of these texts
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # token id → what is added to its logit


class GenerateRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """A request for one completion."""

    request_id: str
    prompt_ids: bytes  # int32 [P]
    sampling: Sampling
    version: int = 0  # the version that the client expects here; a server with an older one refuses the request


class Completion(msgspec.Struct, frozen=True):
    """The sampled tokens of one request. `versions` [(3, 2), (4, 5)]: version 3 sampled the first 2 tokens, version 4 the next 5."""

    token_ids: bytes  # int32 [C]
    logprobs: bytes  # float32 [C], in the distribution that each token was drawn from: at the sampling temperature, truncated by top_p etc.
    temperature: float  # `Turn.temperature`
    versions: list[tuple[int, int]]  # runs `(version, tokens)` in order; their tokens add up to C
    finish_reason: str  # "stop", "length" or "abort"


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A message to the server. The client chooses a number for each request, unique among its open requests on the connection."""

    requests: list[tuple[int, GenerateRequest]] = []
    given_up: list[int] = []  # numbers of open requests to abort; they get no answer


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one request. A message to the client is a list of answers."""

    number: int
    # as in HTTP: 200, 400 bad request, 409 the server has an older version, 413 no room for a new token, 500 failed, 503 retry
    status: int
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
    attested: float = 0.0  # fraction of the served weights that were compared with the trainer's checksums
    not_compared: dict[str, float] = {}  # the rest: names (`*` for the layer's number) and why → share of the weights
    preemptions: int = 0  # requests that lost their cache to others, since the server started; weight updates do not count
    prompt_tokens: int = 0  # of the requests since the server started
    cached_tokens: int = 0  # of these: tokens whose keys and values were in the cache, because another prompt began with them
    weights: str = ""  # path of the served version
    asking: bool = False  # it waits until the trainer is ready to send a version; that takes as long as the trainer's step
    identity: str = ""  # of version 0's weights (`weights.files.identity`), the same wherever they lie; "": the server does not say
    start: str = ""  # another one each time that the server starts; "": the server does not say


class Device(msgspec.Struct, frozen=True):
    """What one worker of a server computes on; `GET /devices` answers with a list of them."""

    name: str  # of the GPU; "": the worker computes on a CPU
    peak_memory_gb: float  # the most that it has taken, GiB: of the GPU, by torch; on a CPU the resident memory of its process
    memory_gb: float = 0.0  # of the whole GPU, GiB


class Claim(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /claim`, which answers with the state, or 409 while the server is another run's; and of `POST /reload_weights`."""

    run: str = ""  # its directory; "": nobody in particular, who may change the weights of a free server
    keep: bool = True  # False: the run leaves the server


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /update_weights`."""

    weight_dir: str  # or for the kind `memory` the trainer's address
    version: Annotated[int, Meta(ge=0)] | None = None  # None: that of the folder's manifest
    # A model, or adapters for the server's own; None: what the folder holds. `memory`: the trainer sends the model.
    kind: Literal["files", "adapter", "memory"] | None = None
    drain_tokens: Annotated[int, Meta(ge=0)] = 0  # finish requests in flight first if each has at most this many tokens left
    keep_kv: bool = False  # requests in flight go on with the keys and values that they have; False: these are computed again
    run: str = ""  # `Claim.run`
    together: Annotated[int, Meta(ge=1)] = 1  # servers that are told this at the same time; one transfer serves them
    timeout: float = 600.0  # seconds for each part of a transfer from memory


class Failure(msgspec.Struct, omit_defaults=True, frozen=True):
    """Body of every answer that is not 200."""

    error: str
    version: int | None = None  # the server's version, if a change of weights failed


class InferenceError(RuntimeError):
    """A server did not fulfil a request. The message names the server."""


class ServerUnreachable(InferenceError):
    """A server did not answer, even after retries."""


class RequestRefused(InferenceError):
    """A server rejected the request (4xx). A retry would not help."""


class TakenServer(RequestRefused):
    """A server's weights belong to another run (409)."""


class ContextTooLong(RequestRefused):
    """The prompt leaves no room for a new token in the model's context."""


class UpdateRefused(RequestRefused):
    """A server rejected new weights before it changed anything. It still serves the old version."""


class WeightsGone(InferenceError):
    """A server could not get a version from the trainer's memory (410): that has a newer one, or the transfer broke. Ask again."""


class StaleServer(InferenceError):
    """A server has an older version than the run and could not be updated."""


_failure = msgspec.json.Decoder(Failure)


def error_of(server: str, status: int, answer: bytes | str) -> InferenceError:
    """The exception for an answer other than 200. `server`: its name in messages. `answer`: the body or an error message."""
    if isinstance(answer, str):
        text = answer
    else:
        try:
            text = _failure.decode(answer).error
        except msgspec.MsgspecError:
            text = answer[:500].decode(errors="replace")
    known = {409: TakenServer, 410: WeightsGone, 413: ContextTooLong}
    kind = known.get(status, RequestRefused if 400 <= status < 500 else InferenceError)
    return kind(f"{server} ({status}): {text}")


def failure_of(answer: bytes) -> Failure:
    """The body of an answer other than 200. Raises msgspec.MsgspecError if it is not one of our own servers'."""
    return _failure.decode(answer)


def names_version(answer: bytes) -> bool:
    """Whether the body of a failure is one of our own servers' and says which version the server has."""
    try:
        return failure_of(answer).version is not None
    except msgspec.MsgspecError:
        return False


def pack_ids(ids: object) -> bytes:
    """Token ids [N] as bytes."""
    return np.asarray(ids, dtype=INT).tobytes()
