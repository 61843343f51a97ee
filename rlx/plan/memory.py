"""How much memory a layout needs, estimated from the model's numbers in the configuration.

Arithmetic only, in bytes, written beside each term; rules of thumb are named with their source. An estimate is there to tell 20 GiB
from 200.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.config.rows import BYTES, activation_bytes
from rlx.config.schema import Config

STATES = {"sgd": 1, "muon": 1}  # optimizer states per parameter by class name; two elsewhere (Adam and its kin)
TILE = {"cpu": (1024, 1024), "cuda": (8192, 4096)}  # tokens × vocabulary of one tile of the head op (rlx/kernels/tiles.py)
TILES = 3  # float32 tiles alive at once: the logits, and what the row functions make of them
CONTEXT = 2**30  # of a CUDA process: context and kernels, about half of it; workspaces of cuBLAS and buffers of NCCL


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on each trainer rank. What is alive at once: the states all the time, and the largest of three moments of a step."""

    # all the time; sharded over the ranks
    parameters: float  # the master copy
    gradients: float  # in the dtype of the master copy, whatever they are reduced in
    optimizer: float
    reference: float  # the frozen model of a KL term or a distillation, taken to be as large as the policy
    context: float
    on_host: bool  # parameters, gradients, optimizer state and reference lie in host memory

    # while it computes; nothing is gathered where the one process has the whole model in the dtype that it computes in
    layers: float  # two decoder layers, gathered: one computes, the next is on its way
    root: float  # embedding and head, gathered from forward to the end of backward: FSDP's root unit
    activations: float  # of one packed row
    head: float  # the fused head op: tiles, a sum of the hidden states' gradient, and the gradient of one slice of the head
    head_gradient: float  # whole, from the beginning of backward to its end, in the dtype of computation

    # how gradients are reduced
    layer_gradients: float  # of one layer: whole in the dtype of computation, and the buffer that is reduced
    root_gradients: float  # the same of embedding and head, at the end of backward, when the activations are gone

    update: float  # the optimizer's own: one number a parameter of its shard

    @property
    def states(self) -> float:
        """What the device holds all the time."""
        states = 0.0 if self.on_host else self.parameters + self.gradients + self.optimizer + self.reference
        return states + self.context

    @property
    def moments(self) -> dict[str, float]:
        """What is added at the moments of a step that can be the peak."""
        gathered = self.layers + self.root
        return {
            "backward begins": gathered + self.activations + self.head + self.head_gradient + self.layer_gradients,
            "backward ends": gathered + self.root_gradients,
            "the optimizer steps": 0.0 if self.on_host else self.update,
        }

    @property
    def device(self) -> float:
        """What the device holds at the peak."""
        return self.states + max(self.moments.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on each GPU of one inference replica (in host memory on CPU)."""

    weights: float
    kv_token: float  # keys and values of one token
    kv_longest: float  # of one sequence as long as the engine takes
    kv_wanted: float  # of all sequences that may be decoded together, each as long as a training sample may be


def trainer_memory(cfg: Config) -> TrainerMemory:
    model, ranks, cuda = cfg.model, cfg.trainer_ranks, cfg.hardware.device == "cuda"
    master, compute, reduced = BYTES[cfg.trainer.optimization_dtype], BYTES[model.dtype], BYTES[cfg.trainer.reduce_dtype]
    states = STATES.get(str(cfg.optim.get("_target_", "")).rpartition(".")[2].lower(), 2)
    shard = model.num_parameters / ranks
    table = model.vocab_size * model.hidden_size  # numbers of the embedding; the head has as many where it is not tied to it
    tables = 2 * table  # whether it is tied the configuration does not know: the larger is taken
    layer = max(0.0, model.num_parameters - table) / model.num_layers
    # As `rlx.models.load` decides it: one process that computes in the dtype of its parameters needs no FSDP.
    sharded = ranks > 1 or model.dtype != cfg.trainer.optimization_dtype or (cfg.trainer.fsdp_cpu_offload and cuda)
    tile_rows, tile_columns = TILE[cfg.hardware.device]
    row = cfg.micro_batch_tokens
    return TrainerMemory(
        parameters=shard * master,
        gradients=shard * master,
        optimizer=shard * master * states,
        reference=shard * (compute if cfg.ref.sync_interval is None else master) if cfg.uses_reference else 0.0,
        context=CONTEXT if cuda else 0.0,
        on_host=cfg.trainer.fsdp_cpu_offload,
        layers=2 * layer * compute if sharded else 0.0,
        root=tables * compute if sharded else 0.0,
        activations=activation_bytes(cfg) * row,
        head=4.0 * (TILES * tile_rows * tile_columns + row * model.hidden_size + tile_columns * model.hidden_size),
        head_gradient=table * compute if sharded else 0.0,
        layer_gradients=layer * (compute + reduced) if sharded else 0.0,
        root_gradients=tables * (compute + reduced) if sharded else 0.0,
        update=shard * master if cuda else 0.0,  # torch's optimizers go over all parameters at once there
    )


def engine_memory(cfg: Config) -> EngineMemory:
    model, parallel = cfg.model, cfg.hardware.tensor_parallel
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    # Fewer key-value heads than GPUs are copied, never split.
    heads = max(1.0, model.num_key_value_heads / parallel)
    kv_token = 2 * model.num_layers * heads * head_dim * BYTES[model.dtype]
    together = min(cfg.inference.max_num_seqs, cfg.orchestrator.max_concurrent)
    return EngineMemory(
        weights=model.num_parameters * BYTES[model.dtype] / parallel,
        kv_token=kv_token,
        kv_longest=kv_token * cfg.max_model_len,
        kv_wanted=kv_token * cfg.seq_len * together,
    )
