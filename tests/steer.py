"""A processor of vLLM's logits for tests: the engine samples the tokens of a script where the client left one for the request's seed.

The folder `RLX_TEST_SCRIPTS` has the scripts: a file by the name of the seed, with the token ids as JSON.
Everything else is the engine's own. With `logprobs_mode=raw_logprobs` the log-probabilities are the model's, as if it had chosen them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor


class Steer(LogitsProcessor):
    """Allows only the script's next token."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self.folder = Path(os.environ["RLX_TEST_SCRIPTS"])
        self.scripts: dict[int, tuple[list[int], list[int]]] = {}  # by row: tokens to say, tokens said so far

    def is_argmax_invariant(self) -> bool:
        return False

    def _script(self, params: SamplingParams, prompt: list[int] | None, said: list[int]) -> tuple[list[int], list[int]] | None:
        file = self.folder / str(params.seed)
        return (json.loads(file.read_text()), said) if file.exists() else None

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.scripts, batch_update, self._script)

    def apply(self, logits: Tensor) -> Tensor:
        for row, (script, said) in self.scripts.items():
            token = script[len(said)]
            kept = logits[row, token].item()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits
