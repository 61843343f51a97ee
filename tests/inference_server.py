"""What tests on real vLLM share: tiny random models, versions of them as the trainer writes them, and a server in a process of its own."""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from peft import PeftModel
from run_servers import Servers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlx.config.load import to_yaml
from rlx.config.schema import Config, HardwareConfig, LoraConfig, ModelConfig, WarmStartConfig
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoints
from rlx.models.load import load_policy
from rlx.models.lora import adapted
from rlx.models.policy import PolicyModel
from rlx.models.tiny import VOCABULARY, build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.trace import Turn
from rlx.weights.publish import Publisher

T = TypeVar("T")
CONTEXT = 256
EXACT = 1e-4  # nats, float32 against float32
TIE = 1e-5  # between two experts' scores: rounding chooses, and vLLM's rounds otherwise than Hugging Face's
EOS = VOCABULARY.index("<|im_end|>")
ALONE = one_process("cpu")
LORA = LoraConfig(rank=3, alpha=6.0, rslora=True)
HERE = str(Path(__file__).parent)
SABOTAGE = {"worker_extension_cls": "sabotage.Sabotaged"}  # rlx's extension, and ways to damage what it serves
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "experts": {"tied": False, "experts": 4},
    "split": {"tied": True, "tensor_parallel": 2},
    "adapters": {"tied": True, "lora": LORA},
}


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


def publish(folder: Path, model: PreTrainedModel, source: Path, dtype: str = "float32") -> Path:
    """Write a version as the trainer does: `…/weights/step_N`."""
    version, paths = int(folder.name.removeprefix("step_")), RunPaths(folder.parent.parent)
    policy = PolicyModel(copy.deepcopy(model))  # it changes how the model computes
    Publisher.of(policy, ALONE, paths, source=str(source), dtype=getattr(torch, dtype)).ensure(version)
    return folder


def publish_adapter(folder: Path, source: Path, seed: int, lora: LoraConfig = LORA) -> Path:
    """Write an adapter as the trainer does. Those of seed 0 change nothing, as at the start of training."""
    version, paths = int(folder.name.removeprefix("step_")), RunPaths(folder.parent.parent)
    policy = load_policy(str(source), ALONE, dtype="float32", lora=lora, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted(policy.hf).values():
        layer.lora_B.data.normal_(0, 0.1 if seed else 0.0, generator=generator)
    Publisher.of(policy, ALONE, paths, source=str(source), dtype=torch.float32, lora=lora).ensure(version)
    return folder


class Run:
    """A run directory with versions that the test can score, and at most one living server."""

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
        tensor_parallel: int = 1,
        lora: LoraConfig | None = None,
        device: str = "cpu",
    ) -> None:
        self.paths, self.model = RunPaths(root), root / "model"
        self.tied, self.dtype, self.experts, self.lora = tied, dtype, experts, lora
        self.models: dict[int, Any] = {0: make_model(self.model, tied=tied, seed=0, dtype=dtype, context=context, experts=experts)}
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
        config.hardware = HardwareConfig(name=device, device=device, colocate=device == "cuda", gpus_per_node=int(device == "cuda"))
        config.hardware.tensor_parallel = tensor_parallel
        config.lora = lora or config.lora
        config.inference.kv_cache_gb = 0.25
        config.inference.port = port
        config.inference.hung_timeout = 30.0
        config.inference.vllm = vllm or {}
        self.config = config
        self.paths.config.write_text(to_yaml(config))
        self.paths.initial_model.write_text(f"{self.model}\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = root / "server.log"

    def version(self, version: int) -> Path:
        """The folder of a version, made on first use with weights of its own."""
        folder = self.paths.weights_of(version)
        if not folder.exists() and self.lora is not None:
            publish_adapter(folder, self.model, version, self.lora)
            if version:
                self.models[version] = PeftModel.from_pretrained(copy.deepcopy(self.models[0]), folder).eval()
        elif not folder.exists():
            made = self.paths.root / f"made_{version}"
            self.models[version] = make_model(made, tied=self.tied, seed=version, dtype=self.dtype, experts=self.experts)
            publish(folder, self.models[version], made, self.dtype)
        return folder

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start the role of a server. Its processes see the modules in this folder."""
        endpoint_file(self.paths, 0).unlink(missing_ok=True)
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "rlx.roles.inference", "--run-dir", str(self.paths.root)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": HERE, **environment}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self.process

    def ready(self, timeout: float = 600) -> list[Endpoint]:
        """The endpoint of the server, when it serves."""

        def tick() -> None:
            assert self.process.poll() is None, self.log.read_text()[-3000:]

        return read_endpoints(self.paths, 1, timeout, tick)

    def talk(self, conversation: Callable[[Servers], Awaitable[T]], **options: Any) -> T:
        """Run a scene with the server as a new run has it, which begins with version 0."""
        options = {"restart_timeout": 5, "run": secrets.token_hex(4)} | options

        async def whole() -> T:
            async with Servers(self.ready(), **options) as client:
                await client.ready()
                if self.lora is not None:
                    await client.update(self.version(0), 0)
                return await conversation(client)

        return asyncio.run(whole())

    def stop(self, number: int = signal.SIGTERM, timeout: float = 300) -> int:
        """Signal the role and return its exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()

    @torch.no_grad()
    def errors(self, turns: Iterable[Turn], temperature: float = 1.0, min_tokens: int = 0) -> np.ndarray:
        """|log-probability by the server − by Hugging Face under the version that the token claims|, of all tokens [N].

        `min_tokens` of the requests: until then the end of the completion was not among the tokens to sample from. Left out are tokens
        behind one whose second and third expert tie (about one token in 20,000): the other expert is no wrong weight.
        """
        found = []
        for turn in turns:
            ids, start = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids])).long(), len(turn.prompt_ids)
            for version in set(turn.versions.tolist()):
                output = self.models[version](ids[None], use_cache=False, **({"output_router_logits": True} if self.experts else {}))
                logits = output.logits[0, start - 1 : -1].double() / temperature
                logits[:min_tokens, EOS] = -torch.inf
                scores = torch.log_softmax(logits, dim=-1).gather(1, ids[start:, None])[:, 0].numpy()
                asked = turn.versions == version
                if self.experts:
                    best = torch.stack(output.router_logits).topk(3).values  # [layers, tokens, 3]
                    ties = (best[..., 1] - best[..., 2] < TIE).any(0).cumsum(0)[start - 1 : -1]
                    asked &= (ties == 0).numpy()
                found.append(np.abs(scores - turn.logprobs)[asked])
        return np.concatenate(found)

    def worst(self, turns: Iterable[Turn], temperature: float = 1.0, min_tokens: int = 0) -> float:
        """The largest of `errors`."""
        return float(self.errors(turns, temperature, min_tokens).max())


