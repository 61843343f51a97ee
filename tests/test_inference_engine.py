"""How `PolicyEngine` and `PolicyApp` handle requests that fail: vLLM's classes around a core that samples nothing."""

from __future__ import annotations

import asyncio
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx.inference.protocol import INT, GenerateRequest, Sampling

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


def engine_with(add_request: Any) -> Any:
    """A `PolicyEngine` whose core calls `add_request(core, request)` for each request."""
    from rlx.inference.server.core import InProcessCore
    from rlx.inference.server.engine import PolicyEngine

    class Core(InProcessCore):
        def __init__(self) -> None:
            self._open()
            self.aborted: list[str] = []

        async def add_request_async(self, request: Any) -> None:
            await add_request(self, request)

        async def abort_requests_async(self, request_ids: list[str]) -> None:
            self.aborted += request_ids

    config = SimpleNamespace(max_model_len=64, hf_config=SimpleNamespace(tie_word_embeddings=False))
    engines = SimpleNamespace(data_parallel_size=2)
    whole = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1), parallel_config=engines, lora_config=None)
    inputs = SimpleNamespace(process_inputs=lambda *_: SimpleNamespace())
    llm: Any = SimpleNamespace(engine_core=Core(), model_config=config, input_processor=inputs, vllm_config=whole)
    return PolicyEngine(llm, Path("nowhere"), {})


def asked() -> GenerateRequest:
    return GenerateRequest("r", np.zeros(3, INT).tobytes(), Sampling(max_tokens=4), 0)


def test_a_request_given_up_while_it_is_handed_over_does_not_hold_up_the_update_that_waits_for_it() -> None:
    async def main() -> None:
        async def never(core: Any, request: Any) -> None:
            await asyncio.Event().wait()

        engine = engine_with(never)
        request = asyncio.create_task(engine.generate(asked()))
        await asyncio.sleep(0)
        draining = asyncio.create_task(engine._drain(16))
        await asyncio.sleep(0)
        assert not draining.done()
        request.cancel()
        await asyncio.wait_for(draining, 60)
        assert engine.core.sinks == {}
        assert engine.core.aborted == ["r#0"]

    asyncio.run(main())


def test_as_many_requests_are_drained_as_all_engines_run_together() -> None:
    async def main() -> None:
        async def never(core: Any, request: Any) -> None:
            await asyncio.Event().wait()

        engine = engine_with(never)  # two engines of one sequence each
        requests = [asyncio.create_task(engine.generate(asked())) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.wait_for(engine._drain(16), 60)  # one of three is not running, so it does not wait
        requests.pop().cancel()
        await asyncio.sleep(0)
        draining = asyncio.create_task(engine._drain(16))
        await asyncio.sleep(0)
        assert not draining.done()
        for request in requests:
            request.cancel()
        await asyncio.wait_for(draining, 60)

    asyncio.run(main())


def test_a_request_that_cannot_be_handed_over_is_forgotten() -> None:
    async def main() -> None:
        async def dead(core: Any, request: Any) -> None:
            raise ConnectionError("the engine is gone")

        engine = engine_with(dead)
        with pytest.raises(ConnectionError):
            await engine.generate(asked())
        assert engine.core.sinks == {}

    asyncio.run(main())


def test_an_error_of_the_engine_is_no_answer_of_the_model() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    from rlx.inference.server.engine import RequestFailed

    async def failing(core: Any, request: Any) -> None:
        core._take(EngineCoreOutputs(outputs=[EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)]))

    async def main() -> None:
        with pytest.raises(RequestFailed, match="failed request r after 0 tokens"):
            await engine_with(failing).generate(asked())

    asyncio.run(main())


def test_a_request_that_fails_in_a_way_that_nobody_foresaw_is_answered_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    import msgspec

    from rlx.inference.protocol import Answer, Asked
    from rlx.inference.server.app import Session

    class Engine:
        version = 0

        async def generate(self, _: Any) -> None:
            raise KeyError("a word that the tokenizer lost")

    async def main() -> list[Answer]:
        sent: asyncio.Queue[bytes] = asyncio.Queue()
        messages = [msgspec.msgpack.encode(Asked([(7, asked())], []))]

        async def receive() -> Any:
            while not messages:
                await asyncio.sleep(3600)
            return {"type": "websocket.receive", "bytes": messages.pop()}

        async def send(message: Any) -> None:
            sent.put_nowait(message["bytes"])

        running = asyncio.create_task(Session(Engine(), send).run(receive))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            answers = msgspec.msgpack.decode(await sent.get(), type=list[Answer])
        running.cancel()
        return answers

    (answer,) = asyncio.run(main())
    assert (answer.number, answer.status) == (7, 500)
    assert answer.error == "KeyError: 'a word that the tokenizer lost'"
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), -1.0)}, "logit_bias has 1025 entries; engines on GPUs take 1024 at most"),
        ({"min_tokens": 1, "stop_token_ids": list(range(129))}, "min_tokens with 129 token ids that end an answer; .* take 128 at most"),
        ({"max_tokens": 2**31 - 3}, "max_tokens is 2147483645; engines on GPUs take 2147483647 with the prompt at most"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must fit into 64 bits with a sign"),
    ],
    ids=["biases", "stops", "tokens", "seed"],
)
def test_what_would_end_an_engine_on_a_gpu_is_refused(keys: dict[str, Any], why: str) -> None:
    from rlx.inference.server.engine import BadRequest

    request = GenerateRequest("r", np.zeros(3, INT).tobytes(), Sampling(**{"max_tokens": 4} | keys), 0)

    async def main() -> None:
        with pytest.raises(BadRequest, match=why):
            await engine_with(None).generate(request)

    asyncio.run(main())


