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
from rlx.inference.server.transfer import GlooEngine, pack, unpack
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
    weight_transfer_engine: Any
    _weight_update_active: bool
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
            self._know_initial()
            entries = with_head(tensors(Path(folder)), self.twin)
            if packed:
                unpack(packed)
                model.load_weights(entries)
            else:
                self.model_runner.reload_weights(weights_iterator=entries)
            pack(model, packed, self.vllm_config.device_config.device_type)
            manifest = Path(folder) / COMPLETE
            return self.attest_policy(json.loads(manifest.read_text()).get("tensors", {}) if manifest.exists() else {})

    def attest_policy(self, trained: dict[str, Any]) -> float:
        """Compare the served weights with what was trained (`compare`). Returns the share of the weights that were compared."""
        model = self.model_runner.get_model()
        assert self.comparable is not None
        with torch.no_grad():
            return compare(model, kept_weights(model), trained, self.comparable)

    def prepare_transfer(self) -> None:
        """Before the trainer sends the first tensors of a version."""
        self._know_initial()
        if isinstance(self.weight_transfer_engine, GlooEngine):
            self.weight_transfer_engine.twin = self.twin

    def abandon_transfer(self) -> None:
        """After a transfer that broke: another one may begin."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.shutdown()

    def _know_initial(self) -> None:
        """Find out what can be compared, as long as the model has the weights that vLLM loaded at its start."""
        if self.comparable is not None:
            return
        model = self.model_runner.get_model()
        initial = fetch(self.vllm_config.model_config.model, None)
        self.comparable = faithful(model, kept_weights(model), tensor_shapes(initial), tensors(initial))
        if getattr(self.vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False):
            self.twin = twin_of_head(initial)

    def load_adapter(self, folder: str | None) -> float:
        """Replace the served adapter by the one in a PEFT folder, or by zeros: None, version 0. Then compare it with the folder's manifest.

        Returns the share of the adapter that was compared. An error here leaves an adapter that must not be served.
        """
        with torch.no_grad():
            return adapter.replace(self.model_runner.lora_manager, Path(folder) if folder is not None else None)
