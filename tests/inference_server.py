"""What the tests of the inference room share: a tiny random model, policy versions of it, and a real server process."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from run_servers import Servers
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlx.config.load import load_run, to_yaml
from rlx.config.schema import Config, HardwareConfig, ModelConfig, WarmStartConfig
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoints
from rlx.models.policy import PolicyModel
from rlx.models.tiny import VOCABULARY, build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.parallel.transfer import LOOPBACK
from rlx.paths import COMPLETE, RunPaths
from rlx.types import Turn
from rlx.weights.memory import Offers, sender_of
from rlx.weights.saving import facts
from rlx.weights.subscribe import Subscriber

CONTEXT = 256
EXACT = 1e-4  # nats, float32 against float32
EOS = VOCABULARY.index("<|im_end|>")
START = "from rlx.roles import inference; inference.end_at_once(inference.main)"


def make_model(folder: Path, *, tied: bool, seed: int, dtype: str = "float32", context: int = CONTEXT, experts: int = 0) -> PreTrainedModel:
    """A random Qwen3 of the tiny size, saved with its tokenizer. `experts`: of each layer; 0: a dense model."""
    size = WarmStartConfig()
    torch.manual_seed(seed)
    kind, config_class, more = Qwen3ForCausalLM, Qwen3Config, {}
    if experts:
        kind, config_class = Qwen3MoeForCausalLM, Qwen3MoeConfig
        more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    model = kind(
        config_class(
            **more,
            vocab_size=len(VOCABULARY),
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_hidden_layers,
            num_attention_heads=size.num_attention_heads,
            num_key_value_heads=size.num_key_value_heads,
            head_dim=size.head_dim,
            max_position_embeddings=context,
            tie_word_embeddings=tied,
            initializer_range=0.1,  # peaked enough that a wrong weight shows
            eos_token_id=EOS,
            bos_token_id=None,
            dtype="float32",
        )
    ).eval()
    model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    build_tokenizer(context).save_pretrained(folder)
    return model


def seal(folder: Path, version: int) -> Path:
    """Write the `COMPLETE` marker for what is in the folder."""
    files = {
        path.name: {"size": path.stat().st_size, "xxh3": xxhash.xxh3_64_hexdigest(path.read_bytes())} for path in sorted(folder.iterdir())
    }
    tensors = {name: facts(tensor) for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    (folder / COMPLETE).write_text(json.dumps({"version": version, "files": files, "tensors": tensors}))
    return folder


class Run:
    """A run directory with policy versions that the test can score, and at most one living server."""

    def __init__(
        self,
        root: Path,
        *,
        tied: bool,
        port: int = 0,
        dtype: str = "float32",
        vllm: dict[str, Any] | None = None,
        context: int = CONTEXT,
        experts: int = 0,
        device: str = "cpu",
    ) -> None:
        self.paths = RunPaths(root)
        self.tied, self.dtype, self.experts = tied, dtype, experts
        self.models = {0: make_model(root / "model", tied=tied, seed=0, dtype=dtype, context=context, experts=experts)}
        config = Config(max_steps=1, seq_len=context)
        config.model = ModelConfig(
            name="tiny",
            dtype=dtype,
            context_length=context,
            num_parameters=0.8e6,
            hidden_size=128,
            num_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(VOCABULARY),
            num_experts=experts or None,
        )
        config.sampling.max_tokens = 16
        config.orchestrator.batch_size = config.orchestrator.rollouts_per_example = 8
        config.hardware = HardwareConfig(name=device, device=device, shared=device == "cuda", gpus_per_node=int(device == "cuda"))
        config.inference.kv_cache_gb = 0.25
        config.inference.port = port
        config.inference.vllm = vllm or {}
        self.paths.config.write_text(to_yaml(config))
        self.paths.initial_model.write_text(f"{root / 'model'}\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = root / "server.log"

    def version(self, version: int) -> Path:
        """The folder of a policy version, made on first use with weights of its own."""
        folder = self.paths.weights_of(version)
        if version not in self.models:
            self.models[version] = make_model(folder, tied=self.tied, seed=version, dtype=self.dtype, experts=self.experts)
            seal(folder, version)
        return folder

    def start(self, program: str = START) -> subprocess.Popen[bytes]:
        endpoint_file(self.paths, 0).unlink(missing_ok=True)
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", program, "--run-dir", str(self.paths.root)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        return self.process

    def ready(self, timeout: float = 600) -> list[Endpoint]:
        """The endpoint of the server, when it serves."""
        assert self.process is not None

        def tick() -> None:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]

        return read_endpoints(self.paths, 1, timeout, tick)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 300) -> int:
        """Signal the server and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()

    @torch.no_grad()
    def worst(self, turns: Iterable[Turn], temperature: float) -> float:
        """Largest |log-probability by the server − by Hugging Face under the version that the token claims|, over all tokens."""
        worst = 0.0
        for turn in turns:
            ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids])).long()
            for version in set(turn.versions.tolist()):
                logits = self.models[version](ids[None], use_cache=False).logits[0, len(turn.prompt_ids) - 1 : -1]
                scores = torch.log_softmax(logits.double() / temperature, dim=-1)
                found = scores.gather(1, ids[len(turn.prompt_ids) :, None])[:, 0].numpy()
                mine = turn.versions == version
                worst = max(worst, float(np.abs(found - turn.logprobs)[mine].max()))
        return worst

    @torch.no_grad()
    def worst_kept(self, turns: Iterable[Turn]) -> float:
        """Like `worst` at temperature 1, for requests that kept their keys and values at updates.

        A version computed the keys and values of the tokens that it read: the prompt, or the token before the first that it sampled, up
        to the one before its last. Later versions attend to these.
        """
        worst = 0.0
        for turn in turns:
            ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids])).long()
            starts = [0, *(np.flatnonzero(np.diff(turn.versions)) + len(turn.prompt_ids)).tolist(), len(ids) - 1]
            cache, scores = DynamicCache(), []
            for version, start, end in zip(dict.fromkeys(turn.versions.tolist()), starts, starts[1:], strict=False):
                logits = self.models[version](ids[None, start:end], past_key_values=cache, use_cache=True).logits[0]
                scores.append(torch.log_softmax(logits.double(), dim=-1))
            found = torch.cat(scores)[len(turn.prompt_ids) - 1 :].gather(1, ids[len(turn.prompt_ids) :, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(found - turn.logprobs).max()))
        return worst


