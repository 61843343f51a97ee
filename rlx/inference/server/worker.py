"""Extends vLLM's worker with a method that loads a policy version inside the engine.

vLLM mixes `PolicyWorker` into its worker class by name (`worker_extension_cls`), in the worker's own process.
The caller must have checked the files and paused the engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlx.inference.server import adapter
from rlx.inference.server.kept import check_heads, check_packed, kept_weights, own_copy
from rlx.inference.server.orders import Obedient
from rlx.inference.server.policy_files import TIED_HEAD, tensor_shapes, tensors, twin_of_head, with_head
from rlx.inference.server.reading import Reading, State
from rlx.inference.server.served import Compared, Place, Split, compare, faithful, places, refuse, storage
from rlx.inference.server.transfer import Beside, GlooEngine, forget_reload, pack, unpack
from rlx.paths import COMPLETE
from rlx.process import peak_memory
from rlx.weights.attest import has_sum
from rlx.weights.hub import fetch


class PolicyWorker(Obedient):
    """Methods for `collective_rpc`, mostly through `obey`. vLLM already uses the names `update_weights` and `reload_weights`."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool
    initial: Path | None = None  # the folder of version 0
    sums: dict[str, dict[str, Any]]  # of version 0's tensors, as in a manifest
    comparable: frozenset[str] = frozenset()  # tensors that vLLM serves with the values of their file
    twin: str | None = None  # the tensor that equals the head, if vLLM untied the head because version 0 stores it twice
    places: Mapping[str, Place] = MappingProxyType({})  # of tensors that can be written while the engine generates
    trained: dict[str, dict[str, Any]]  # what the manifest says of the tensors that are being read
    originals: Mapping[str, torch.Tensor] = MappingProxyType({})  # whole tensors that are served in weights that were packed
    reading: Reading

    def describe_device(self) -> tuple[str, float, float]:
        """The fields of `protocol.Device`."""
        if self.vllm_config.device_config.device_type == "cpu":
            return "", peak_memory() / 2**30, 0.0
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return torch.cuda.get_device_name(), torch.cuda.max_memory_reserved() / 2**30, memory / 2**30

    def begin_reading(self, folder: str) -> None:
        """Start to read a Hugging Face folder, while the engine goes on with its steps (`reading.py`)."""
        path = Path(folder)
        if hasattr(self, "reading"):
            self.reading.wait()  # of a version that was given up, because another worker could not even begin to read it
        manifest = path / COMPLETE  # before the tensors: the folder may be deleted meanwhile, and its files overwritten
        written = json.loads(manifest.read_text()).get("tensors", {}) if manifest.exists() else {}
        self.trained = self.sums if path == self.initial and not written else written
        self.reading = Reading(path, tensors(path), written, self.places, self._split())

    def reading_state(self) -> State:
        """Whether everything was read, and why the version is refused, if it is."""
        return self.reading.state

    def load_policy(self) -> Compared:
        """Replace the model's weights by those that were read, then compare them with the checksums in the folder's manifest.

        Returns what was compared: nothing if the manifest has no checksums of tensors, or if there is no manifest. Version 0 needs none.
        An error here leaves a model that is partly old and partly new. The caller must not serve it.
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            model = self.model_runner.get_model()
            packed = kept_weights(model)
            entries = with_head(iter(self.reading.rest), self.twin)
            if packed:
                unpack(packed)
                model.load_weights(entries)
            else:
                self.model_runner.reload_weights(weights_iterator=entries)
            self.reading.rest.clear()  # the files need not be mapped any longer
            beside = pack(model, packed, self.vllm_config.device_config.device_type, self.originals)
            return self.attest_policy(self.trained, beside)

    def attest_policy(self, trained: dict[str, Any], beside: Beside | None = None) -> Compared:
        """Compare the served weights with what was trained (`compare`), and what cannot be compared with it as it arrived.

        `beside`: what was computed while files were loaded; None: they were not.
        """
        if isinstance(engine := self.weight_transfer_engine, GlooEngine):
            beside, engine.beside = beside or engine.beside, Beside()
            arrived, engine.arrived = engine.arrived, {}
            refuse([name for name, found in arrived.items() if found != trained[name]["sum"]], len(trained))
        beside = beside or Beside()
        model = self.model_runner.get_model()
        packed = kept_weights(model)
        if self.twin in trained and TIED_HEAD not in trained:
            trained = trained | {TIED_HEAD: trained[self.twin]}  # it was loaded as the head, too
        with torch.no_grad():
            if self.vllm_config.device_config.device_type == "cpu":
                check_heads(model, beside.questions)
                check_packed(model, packed, beside.questions)
            return compare(model, packed, trained, self.comparable, self._split(), beside.sums)

    def _split(self) -> Split:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        parallel = self.vllm_config.parallel_config
        engines = parallel.data_parallel_index, parallel.data_parallel_size
        return Split(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), *engines)

    def abandon_transfer(self) -> None:
        """After a transfer that broke: another one may begin, with a model that is partly old and partly new, but whole."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        if not kept_weights(model):
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                forget_reload(model, self.vllm_config.model_config)
        self._weight_update_active = False
        self.weight_transfer_engine.arrived, self.weight_transfer_engine.beside = {}, Beside()  # files may be loaded next
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.shutdown()

    def know_initial(self) -> None:
        """Find out what can be compared. Call it while the model has the weights that vLLM loaded at its start."""
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(may_be_lost)
        if self.vllm_config.device_config.device_type == "cuda":
            import vllm.v1.worker.gpu_model_runner  # noqa: F401  the second runner's reload needs it: now, and not in the first pause
        model = self.model_runner.get_model()
        initial = fetch(self.vllm_config.model_config.model, None)
        with torch.no_grad():
            shapes = tensor_shapes(initial)
            packed = kept_weights(model)
            found = faithful(model, packed, shapes, tensors(initial), self._split())
            every = places(model, packed, shapes, found, self._split())
            unread = {storage(packed[layer]) for layer in own_copy(packed)}
            self.places = {name: place for name, place in every.items() if storage(place.served) in unread}
            own = {storage(weight) for weight in packed.values()}
            self.originals = {name: served for name, (served, _, dim) in every.items() if dim is None and storage(served) in own}
        self.initial, self.comparable = initial, frozenset(found)
        self.sums = {name: found.get(name, {"shape": shape, "dtype": "", "sum": ""}) for name, shape in shapes.items()}
        if getattr(self.vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False):
            self.twin = twin_of_head(initial)
        if isinstance(self.weight_transfer_engine, GlooEngine):
            self.weight_transfer_engine.twin, self.weight_transfer_engine.originals = self.twin, self.originals
            self.weight_transfer_engine.places = {name: place.served for name, place in every.items() if place.dim is None}
            self.weight_transfer_engine.attested = {
                name: str(served.dtype).removeprefix("torch.")
                for name, (served, start, dim) in every.items()
                if dim is None or has_sum(served, shapes[name], start, dim)
            }

    def load_adapter(self, folder: str | None) -> Compared:
        """Replace the served adapter by the one in a PEFT folder, or by zeros: None, version 0. Then compare it with the folder's manifest.

        Returns what was compared. An error here leaves an adapter that must not be served.
        """
        with torch.no_grad():
            return adapter.replace(self.model_runner.lora_manager, Path(folder) if folder is not None else None)


def may_be_lost(record: logging.LogRecord) -> bool:
    """Whether vLLM's warning of a layer without new weights means something.

    vLLM warns at each update of a tied head, which `compare` compares, and of rotary tables, which no file has.
    """
    if record.msg != "%s: Failed to load weights" or not isinstance(record.args, tuple):
        return True
    return not str(record.args[0]).endswith(("ParallelLMHead", "RotaryEmbedding"))
