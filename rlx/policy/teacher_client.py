"""A teacher behind endpoints: given token sequences, it returns the log-probability of every token under the teacher.

    sequences ─► POST /v1/completions {prompt: [ids, …], prompt_logprobs: 0} ─► float32 [L] each

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
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rlx.arrays import Float, Int
from rlx.inference import wire
from rlx.inference.client import CONNECT
from rlx.inference.endpoints import Endpoint

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds before the second attempt at a request, doubled for each further one up to the longest
LOWEST = -100.0  # nats; lower ones (vLLM reports -9999 for an impossible token) would be the only thing that a gradient sees
PROBED = 256  # tokens of the vocabulary whose text is tokenized by both
AGAIN = (408, 409, 425, 429)


class TeacherError(RuntimeError):
    """The teacher refused a request, or does not fit the policy."""


class _Entry(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[str, _Entry] | None]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class TeacherClient:
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
        self.trouble: list[str] = []  # the different failures so far
        self._retries = 0
        self._version, self._adapter = version if own is not None else None, adapter
        self._free = asyncio.Semaphore(max_concurrent * len(self.servers()))
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0

    async def __aenter__(self) -> TeacherClient:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=self.timeout, sock_connect=CONNECT)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    def take_retries(self) -> int:
        """How many attempts have failed and were made again since the last call."""
        retries, self._retries = self._retries, 0
        return retries

    # -- scoring

    async def score(self, sequences: Sequence[Int]) -> list[Float]:
        """The log-probabilities [L] of these sequences, by one request; 0 for the first token of each.

        Raises TeacherError for a refusal; other failures are tried again without end.
        """
        prompts = [ids.tolist() for ids in sequences]
        async with self._free:
            answer, address = await self._ask("/v1/completions", lambda: _request(prompts, self._adapter() or self.model))
        found = []
        for ids, entries in zip(sequences, _entries(answer, len(sequences), address), strict=True):
            if len(entries) != len(ids):
                raise TeacherError(f"{address} returned {len(entries)} log-probabilities for {len(ids)} tokens")
            logprobs = np.zeros(len(ids), dtype=np.float32)
            for place in range(1, len(ids)):
                entry = (entries[place] or {}).get(str(ids[place]))
                if entry is None or entry.logprob != entry.logprob:
                    what = "no log-probability of" if entry is None else "NaN for"
                    raise TeacherError(f"{address} returned {what} token {ids[place]} at place {place}")
                logprobs[place] = max(entry.logprob, LOWEST)
            found.append(logprobs)
        return found

    async def _ask(self, path: str, body: Callable[[], Any] | None, only: Endpoint | None = None) -> tuple[bytes, str]:
        """(the answer, the address that gave it), after retries without end: the caller has the deadline.

        `body` is made for each attempt, because an adapter may have another name by then; None: GET.
        """
        wait = FIRST_WAIT
        while True:
            servers = [only] if only is not None else self.servers()
            server = servers[self._turn % len(servers)].refreshed()
            self._turn += 1
            try:
                trouble = await self._stale(server)
                if not trouble:
                    status, content = await self._send(server, path, None if body is None else body())
                    if status < 400:
                        return content, server.url
                    trouble = f"{server.url}{path} ({status}): {content[:300].decode(errors='replace').strip()}"
                    lacks_adapter = status == 404 and self._adapter() is not None  # a server that has restarted does not have it yet
                    if status not in AGAIN and status < 500 and not lacks_adapter:
                        raise TeacherError(f"the teacher refused a request: {trouble}")
            except (TimeoutError, aiohttp.ClientError) as error:
                slow = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
                what = f"did not answer in {self.timeout:g} s (teacher.timeout)" if slow else f"cannot be reached: {error}"
                trouble = f"{server.url} {what}"
            if trouble not in self.trouble:
                self.trouble.append(trouble)
                log.warning("the teacher: %s; trying again", trouble)
            self._retries += 1
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT)

    async def _stale(self, server: Endpoint) -> str:
        """Why one of the run's servers must not be asked yet: after a restart it has the initial weights for a while. Empty: it may.

        An adapter has its version in its name, so a server without it refuses the request.
        """
        if self._version is None or self._adapter() is not None:
            return ""
        status, content = await self._send(server, wire.LABEL, None)
        label = str(_decoded(content, dict, server.url).get("weight_version")) if status == 200 else f"? ({status})"
        has = wire.parse_label(label)
        late = has is None or has[0] < self._version()
        return f"{server.url} has version {label}, the run has {self._version()}" if late else ""

    async def _send(self, server: Endpoint, path: str, body: Any) -> tuple[int, bytes]:
        """(status, content) of one request; `body` of None: GET."""
        assert self._session is not None, "used outside `async with`"
        headers = {**(server.headers if server.api_key else {}), "Content-Type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request("GET" if body is None else "POST", server.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.read()

    # -- before any work

    async def check(self, tokenizer: Any, longest: int) -> None:
        """Find the model, and make sure that every server scores the policy's tokens. Waits for a server up to the deadline.

        `tokenizer`: the policy's. `longest`: tokens of the longest sequence. Raises TeacherError that says what does not fit.
        """
        try:
            async with asyncio.timeout(self.deadline):
                for server in self.servers():
                    await self._check_one(server, tokenizer, longest)
        except TimeoutError:
            trouble = "; ".join(self.trouble[-3:]) or "no answer"
            raise TeacherError(f"the teacher could not be checked in {self.deadline:g} s (teacher.deadline): {trouble}") from None

    async def _check_one(self, server: Endpoint, tokenizer: Any, longest: int) -> None:
        answer, address = await self._ask("/v1/models", None, server)
        contexts = {name: context for name, _, context in wire.models_of(answer)}
        names = list(contexts) if self._version is None else list(contexts)[:1]  # the run's own servers list their adapters behind it
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            raise TeacherError(
                f"{address} serves {', '.join(names[:5])}, and teacher.model={self.model or 'null'} is not the one of them.\n"
                "  fix: name the teacher: teacher.model=NAME"
            )
        context = contexts[self.model]  # 0: not known
        if 0 < context <= longest:
            raise TeacherError(
                f"the teacher's context is too short: samples have up to seq_len={longest} tokens and a request needs one more, but "
                f"{address} takes {context}.\n  fix: serve it with --max-model-len {longest + 1} or more, or lower seq_len"
            )
        if context:
            self.context = min(context, self.context or context)
        texts = probe_texts(tokenizer, longest)
        answer, _ = await self._ask("/v1/completions", lambda: _request(texts, self.model), server)
        for text, entries in zip(texts, _entries(answer, len(texts), address), strict=True):
            ours = [str(token) for token in tokenizer.encode(text, add_special_tokens=False)]
            theirs = [next(iter(entry)) for entry in entries[1:] if entry]
            if len(entries) != len(ours) or theirs != ours[1:]:
                raise TeacherError(
                    f"the teacher at {address} has another tokenizer than the policy, so its log-probabilities would be of other tokens: "
                    f"{text[:40]!r} is the tokens {', '.join(ours[1:8])} … here and {', '.join(theirs[:7])} … there.\n"
                    "  fix: use a teacher with the policy's vocabulary"
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


def _request(prompts: Sequence[Any], model: str | None) -> dict[str, Any]:
    fixed = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0, "add_special_tokens": False}
    return {"model": model, "prompt": prompts, **fixed}


def _entries(answer: bytes, count: int, address: str) -> list[list[dict[str, _Entry] | None]]:
    """Prompt log-probabilities by sequence, in the order of the request."""
    choices = sorted(_decoded(answer, _Completion, address).choices, key=lambda choice: choice.index)
    if len(choices) != count:
        raise TeacherError(f"{address} returned {len(choices)} choices for {count} prompts")
    return [choice.prompt_logprobs for choice in choices]


def _decoded(answer: bytes, kind: Any, address: str) -> Any:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise TeacherError(
            f"{address} gave an answer that cannot be read ({error}); it begins with {answer[:100]!r}.\n"
            "  fix: a teacher must know `prompt_logprobs` in a request, as vLLM does"
        ) from error
