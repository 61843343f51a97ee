"""Unusual heads on real vLLM on CPU: a tied head stored a second time, a head untied by its files, and heads of 16-bit models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_server import EXACT, START, MemoryTrainer, Run, from_memory, prompts, sample, seal
from run_servers import Servers
from safetensors.torch import load_file, save_file

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import PolicyState, WeightsGone
from rlx.models.load import load_policy
from rlx.parallel import transfer
from rlx.parallel.mesh import one_process
from rlx.parallel.transfer import Announced, Group
from rlx.paths import COMPLETE
from rlx.types import Turn
from rlx.weights.publish import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.long]
ALONE = one_process(torch.device("cpu"))
SEPARATE = "from rlx.roles import inference\ninference.runs_in_process = lambda config: False\ninference.end_at_once(inference.main)\n"

PLAIN_RELOAD = f"""
from rlx.inference.server import start
start.keep_weights = lambda: None
{START}
"""


def store_head(run: Run, head: torch.Tensor) -> None:
    """Store a head beside the embedding although the configuration ties them, as some hub files do."""
    file = run.paths.root / "model" / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": head}, file, metadata={"format": "pt"})


def scoring(hf: Any) -> Any:
    """The trainer's model, with a method that scores a plain sequence."""
    hf.set_attn_implementation("eager")
    return hf.eval()


def trained_version(run: Run, version: int) -> Path:
    """Change all weights of the model and write it as the trainer does."""
    policy = load_policy(str(run.paths.root / "model"), mesh=ALONE, dtype="float32")
    with torch.no_grad():
        for parameter in policy.hf.parameters():
            parameter.mul_(1 + 0.1 * version)
    Publisher.of(policy, ALONE, run.paths, source=str(run.paths.root / "model"), dtype=torch.float32).ensure(version)
    run.models[version] = scoring(policy.hf)
    return run.paths.weights_of(version)


async def one_update(endpoints: list[Endpoint], folder: Path) -> tuple[list[Turn], list[PolicyState]]:
    async with Servers(endpoints) as servers:
        await servers.fleet.wait_ready(300)
        before = [await sample(servers, prompts(1)[0], 0)]
        await servers.update(folder, 1)
        after = [await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))]
        return before + after, await servers.fleet.states()


@pytest.mark.parametrize(
    ("equal", "program"),
    [(False, None), (True, None), (False, SEPARATE)],
    ids=["different", "equal", "different, in a process"],
)
def test_a_tied_model_whose_files_store_a_head_is_served_as_it_is_trained(tmp_path: Path, equal: bool, program: str | None) -> None:
    """Equal: trainer and engine tie the head. Different: both untie it and use the stored head, from version 0 on."""
    run = Run(tmp_path, tied=True)
    embedding = run.models[0].get_input_embeddings().weight.detach()
    store_head(run, embedding.clone() if equal else embedding.flip(0).contiguous())
    run.models[0] = scoring(load_policy(str(run.paths.root / "model"), mesh=ALONE, dtype="float32").hf)
    folder = trained_version(run, 1)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not equal
    run.start(*([program] if program else []))
    turns, (state,) = asyncio.run(one_update(run.ready(), folder))
    run.stop()
    assert [set(turn.versions.tolist()) for turn in turns] == [{0}, {1}, {1}, {1}]
    assert run.worst(turns, 1.0) < EXACT
    assert state.attested == 1.0


def test_a_version_that_vllm_itself_reloads_is_served_as_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where no layer keeps its original weight: the worker hands the tensors to vLLM, which loads and packs layer by layer.

    Version 1 comes from files. The transfer of version 2 breaks when vLLM has one of three tensors of a fused layer; then it comes whole.
    """
    run = from_memory(Run(tmp_path, tied=False))
    folder = trained_version(run, 1)
    trainer, send = MemoryTrainer(run), Group.send
    monkeypatch.setattr(transfer, "SMALL", 1)  # at both ends: each tensor is a message
    run.start("from rlx.parallel import transfer\ntransfer.SMALL = 1" + PLAIN_RELOAD)

    def breaks(group: Group, announced: Announced, tensors: Any) -> None:
        def first() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if name == "model.layers.1.self_attn.k_proj.weight":
                    time.sleep(1)  # what was sent arrives
                    raise RuntimeError("lost")
                yield name, tensor

        send(group, announced, first())

    async def conversation(endpoints: list[Endpoint]) -> tuple[list[Turn], PolicyState]:
        turns, _ = await one_update(endpoints, folder)
        async with Servers(endpoints) as servers:
            trainer.offer(2)
            monkeypatch.setattr(Group, "send", breaks)
            with pytest.raises(WeightsGone, match="did not arrive"):
                await trainer.update(servers)
            monkeypatch.setattr(Group, "send", send)
            await trainer.update(servers)
            turns += [await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))]
            return turns, (await servers.fleet.states())[0]

    turns, state = asyncio.run(conversation(run.ready()))
    run.stop()
    assert [set(turn.versions.tolist()) for turn in turns] == [{0}, {1}, {1}, {1}, {2}, {2}, {2}]
    assert run.worst(turns, 1.0) < EXACT
    assert 0 < state.attested < 1, "what vLLM packed on CPU cannot be compared, and is named"
    assert any("qkv_proj" in name or "q_proj" in name for name in state.not_compared)


@torch.no_grad()
def leave_only_the_head(run: Run, version: int) -> Path:
    """Make the layers of a version add nothing, because their rounding depends on the order of sums. Then only the head rounds."""
    folder = run.version(version) if version else run.paths.root / "model"
    model = run.models[version]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.norm.weight.fill_(4.0)
    (folder / COMPLETE).unlink(missing_ok=True)
    model.save_pretrained(folder)
    return seal(folder, version) if version else folder


def mismatch(root: Path, vllm: dict) -> tuple[float, float]:
    """Mean |log-probability of a bf16 engine − of bf16 layers with a float32 head|, before and after an update. All is attested."""
    run = Run(root, tied=False, dtype="bfloat16", vllm=vllm)  # with a tied head such a model repeats the last token
    leave_only_the_head(run, 0)
    folder = leave_only_the_head(run, 1)
    run.start()
    turns, (state,) = asyncio.run(one_update(run.ready(), folder))
    run.stop()
    assert state.attested == 1.0
    means = []
    for turn in turns:
        (version,) = set(turn.versions.tolist())
        model, ids = run.models[version], torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids])).long()
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, len(turn.prompt_ids) - 1 : -1]
            logits = hidden.float() @ model.lm_head.weight.float().T
        found = logits.log_softmax(-1).gather(1, ids[len(turn.prompt_ids) :, None])[:, 0].numpy()
        means.append(np.abs(found - turn.logprobs).mean())
    return float(means[0]), float(np.mean(means[1:]))


def test_the_head_of_a_16_bit_model_does_not_round(tmp_path: Path) -> None:
    assert max(mismatch(tmp_path, {})) < 1e-4


def test_a_head_of_16_bits_would_round(tmp_path: Path) -> None:
    assert min(mismatch(tmp_path, {"hf_overrides": {"head_dtype": "model"}})) > 3e-3
