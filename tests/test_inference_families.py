"""Families of models on real vLLM on CPU: what the trainer writes is served with the trainer's log-probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from inference_server import CONTEXT, EOS, EXACT, MemoryTrainer, Run, from_memory, prompts, running, under_load
from run_servers import Servers
from test_inference_heads import ALONE, one_update, scoring, trained_version
from test_models_families import FAMILIES
from trainer_examples import make_model

from rlx.models.load import load_policy
from rlx.models.tiny import VOCABULARY, build_tokenizer
from rlx.types import Turn

SERVED = ("llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen2", "phi3")), "qwen3_moe")
SIZES = {
    "vocab_size": len(VOCABULARY), "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": CONTEXT,
    "eos_token_id": EOS, "bos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_a_trained_version_of_a_family_is_served_as_it_was_trained(name: str, tmp_path: Path) -> None:
    config, keys = FAMILIES[name]
    run = Run(tmp_path, tied=False)
    source = run.paths.root / "model"
    for file in source.iterdir():
        file.unlink()
    make_model(config, **{**SIZES, **keys}).save_pretrained(source)
    build_tokenizer(CONTEXT).save_pretrained(source)
    run.models[0] = scoring(load_policy(str(source), mesh=ALONE, dtype="float32").hf)
    folder = trained_version(run, 1)
    run.start()
    turns, (state,) = asyncio.run(one_update(run.ready(), folder))
    run.stop()
    assert [set(turn.versions.tolist()) for turn in turns] == [{0}, {1}, {1}, {1}]
    assert run.worst(turns, 1.0) < EXACT
    assert (state.attested == 1.0) == (name != "qwen3_moe"), "packed experts cannot be compared"


@pytest.mark.slow
@pytest.mark.long
def test_experts_that_the_trainer_has_in_one_tensor_arrive_from_its_memory_as_they_were_trained(tmp_path: Path) -> None:
    run = from_memory(Run(tmp_path, tied=True, experts=4))
    run.start()
    trainer, ids = MemoryTrainer(run), prompts(6)
    assert any(name.endswith("experts.gate_up_proj") for name, _ in trainer.offers.source.model.named_weights())

    async def conversation() -> list[Turn]:
        async with Servers(run.ready(), request_timeout=120) as servers:
            await servers.fleet.wait_ready(300)

            async def change() -> None:
                for version in (1, 2):
                    await running(servers, len(ids))
                    trainer.offer(version)
                    await trainer.update(servers)

            turns = await under_load(servers, ids, change)
            (state,) = await servers.fleet.states()
            assert state.version == 2
            assert state.attested > 0
            return turns

    turns = asyncio.run(conversation())
    run.stop()
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1, 2}
    assert run.worst(turns, 1.0) < EXACT
