"""vLLM's HTTP interface as rlx uses it: paths, the JSON of requests and answers, and the errors of clients.

Everything that depends on vLLM's JSON is in this file. Transport and retries are `client.py` and `sampler.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from rlx.arrays import Int
from rlx.trace import Turn

GENERATE = "/inference/v1/generate"
HEALTH = "/health"
METRICS = "/metrics"
MODELS = "/v1/models"
PAUSE = "/pause?mode=keep"  # requests in flight stay, and their KV cache is computed again under the new weights
RESUME = "/resume"
IS_PAUSED = "/is_paused"
RPC = "/collective_rpc"
SET_LABEL = "/update_weight_version"
LABEL = "/weight_info"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

UNLABELLED = "default"  # the label of a server whose version nobody has set since it started
NO_NUMBER = -9999.0  # what vLLM puts for NaN and minus infinity; a sampled token has neither
LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to it, except 0
INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")


class InferenceError(RuntimeError):
    """A server did not fulfil a request. The message names the server."""


class ServerUnreachable(InferenceError):
    """A server did not answer, even after retries. `connected`: it took the connection."""

    def __init__(self, text: str, connected: bool = True) -> None:
        super().__init__(text)
        self.connected = connected


class RequestRefused(InferenceError):
    """A server rejected the request (4xx). A retry would not help."""


class ContextTooLong(RequestRefused):
    """The prompt leaves no room for a new token in the model's context."""


class UpdateRefused(RequestRefused):
    """A server rejected new weights before it changed anything. It still serves the old version."""


class WeightsDiffer(InferenceError):
    """A server serves other weights than those that were trained."""


class WeightsGone(InferenceError):
    """The trainer's memory does not hold this version any more. Ask for the newest one."""


class StaleServer(InferenceError):
    """A server has an older version than the run and was not updated."""


class TakenServer(InferenceError):
    """Another run has changed a server's weights."""


class Sampling(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Sampling parameters by vLLM's names. vLLM ignores unknown names and refuses values out of range.

    Every field is sent, because vLLM takes missing ones from the model's `generation_config.json`.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: float = 1.0
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    stop: list[str] = []  # the completion ends with the token that completes one of these texts
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # token id → what is added to its logit

    @property
    def scored_at(self) -> float:
        """The temperature at which the tokens were sampled and their log-probabilities computed."""
        return max(self.temperature, LEAST_TEMPERATURE) if self.temperature else 1.0


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_answer = msgspec.json.Decoder(_Answer).decode


def generate_body(prompt: Int, sampling: Sampling, request_id: str, model: str | None = None) -> bytes:
    """The body of `POST /inference/v1/generate`. `prompt` [P]; `model`: the adapter's name, or None for the base model."""
    parameters = msgspec.to_builtins(sampling) | {"logprobs": 0, "detokenize": bool(sampling.stop)}
    if sampling.seed is None:
        del parameters["seed"]
    parameters["logit_bias"] = sampling.logit_bias or None
    body: dict[str, Any] = {"request_id": request_id, "token_ids": prompt.tolist(), "sampling_params": parameters}
    return msgspec.json.encode(body if model is None else body | {"model": model})


def turn_of(server: str, body: bytes, prompt: Int, temperature: float, version_of: Callable[[str], int]) -> Turn:
    """The turn in the answer to a request with `prompt` [P]. `version_of` reads the labels of the weights that sampled its tokens.

    Raises InferenceError if the answer is not a whole completion with finite log-probabilities, and what `version_of` raises.
    """
    try:
        (choice,) = _answer(body).choices
    except (msgspec.MsgspecError, ValueError) as error:
        raise InferenceError(f"{server} answered {GENERATE} with something else than a completion: {error}") from error
    if choice.finish_reason == "error" or choice.token_ids is None:
        raise InferenceError(f"{server} failed a request; see its log")
    ids = np.array(choice.token_ids, INT)
    given = choice.logprobs.content if choice.logprobs is not None else None
    logprobs = np.array([entry.logprob for entry in given or ()], FLOAT)
    finite = int((np.isfinite(logprobs) & (logprobs > NO_NUMBER)).sum())
    if finite != len(ids) or len(logprobs) != len(ids):
        raise InferenceError(f"{server} returned {len(ids)} tokens with {len(logprobs)} log-probabilities, of which {finite} are finite")
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
    ends = [0, *(end for _, _, end in spans)]
    if len(ids) and (ends[-1] != len(ids) or ends[:-1] != [start for _, start, _ in spans]):
        raise InferenceError(f"{server} returned {len(ids)} tokens with the version spans {spans}")
    versions = np.empty(len(ids), INT)
    for label, start, end in spans:
        versions[start:end] = version_of(label)
    return Turn(
        prompt_ids=prompt,
        completion_ids=ids,
        logprobs=logprobs,
        versions=versions,
        temperature=temperature,
        finish_reason=choice.finish_reason or "stop",
    )


def label_of(version: int, run: str) -> str:
    """The label that a run gives to a server's weights; also the name of an adapter."""
    return f"{version}@{run}"


def parse_label(label: str) -> tuple[int, str] | None:
    """Version and run of a label; None if no run of rlx has set it."""
    found = re.fullmatch(r"(\d+)@(.*)", label)
    return (int(found[1]), found[2]) if found else None


def text_of(body: bytes) -> str:
    """The message in the body of an answer that is not 200."""
    try:
        found: Any = msgspec.json.decode(body)
        found = found.get("error", found.get("detail", found))
        return str(found["message"] if isinstance(found, dict) and "message" in found else found)
    except (msgspec.MsgspecError, AttributeError):
        return body[:500].decode(errors="replace")


def error_of(server: str, status: int, body: bytes) -> InferenceError:
    """The exception for an answer that is not 200. `server`: its name in messages."""
    kind = RequestRefused if 400 <= status < 500 else InferenceError
    wrong_key = "it refuses the key.\n  fix: set inference.api_key to the server's secret (RLX_SECRET)"
    return kind(f"{server} ({status}): {wrong_key if status in (401, 403) else text_of(body)}")


def models_of(body: bytes) -> list[tuple[str, str, int]]:
    """Name, folder (or hub name) and context in tokens of each model and adapter of `GET /v1/models`; 0: the context is not known."""
    cards = msgspec.json.decode(body)["data"]
    return [(card["id"], card.get("root") or card["id"], card.get("max_model_len") or 0) for card in cards]


METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)
COUNTED = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total", "request_success_total",
           "generation_tokens_total", "prompt_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")  # fmt: skip


def metrics_of(body: bytes) -> dict[str, float]:
    """The metrics of COUNTED in the answer to `GET /metrics`, summed over engines."""
    found = dict.fromkeys(COUNTED, 0.0)
    for name, value in METRIC.findall(body.decode()):
        if name in found:
            found[name] += float(value)
    return found
