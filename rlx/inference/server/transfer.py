"""Weights that the trainer sends to an engine without files: the receiving end in vLLM's workers.

`GlooEngine` is a weight transfer engine like vLLM's own `nccl` and `ipc`, but through host memory, on any device. Every worker has one.
Tensors are loaded as they arrive. If the transfer breaks midway, the engine stays paused, because its model is partly old and partly new;
the same or a newer version can be loaded again.
What vLLM renames, casts or rearranges cannot be compared once it is served, so its checksum is computed as it arrives (`arrived`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlx.inference.server.kept import TURNS, Question, heads, kept_weights, question
from rlx.inference.server.policy_files import TIED_HEAD
from rlx.inference.server.served import each
from rlx.parallel.transfer import Announced, Group, reach_store
from rlx.weights.attest import checksum


def unpack(packed: Mapping[torch.nn.Module, torch.nn.Parameter]) -> None:
    """Give layers whose weight was packed (`kept_weights`) their original weight, into which new values can be loaded."""
    for layer, weight in packed.items():
        layer.weight = weight


class Beside(NamedTuple):
    """What was computed from the original weights while they were packed: nothing is generated then, and with one thread a role packing
    leaves the other cores idle."""

    questions: Mapping[torch.nn.Module, Question] = MappingProxyType({})  # to the layers that multiply with packed copies
    sums: Mapping[str, str] = MappingProxyType({})  # checksums, by tensor


def pack(
    model: torch.nn.Module,
    packed: Mapping[torch.nn.Module, torch.nn.Parameter],
    device: str,
    originals: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Beside:
    """Pack them again, with their new values. `originals`: whole tensors that are served in them, to be summed meanwhile."""
    # A CPU head multiplies with a packed copy. `load_weights` does not update it, nor does vLLM's reload if the head is tied.
    tables = heads(model) if device == "cpu" else []
    weights = [*packed.items(), *((head, head.weight) for head in tables)]
    turn, size = next(TURNS), sum(tensor.nbytes for tensor in originals.values())

    def compute() -> Beside:
        with torch.no_grad():
            return Beside(
                {layer: question(weight, turn) for layer, weight in weights},
                dict(each(lambda entry: (entry[0], checksum(entry[1])), originals.items(), size)),
            )

    with ThreadPoolExecutor(1, "beside") as pool:
        beside = pool.submit(compute)
        for layer in [*packed, *tables]:
            layer.quant_method.process_weights_after_loading(layer)
        return beside.result()


def forget_reload(model: torch.nn.Module, config: Any) -> None:
    """End vLLM's layerwise reload of a model (`initialize_layerwise_reload`) without what it has not loaded yet. Without a reload: nothing.

    vLLM holds a layer's tensors back until it has all of them. A reload that begins while some are held would count them as its own, take
    a layer for complete too early, and ignore the rest. Here they are dropped, and the layer gets back the values that it had.
    `config` is vLLM's `ModelConfig`.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = info.load_numel_total = 0  # for vLLM: there was nothing to load
    finalize_layerwise_reload(model, config)


@dataclass
class GlooInit(WeightTransferInitInfo):
    """The group of one trainer and all workers of some servers."""

    where: str  # the trainer's store
    name: str  # of the group
    rank_offset: int  # of this server's first worker
    world_size: int
    timeout: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """What the trainer sends: see `Announced`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """Receives whole tensors in the names of the model's files. Those of a CPU engine that are served as they are sent are received where
    they are served; vLLM loads the others as they arrive."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    supports_draft_weight_update = False
    group: Group | None = None
    twin: str | None = None  # the tensor that is also loaded as the head (`PolicyWorker.twin`)
    places: Mapping[str, torch.Tensor] = MappingProxyType({})  # of tensors that are served as they are sent: see `Group.receive`
    originals: Mapping[str, torch.Tensor] = MappingProxyType({})  # see `pack`
    beside = Beside()  # of the latest update
    attested: Mapping[str, str] = MappingProxyType({})  # tensors that are compared as they are served, and in which dtype
    arrived: Mapping[str, str] = MappingProxyType({})  # checksums of the others, as they came

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()
        engine = self.parallel_config.data_parallel_index * self.parallel_config.world_size  # the rank of its first worker
        rank = init_info.rank_offset + engine + self.parallel_config.rank
        store = reach_store(init_info.where, init_info.timeout)
        self.group = Group(store, init_info.name, rank, init_info.world_size, init_info.timeout)

    def start_weight_update(self) -> None:
        self.arrived, self.beside = {}, Beside()
        self.packed = kept_weights(self.model)
        if self.packed:
            unpack(self.packed)
        else:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        assert self.group is not None, "init_weight_transfer_engine comes first"
        announced = Announced(update_info.names, update_info.dtypes, update_info.shapes)
        twin = self.twin if TIED_HEAD not in announced.names else None
        dtypes = dict(zip(announced.names, announced.dtypes, strict=True))
        arrived: dict[str, str] = {}
        try:
            with torch.no_grad(), disable_mtp_completeness_check():
                load: Any = self.model.load_weights
                places = {name: place for name, place in self.places.items() if name != twin} if self.packed else {}
                for part in self.group.receive(announced, places):
                    arrived |= {name: checksum(tensor) for name, tensor in part if self.attested.get(name) != dtypes[name]}
                    if not self.packed:  # vLLM keeps them until it has all of a layer
                        part = [(name, tensor.clone()) for name, tensor in part]
                    load(part + [(TIED_HEAD, tensor) for name, tensor in part if name == twin])
        except BaseException:
            self.shutdown()  # the trainer notices, too
            raise
        self.arrived = arrived

    def finish_weight_update(self) -> None:
        with torch.no_grad():
            if not self.packed:
                finalize_layerwise_reload(self.model, self.model_config)
            self.beside = pack(self.model, self.packed, self.device.type, self.originals)

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.abort()
            self.group = None


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
