"""A teacher behind endpoints: given token sequences, it returns the log-probability of every token under the teacher.

    sequences ─► requests of `batch_size` ─► POST /v1/completions {prompt: [ids, …], prompt_logprobs: 0} ─► float32 [L] each

Any server with vLLM's route serves: vLLM's own, or rlx's. The numbers are at temperature 1, whatever the request says. A server that is
overloaded (429), fails (5xx), does not answer or is gone is tried again with growing waits, at another address if there is one, until the
caller gives up. A request that it refuses (4xx) ends the call at once: a retry would not help.

The servers may be the run's own (self-distillation). They come and go, and one that has restarted is not asked before it has the policy's
version again.

`check` compares tokenizers before any work. The log-probability of a token id under another vocabulary would be a number without meaning.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rlx.arrays import Float, Int
from rlx.concurrent import first_failure
from rlx.inference import wire
from rlx.inference.client import CONNECT
from rlx.inference.endpoints import Endpoint

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds before the second attempt at a request, doubled for each further one up to the longest
LOWEST = -100.0  # nats; lower ones (vLLM reports -9999 for an impossible token) would be the only thing that a gradient sees
PROBED = 256  # tokens of the vocabulary whose text is tokenized by both


class TeacherError(RuntimeError):
    """The teacher refused a request, or does not fit the policy."""


class _Entry(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(slots=True)
class Scores:
    """What a call has returned so far."""

    logprobs: list[Float | None]  # [L] of each sequence, 0 for its first token; None: not scored
    retries: int = 0  # attempts that failed and were made again
    trouble: list[str] = field(default_factory=list)  # the different failures


class Teacher:
    """See the module's text. An async context manager. Belongs to one event loop."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        batch_size: int = 16,
        max_concurrent: int = 4,
        timeout: float = 120.0,
        deadline: float = 600.0,
        own: Callable[[], Sequence[Endpoint]] | None = None,
        version: Callable[[], int] = lambda: 0,
        adapter: Callable[[], str | None] = lambda: None,
    ) -> None:
        """See `rlx.config.schema_teacher.TeacherConfig` for all arguments. `model` of None: `check` finds the only one.

        `own`: the run's own servers at the moment, in place of `base_urls`; they are asked when they have at least `version()`.
        `adapter`: the name of the adapter that this version is; None: it is a whole model.
        """
        fixed = [Endpoint(url.rstrip("/").removesuffix("/v1"), api_key or "") for url in base_urls]
        self.servers = own or (lambda: fixed)
        self.model, self.batch_size, self.timeout, self.deadline = model, batch_size, timeout, deadline
        self.context: int | None = None  # tokens that every server takes; None: not known
        self._version, self._adapter = version if own is not None else None, adapter
        self._free = asyncio.Semaphore(max_concurrent * len(self.servers()))
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0

    async def __aenter__(self) -> Teacher:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=self.timeout, sock_connect=CONNECT)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    # -- scoring

    async def score(self, sequences: Sequence[Int], scores: Scores | None = None) -> Scores:
        """The log-probabilities of these sequences [L]. Raises TeacherError for a refusal; other failures are tried again without end.

        `scores`: where they are noted as they arrive, for a caller who gives up by cancelling.
        """
        scores = scores or Scores([None] * len(sequences))
        # Sequences of similar length share a request, so that no short one waits for a long one.
        order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
        parts = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        await first_failure(*(self._score_part(part, sequences, scores) for part in parts))
        return scores

    async def _score_part(self, part: Sequence[int], sequences: Sequence[Int], scores: Scores) -> None:
        body = {
            "model": self._adapter() or self.model,
            "prompt": [sequences[place].tolist() for place in part],
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 1.0,
            "add_special_tokens": False,
        }
        async with self._free:
            answer, address = await self._ask("/v1/completions", body, scores)
        for place, logprobs in zip(part, _read(answer, [sequences[place] for place in part], address), strict=True):
            scores.logprobs[place] = logprobs

    async def _ask(self, path: str, body: Any, scores: Scores, only: Endpoint | None = None) -> tuple[bytes, str]:
        """(the answer, the address that gave it), after retries without end: the caller has the deadline."""
        wait = FIRST_WAIT
        while True:
            servers = [only] if only is not None else self.servers()
            server = servers[self._turn % len(servers)].refreshed()
            self._turn += 1
            try:
                trouble = await self._late(server) if self._version is not None else ""
                if not trouble:
                    async with self._request(server, path, body) as answer:
                        content = await answer.read()
                    if answer.status < 400:
                        return content, server.url
                    trouble = f"{server.url}{path} ({answer.status}): {_said(content)}"
                    if answer.status not in (408, 409, 425, 429) and answer.status < 500:
                        raise TeacherError(f"the teacher refused a request: {trouble}")
            except (TimeoutError, aiohttp.ClientError) as error:
                slow = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
                what = f"did not answer in {self.timeout:g} s (teacher.timeout)" if slow else f"cannot be reached: {error}"
                trouble = f"{server.url} {what}"
            if trouble not in scores.trouble:
                scores.trouble.append(trouble)
                log.warning("the teacher: %s; trying again", trouble)
            scores.retries += 1
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT)

    async def _late(self, server: Endpoint) -> str:
        """Why one of the run's servers must not be asked yet: after a restart it has the initial weights for a while. Empty: it may."""
        assert self._version is not None
        if (name := self._adapter()) is not None:
            async with self._request(server, wire.MODELS, None) as answer:
                loaded = [found for found, *_ in wire.models_of(await answer.read())] if answer.status == 200 else []
            return "" if name in loaded else f"{server.url} does not have the adapter {name}"
        async with self._request(server, wire.LABEL, None) as answer:
            label = (
                str(_decoded(await answer.read(), dict, server.url).get("weight_version"))
                if answer.status == 200
                else f"? ({answer.status})"
            )
        has = wire.parse_label(label)
        late = has is None or has[0] < self._version()
        return f"{server.url} has version {label}, the run has {self._version()}" if late else ""

    def _request(self, server: Endpoint, path: str, body: Any) -> Any:
        assert self._session is not None, "used outside `async with`"
        headers = server.headers if server.api_key else {}
        if body is None:
            return self._session.get(server.url + path, headers=headers)
        return self._session.post(server.url + path, data=msgspec.json.encode(body), headers=headers | {"Content-Type": "application/json"})

    # -- before any work

    async def check(self, tokenizer: Any, longest: int) -> None:
        """Find the model, and make sure that every server scores the policy's tokens. Waits for a server up to the deadline.

        `tokenizer`: the policy's. `longest`: tokens of the longest sequence. Raises TeacherError that says what does not fit.
        """
        scores = Scores([])
        try:
            async with asyncio.timeout(self.deadline):
                for server in self.servers():
                    await self._check_one(server, tokenizer, longest, scores)
        except TimeoutError:
            trouble = "; ".join(scores.trouble[-3:]) or "no answer"
            raise TeacherError(f"the teacher could not be checked in {self.deadline:g} s (teacher.deadline): {trouble}") from None

    async def _check_one(self, server: Endpoint, tokenizer: Any, longest: int, scores: Scores) -> None:
        answer, address = await self._ask("/v1/models", None, scores, server)
        contexts = {name: context for name, _, context in wire.models_of(answer)}
        names = list(contexts) if self._version is None else list(contexts)[:1]  # the run's own servers list their adapters behind it
        if self.model is None:
            if len(names) != 1:
                raise TeacherError(f"{address} serves {len(names)} models ({', '.join(names[:5])}); name the teacher: teacher.model=NAME")
            self.model = names[0]
        if self.model not in names:
            raise TeacherError(f"{address} has no model {self.model} (teacher.model); it serves {', '.join(names[:5])}")
        context = contexts[self.model]  # 0: not known
        if 0 < context <= longest:
            raise TeacherError(
                f"the teacher's context is too short: samples have up to seq_len={longest} tokens and a request needs one more, but "
                f"{address} takes {context}. Serve it with --max-model-len {longest + 1} or more, or lower seq_len"
            )
        if context:
            self.context = min(context, self.context or context)
        texts = probe_texts(tokenizer, longest)
        body = {"model": self.model, "prompt": texts, "prompt_logprobs": 0, "max_tokens": 1, "add_special_tokens": False}
        answer, _ = await self._ask("/v1/completions", body, scores, server)
        for text, entries in zip(texts, _entries(answer, len(texts), address), strict=True):
            ours = [str(token) for token in tokenizer.encode(text, add_special_tokens=False)]
            theirs = [next(iter(entry)) for entry in entries[1:] if entry]
            if len(entries) != len(ours) or theirs != ours[1:]:
                raise TeacherError(
                    f"the teacher at {address} has another tokenizer than the policy, so its log-probabilities would be of other tokens: "
                    f"{text[:40]!r} is the tokens {', '.join(ours[1:8])} … here and {', '.join(theirs[:7])} … there. "
                    "Use a teacher with the policy's vocabulary"
                )