def from_memory(run: Run, kind: str = "gloo") -> Run:
    """Have the run's server take weights from a trainer's memory, too."""
    config = load_run(run.paths.root)
    config.weight_broadcast.type = kind
    run.paths.config.write_text(to_yaml(config))
    run.paths.endpoints.mkdir(parents=True, exist_ok=True)
    return run


def split_over_two(run: Run) -> Run:
    """Have the run's server divide the model between two workers."""
    config = load_run(run.paths.root)
    config.hardware.tensor_parallel = 2
    run.paths.config.write_text(to_yaml(config))
    return run


class MemoryTrainer:
    """The trainer's end of transfers from memory (`from_memory`). It sends the weights of `run.version`."""

    def __init__(self, run: Run, timeout: float = 300.0, host: str = LOOPBACK, *, kind: str = "gloo", device: str = "cpu") -> None:
        self.run, self.device = run, device
        self.offers = Offers(self.model(0), one_process(device), run.paths, torch.float32, timeout, sender_of(kind), host)

    def model(self, version: int) -> PolicyModel:
        self.run.version(version)
        return PolicyModel(copy.deepcopy(self.run.models[version]).to(self.device))  # it changes how the model computes

    def offer(self, version: int) -> None:
        self.offers.source.model = self.model(version)
        self.offers.offer(version)

    async def update(self, client: Servers, timeout: float = 300.0) -> None:
        """`timeout`: the server's `weight_broadcast.timeout`, in seconds."""
        found = Subscriber(self.run.paths).latest()
        assert found is not None
        telling = asyncio.create_task(client.fleet.update(found, timeout))
        while not telling.done():
            await asyncio.to_thread(self.offers.send)
            await asyncio.sleep(0.002)
        await telling
        client.sampler.version = found.version


def prompts(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    """`count` prompts of random printable tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(10, len(VOCABULARY), length).tolist() for _ in range(count)]


def same(one: Turn, other: Turn) -> bool:
    """Bit for bit the same tokens and log-probabilities."""
    return np.array_equal(one.completion_ids, other.completion_ids) and one.logprobs.tobytes() == other.logprobs.tobytes()


def wait_until(done, what: str, timeout: float = 300) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


async def sample(client: Servers, ids: list[int], seed: int, **sampling: Any) -> Turn:
    return await client.generate(ids, {"max_tokens": 60, "seed": seed, **sampling}, f"request {seed}", seed)


async def running(client: Servers, number: int) -> None:
    """Wait until the server works on that many requests or more."""
    async with asyncio.timeout(300):
        while (await client.fleet.stats())["perf/running"] < number:
            await asyncio.sleep(0.02)


async def under_load(client: Servers, ids: list[list[int]], change: Callable[[], Awaitable[None]]) -> list[Turn]:
    """What was sampled by one lane of requests per prompt, each with one request in flight from before `change` until after it."""
    turns: list[Turn] = []
    changed = False

    async def lane(number: int) -> None:
        seed = number
        while not changed:
            turns.append(await sample(client, ids[number], seed, max_tokens=200))
            seed += len(ids)

    lanes = [asyncio.create_task(lane(number)) for number in range(len(ids))]
    await change()
    changed = True
    await asyncio.gather(*lanes)
    return turns
