"""Extends vLLM's worker with a method that loads a policy version inside the engine.

vLLM mixes `PolicyWorker` into its worker class by name (`worker_extension_cls`), in the worker's own process.
The caller must have checked the files and paused the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlx.inference.server import adapter
from rlx.inference.server.kept import kept_weights
from rlx.inference.server.policy_files import TIED_HEAD, tensor_shapes, twin_of_head
from rlx.inference.server.served import compare, faithful
from rlx.paths import COMPLETE
from rlx.weights.files import weight_files
from rlx.weights.hub import fetch


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in the weight files of a model folder, in the order of the files."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def with_head(entries: Iterator[tuple[str, torch.Tensor]], twin: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries. If `twin` is given and they have no head, a copy of the tensor `twin` is added as the head."""
    head = twin
    for name, tensor in entries:
        if name == TIED_HEAD:
            head = None
        yield name, tensor
        if name == twin:
            copy = tensor
    if head is not None:
        yield TIED_HEAD, copy


class PolicyWorker:
    """Methods for `collective_rpc`. vLLM already uses the names `update_weights` and `reload_weights`."""

    vllm_config: Any
    model_runner: Any
    comparable: frozenset[str] | None = None  # tensors that vLLM serves with the values of their file
    twin: str | None = None  # the tensor that equals the head, if vLLM untied the head because version 0 stores it twice

    def load_policy(self, folder: str) -> float:
        """Replace the model's weights by those in a Hugging Face folder, then compare them with the checksums in its manifest.

        Returns the share of the weights that were compared: 0 if the manifest has no checksums of tensors, or if there is no manifest.
        An error here leaves a model that is partly old and partly new. The caller must not serve it.
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            model = self.model_runner.get_model()
            packed = kept_weights(model)
            if self.comparable is None:  # the model still has the weights that vLLM loaded at its start
                initial = fetch(self.vllm_config.model_config.model, None)
                self.comparable = faithful(model, packed, tensor_shapes(initial), tensors(initial))
                if getattr(self.vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False):
                    self.twin = twin_of_head(initial)
            entries = with_head(tensors(Path(folder)), self.twin)
            if packed:
                for layer, weight in packed.items():
                    layer.weight = weight
                model.load_weights(entries)
                for layer in packed:
                    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]
            else:
                self.model_runner.reload_weights(weights_iterator=entries)
            head = getattr(model, "lm_head", None)
            if self.vllm_config.device_config.device_type == "cpu" and head is not None:
                # The head multiplies with a packed copy. `load_weights` does not update it, nor does vLLM's reload if the head is tied.
                head.quant_method.process_weights_after_loading(head)
            manifest = Path(folder) / COMPLETE
            written = json.loads(manifest.read_text()).get("tensors", {}) if manifest.exists() else {}
            return compare(model, packed, written, self.comparable)

    def load_adapter(self, folder: str | None) -> float:
        """Replace the served adapter by the one in a PEFT folder, or by zeros: None, version 0. Then compare it with the folder's manifest.

        Returns the share of the adapter that was compared. An error here leaves an adapter that must not be served.
        """
        with torch.no_grad():
            return adapter.replace(self.model_runner.lora_manager, Path(folder) if folder is not None else None)