def probe_texts(tokenizer: Any, longest: int) -> list[str]:
    """Texts with tokens from all over a vocabulary, and all special ones: two tokenizers that agree on them are the same.

    Each has at most `longest` tokens. A server does not say which token is the first, so all begin with the same one.
    """
    special = set(tokenizer.all_special_ids)
    spread = dict.fromkeys(int(token) for token in np.linspace(0, len(tokenizer) - 1, min(PROBED, len(tokenizer))))
    words = [tokenizer.decode([token]) for token in spread if token not in special]
    words = [word for word in words if word and "\ufffd" not in word] + list(tokenizer.all_special_tokens)
    texts = ["0"]
    for word in words:
        if len(tokenizer.encode(texts[-1] + word, add_special_tokens=False)) > min(longest, 32):
            texts.append("0")
        texts[-1] += word
    return texts


def _read(answer: bytes, sequences: Sequence[Int], address: str) -> Iterable[Float]:
    """[L] of each sequence. Raises TeacherError if the answer is about other tokens."""
    for ids, entries in zip(sequences, _entries(answer, len(sequences), address), strict=True):
        if len(entries) != len(ids):
            raise TeacherError(f"{address} returned {len(entries)} log-probabilities for {len(ids)} tokens")
        logprobs = np.zeros(len(ids), dtype=np.float32)
        for place in range(1, len(ids)):
            entry = (entries[place] or {}).get(str(ids[place]))
            if entry is None:
                raise TeacherError(f"{address} returned no log-probability of token {ids[place]} at place {place}; it scored other tokens")
            if entry.logprob != entry.logprob:
                raise TeacherError(f"{address} returned NaN for token {ids[place]} at place {place}")
            logprobs[place] = max(entry.logprob, LOWEST)
        yield logprobs


def _entries(answer: bytes, count: int, address: str) -> list[list[dict[str, _Entry] | None]]:
    """Prompt log-probabilities by sequence, in the order of the request."""
    choices = sorted(_decoded(answer, _Completion, address).choices, key=lambda choice: choice.index)
    if len(choices) != count or any(choice.prompt_logprobs is None for choice in choices):
        raise TeacherError(
            f"{address} returns no prompt log-probabilities ({len(choices)} choices for {count} prompts); a teacher must know "
            "`prompt_logprobs` in a request, as vLLM does"
        )
    return [choice.prompt_logprobs or [] for choice in choices]


def _decoded(answer: bytes, kind: Any, address: str) -> Any:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise TeacherError(f"{address} gave an answer that cannot be read: {error}; it begins with {answer[:100]!r}") from error


def _said(content: bytes) -> str:
    return content[:300].decode(errors="replace").strip()
