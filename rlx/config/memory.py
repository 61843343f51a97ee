"""Estimates how much memory a layout needs, from the model's sizes in the configuration. All numbers are bytes.

The estimates only need to tell 20 GiB from 200 GiB. They leave out what `trainer.ep` exchanges: buffers of tokens on their way to experts,
and the surplus of a rank whose experts get more tokens than others.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.config.row_budget import BYTES, activation_bytes, attention_widths, feed_forward_width
from rlx.config.schema import ModelConfig, PlayRoot, TrainingRoot

STATES = {"sgd": 1, "muon": 1}  # optimizer states per parameter, by class name (SGD's is its momentum); two for all others (Adam)
TILE = {"cpu": (1024, 1024), "cuda": (16_384, 8192)}  # tokens × vocabulary of one tile of the head op (rlx/kernels/tiles.py)
# Float32 tiles alive at once: the logits, and the results of the row functions. On CUDA Triton's return 16 bits; torch's take a tile more.
TILES = {"cpu": 3, "cuda": 2}
BUCKET = 2**28  # bytes of parameters that `trainer.optim_cpu_offload` updates at a time (rlx/train/offload.py)
CPU_BLOCK = 32  # tokens of a cache block on CPU. Rollouts cannot share prompts shorter than a block, and vLLM's CPU default is 128.
CPU_CACHE = 2**30  # bytes of a server's KV cache on CPU: on a workstation
SPARE = 2  # as much again stays for prompts that are shared, and for rollouts that wait for their environments
CONTEXT = 2**30  # of a CUDA process: about half for context and kernels, the rest for cuBLAS workspaces and NCCL buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on each trainer rank. The peak is `states`, which are always allocated, plus the largest of three moments of a step."""

    # always allocated; sharded over the ranks
    parameters: float  # the master copy
    gradients: float  # in the dtype of the master copy, even if they are reduced in another
    optimizer: float
    reference: float  # the frozen model of a KL term or a distillation, assumed to be as large as the policy
    context: float
    on_host: bool  # parameters, gradients, optimizer state and reference lie in host memory
    optimizer_on_host: bool = False  # the optimizer's state alone does

    # during forward and backward; a single process that holds the whole model in its compute dtype gathers nothing
    layers: float  # two gathered decoder layers: one computes while the next is prefetched; all, if they stay gathered until backward
    table: float  # the embedding or the head, gathered; both, if they stay gathered. A tied one is gathered from forward to backward's end
    activations: float  # of one packed row, or of this rank's piece of it
    head: float  # the fused head op: tiles, a sum of the hidden states' gradient, and the gradient of one slice of the head
    head_gradient: float  # unsharded, in the compute dtype

    # gradient reduction
    layer_gradients: float  # of one layer: unsharded in the compute dtype, plus the reduction buffer
    table_gradients: float  # the same for the head, when backward begins, or for the embedding at its end, when activations are freed

    # the optimizer step's temporary, unless it is fused: one number per parameter of its shard; with `optimizer_on_host` of the
    # largest bucket, with its state
    update: float

    loading: float  # in host memory, while a process reads its shards to its GPU, one tensor at a time; a layer's fused experts whole
    # In host memory: the copy of the weights (of each run) that is written beside the next step. The trainer's hosts divide it; adapters
    # are rank 0's alone.
    published: float

    @property
    def states(self) -> float:
        """Bytes that are always allocated on the device."""
        optimizer = 0.0 if self.optimizer_on_host else self.optimizer
        states = 0.0 if self.on_host else self.parameters + self.gradients + optimizer + self.reference
        return states + self.context

    @property
    def moments(self) -> dict[str, float]:
        """Additional bytes at each moment of a step that can be the peak."""
        gathered = self.layers + self.table
        return {
            "backward begins": gathered + self.activations + self.head + self.head_gradient + self.layer_gradients,
            "the head's gradient is reduced": gathered + self.activations + self.table_gradients,
            "backward ends": gathered + self.table_gradients,
            "the optimizer steps": 0.0 if self.on_host else self.update,
        }

    @property
    def device(self) -> float:
        """Bytes on the device at the peak."""
        return self.states + max(self.moments.values())

    @property
    def host(self) -> float:
        """Bytes of host memory at the peak, beside what Python and torch take; `published` aside."""
        states = self.parameters + self.gradients + self.optimizer + self.reference if self.on_host else 0.0
        states += self.optimizer if self.optimizer_on_host else 0.0
        return states + self.loading if self.context else self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on each GPU of one inference server; on CPU in host memory."""

    weights: float
    kv_token: float  # keys and values of one token
    kv_longest: float  # of one sequence of the engine's maximum length
    kv_wanted: float  # of all sequences that may be decoded together, each of length `seq_len`


def size(num_bytes: float) -> str:
    """`3.2 GiB`, `14 MiB` or `2 KiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:,.1f} {name}" if value < 100 else f"{value:,.0f} {name}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def layer_parameters(model: ModelConfig) -> float:
    """Parameters of a decoder layer: attention, and its feed-forward layers."""
    return model.hidden_size * (2 * sum(attention_widths(model)) + 3 * feed_forward_width(model) * (model.num_experts or 1))


def adapter_parameters(cfg: TrainingRoot) -> float:
    """Parameters of one adapter beside all linear layers of a dense model, an upper bound; 0 without `lora.rank`."""
    width, (queries, keys) = cfg.model.hidden_size, attention_widths(cfg.model)
    sides = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + feed_forward_width(cfg.model))
    return (cfg.lora.rank or 0) * sides * cfg.model.num_layers


def trained_parameters(cfg: TrainingRoot) -> float:
    """Parameters that are trained: the model's, or those of the adapters; a shared trainer has one for each run that it may train."""
    return adapter_parameters(cfg) * (cfg.trainer.max_concurrent_runs or 1) if cfg.lora.enabled else cfg.model.num_parameters


def published_bytes(cfg: TrainingRoot) -> float:
    """Bytes of one version of the weights, as servers read it."""
    return trained_parameters(cfg) * BYTES[cfg.model.dtype]


def versions_in_memory(cfg: TrainingRoot) -> float:
    """The most bytes that versions take in `weight_broadcast.folder`: those that are kept, and the one that is being written."""
    return 0.0 if cfg.memory_folder is None else (cfg.versions_kept + 1) * published_bytes(cfg)


def trainer_memory(cfg: TrainingRoot) -> TrainerMemory:
    model, cuda = cfg.model, cfg.hardware.device == "cuda"
    ranks = cfg.trainer_ranks / cfg.trainer.dp_replicate  # that share one copy of the model
    master, compute, reduced = BYTES[cfg.trainer.optimization_dtype], BYTES[model.dtype], BYTES[cfg.trainer.reduce_dtype]
    optimizer = str(cfg.optim.get("_target_", "")).rpartition(".")[2].lower()
    states = 0 if optimizer == "sgd" and not cfg.optim.get("momentum") else STATES.get(optimizer, 2)
    trained = trained_parameters(cfg)
    frozen = model.num_parameters / ranks if cfg.lora.enabled else 0.0
    shard = trained / ranks
    share = trained / model.num_parameters  # of a layer that gets gradients
    table = model.vocab_size * model.hidden_size  # parameters of the embedding; an untied head has as many
    beside = 2.0 * table if optimizer == "muon" and not cfg.lora.enabled else 0.0  # embedding and head have AdamW's second state
    kept = not cfg.reshards  # the configuration does not say whether the head is tied: assume that it is not
    layer = layer_parameters(model)
    sharded = cfg.trainer_ranks > 1 or cfg.fsdp_single_rank
    cast = trained * compute if cfg.lora.enabled and not sharded and master != compute else 0.0  # adapters, until backward
    copied = cfg.uses_reference and (cfg.ref.name is not None or not cfg.lora.enabled)  # else it is the model without its adapters
    # One that follows the policy has its parameters, because small changes would be lost in the compute dtype.
    reference = model.num_parameters / ranks * (compute if cfg.ref.sync_interval is None else master)
    offloads = cfg.trainer.optim_cpu_offload and cuda
    # On CUDA, torch's optimizers update all parameters at once, or those of a bucket. The embedding may be larger than that. A fused one
    # needs no temporary.
    temporaries = (0 if cfg.optim.get("fused") else 1) + (states if offloads else 0)
    updated = min(shard * master, max(BUCKET, 0.0 if cfg.lora.enabled else table / ranks * master)) if offloads else shard * master
    tiles, (tile_rows, tile_columns) = TILES[cfg.hardware.device], TILE[cfg.hardware.device]
    row = cfg.micro_batch_tokens
    # Ranks over which a layer is divided. In a mixture of experts nearly all of it is experts, which only `ep` divides.
    divided = cfg.trainer.tp if model.num_experts is None else cfg.trainer.ep
    scored = row / cfg.trainer.ranks_of_a_row  # by the head of one rank
    return TrainerMemory(
        parameters=shard * master + frozen * compute,
        gradients=shard * master,
        optimizer=master * (shard * states + beside / ranks),
        reference=reference if copied else 0.0,
        context=CONTEXT if cuda else 0.0,
        on_host=cfg.trainer.fsdp_cpu_offload,
        optimizer_on_host=offloads,
        layers=(model.num_layers if kept else 2) * layer * compute / divided if sharded else 0.0,
        table=(2 if kept else 1) * table * compute if sharded else 0.0,
        activations=activation_bytes(cfg) * row + cast,
        head=4.0 * (tiles * min(tile_rows, scored) * tile_columns + scored * model.hidden_size + tile_columns * model.hidden_size),
        head_gradient=table * compute if sharded and not cfg.lora.enabled else 0.0,
        layer_gradients=layer * share * (compute + reduced) / divided if sharded else 0.0,
        table_gradients=table * (compute + reduced) if sharded and not cfg.lora.enabled else 0.0,
        update=updated * temporaries if cuda else 0.0,
        loading=(table / ranks if model.num_experts is None else layer) * master if cuda and not cfg.trainer.fsdp_cpu_offload else 0.0,
        published=published_bytes(cfg),
    )


def kv_token_bytes(cfg: PlayRoot) -> float:
    """Bytes of the keys and values of one token, on each device of a replica."""
    model, (_, keys) = cfg.model, attention_widths(cfg.model)
    # If there are fewer key-value heads than devices, heads are copied, never split.
    divided = min(model.num_key_value_heads, cfg.hardware.tensor_parallel)
    return 2 * model.num_layers * keys / divided * BYTES[model.dtype]


def kv_cache_bytes(cfg: PlayRoot) -> int:
    """Bytes of the KV cache of one server on CPU: `inference.kv_cache_gb`, or SPARE times what all its sequences take at full length.

    The latter is at most CPU_CACHE unless one sequence takes more: vLLM zeroes the cache at its start, so an idle gigabyte costs a second.
    """
    if cfg.inference.kv_cache_gb is not None:
        return int(cfg.inference.kv_cache_gb * 2**30)
    sequence = SPARE * kv_token_bytes(cfg) * CPU_BLOCK * -(-cfg.max_model_len // CPU_BLOCK)
    return int(max(sequence, min(CPU_CACHE, sequence * cfg.inference.max_num_seqs)))


def engine_memory(cfg: PlayRoot) -> EngineMemory:
    model, kv_token = cfg.model, kv_token_bytes(cfg)
    together = min(cfg.inference.max_num_seqs, cfg.concurrency)
    return EngineMemory(
        weights=model.num_parameters * BYTES[model.dtype] / cfg.hardware.tensor_parallel,
        kv_token=kv_token,
        kv_longest=kv_token * cfg.max_model_len,
        kv_wanted=kv_token * cfg.seq_len * together,
    )