def test_routes_of_vllm_that_could_not_be_built_are_built_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.inference.server.app import PolicyApp

    tries = 0

    async def build(self: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ImportError("no such module")

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await send({"status": 200})

        return application

    monkeypatch.setattr(PolicyApp, "_build_vllm", build)

    async def main() -> list[Any]:
        app, sent = PolicyApp(None, "key", {}), []  # type: ignore[arg-type, var-annotated]

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"authorization", b"Bearer key")]}
        for _ in range(2):
            await app(scope, None, send)  # type: ignore[arg-type]
        return sent

    first, body, second = asyncio.run(main())
    assert first["status"] == 500
    assert b"could not be built: ImportError: no such module" in body["body"]
    assert second["status"] == 200


def test_the_workers_of_an_engine_meet_in_a_file_that_goes_away_with_the_process() -> None:
    import subprocess
    import sys

    from torch.distributed import FileStore

    from rlx.inference.server.rendezvous import file_in_memory, leave_no_files

    leave_no_files()
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    assert uniproc_executor.get_file_store_init_method is multiproc_executor.get_file_store_init_method is file_in_memory
    path = file_in_memory().removeprefix("file://")
    assert Path(path).name != Path(file_in_memory()).name, "vLLM names memory after it, which a killed server leaves behind"
    store = FileStore(path, 2)
    other = f"from torch.distributed import FileStore; FileStore({path!r}, 2).set('word', 'from another process')"
    subprocess.run([sys.executable, "-c", other], check=True)
    assert store.get("word") == b"from another process"


def test_an_update_by_hand_needs_only_a_folder_and_vllms_own_body_is_told_what_to_send(tmp_path: Path) -> None:
    from rlx.inference.protocol import PolicyState
    from rlx.inference.server.app import PolicyApp

    loaded: list[tuple[Path, int]] = []

    class Engine:
        version = 3

        async def update_weights(self, folder: Path, version: int, *_: Any) -> None:
            loaded.append((folder, version))

        def state(self) -> PolicyState:
            return PolicyState(self.version, "model", 64)

    (tmp_path / "COMPLETE").write_text('{"version": 12}')

    async def answer(body: bytes) -> tuple[int, bytes]:
        app, sent = PolicyApp(Engine(), "key", {}), []  # type: ignore[arg-type, var-annotated]

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", b"Bearer key")]
        await app({"type": "http", "method": "POST", "path": "/update_weights", "headers": headers}, receive, send)
        return sent[0]["status"], sent[1]["body"]

    def told(body: bytes) -> tuple[int, bytes]:
        return asyncio.run(answer(body))

    assert told(b'{"weight_dir": "%s"}' % str(tmp_path).encode())[0] == 200
    assert loaded == [(tmp_path, 12)]
    assert told(b'{"weight_dir": "%s", "version": 7}' % str(tmp_path).encode())[0] == 200
    assert loaded[1:] == [(tmp_path, 7)]
    status, why = told(b'{"update_info": {}}')
    assert (status, b"weight_dir" in why, b"update_info" in why) == (400, True, True)
    status, why = told(b'{"weight_dir": "/nowhere"}')
    assert (status, b"names no version" in why) == (422, True)
    assert len(loaded) == 2


@pytest.mark.parametrize(("layer", "said"), [("ParallelLMHead", False), ("YaRNScalingRotaryEmbedding", False), ("FusedMoE", True)])
def test_a_layer_whose_weights_may_be_lost_in_an_update_is_warned_of(layer: str, said: bool) -> None:
    """vLLM's experts cannot be compared with the trainer's, so its own warning may be all that speaks of them."""
    from vllm.model_executor.model_loader.reload import layerwise

    from rlx.inference.server.worker import may_be_lost

    words = "%s: Failed to load weights"
    assert f'logger.warning("{words}"' in inspect.getsource(layerwise), "vLLM says it in other words now"
    record = logging.LogRecord(layerwise.__name__, logging.WARNING, "", 0, words, (layer,), None)
    assert may_be_lost(record) == said
    assert may_be_lost(logging.LogRecord(layerwise.__name__, logging.WARNING, "", 0, "another", None, None))