@dataclass
class Engines:
    """Servers by kind (`KINDS`), one at a time: a server takes 20 to 40 seconds of a core to start, and a gigabyte of memory."""

    folder: Callable[[str], Path]
    kind = ""
    run: Run | None = None

    def __call__(self, kind: str) -> Run:
        """The running server of this kind. Another one ends. One that ended starts again."""
        if self.run is None or kind != self.kind or self.run.process is None or self.run.process.poll() is not None:
            self.stop()
            self.kind, self.run = kind, Run(self.folder(kind), **KINDS[kind], vllm=SABOTAGE)
            self.run.start()
            self.run.ready()
        return self.run

    def stop(self) -> None:
        if self.run is not None:
            self.run.stop()
        self.run = None


def prompts(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    """`count` prompts of random printable tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(10, len(VOCABULARY), length).tolist() for _ in range(count)]


def same(one: Turn, other: Turn) -> bool:
    """Bit for bit the same tokens and log-probabilities."""
    return np.array_equal(one.completion_ids, other.completion_ids) and one.logprobs.tobytes() == other.logprobs.tobytes()


def versions_of(turns: Iterable[Turn]) -> set[int]:
    """All versions that sampled a token."""
    return {version for turn in turns for version in turn.versions.tolist()}


def wait_until(done: Callable[[], object], what: str, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it was reaped between the two questions
        return False


async def sample(client: Servers, ids: Sequence[int], seed: int | None, **sampling: Any) -> Turn:
    return await client.generate(ids, {"max_tokens": 60, "seed": seed, **sampling}, f"request {seed}", seed or 0)


async def sample_all(client: Servers, ids: Sequence[Sequence[int]], **sampling: Any) -> list[Turn]:
    """A completion of each prompt, at once. The seed is the prompt's place."""
    return await asyncio.gather(*[sample(client, one, seed, **sampling) for seed, one in enumerate(ids)])


async def running(client: Servers, number: int) -> None:
    """Wait until the server works on that many requests or more."""
    async with asyncio.timeout(300):
        while (await client.fleet.stats())["perf/running"] < number:
            await asyncio.sleep(0.02)


async def generated(run: Run) -> float:
    """All tokens that the server has sampled since it started."""
    async with Client() as client:
        return wire.metrics_of(await client.ask(run.ready()[0], wire.METRICS))["generation_tokens_total"]
