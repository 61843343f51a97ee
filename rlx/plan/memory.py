"""How much memory a layout needs, estimated from the model's numbers in the configuration.

Arithmetic only, in bytes; rules of thumb are named with their source. An estimate is there to tell 20 GiB from 200.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.config.schema import Config

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATION = 34  # bytes per token, layer and unit of width in 16 bits, without attention scores: arXiv 2205.05198, section 4.1
STATES = {"sgd": 1, "muon": 1}  # optimizer states per parameter by class name; two elsewhere (Adam and its kin)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on each trainer rank."""

    parameters: float  # master copy, sharded over the ranks
    gradients: float  # sharded
    optimizer: float  # sharded
    gathered: float  # whole layers while they compute: two of them, and embedding and head
    activations: float  # of one packed row
    reference: float  # the frozen model of a KL term or a distillation, taken to be as large as the policy; sharded
    on_host: bool  # parameters, gradients, optimizer state and reference lie in host memory

    @property
    def device(self) -> float:
        """What the device holds at the peak."""
        states = 0.0 if self.on_host else self.parameters + self.gradients + self.optimizer + self.reference
        return states + self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on each GPU of one inference replica (in host memory on CPU)."""

    weights: float
    kv_token: float  # keys and values of one token
    kv_longest: float  # of one sequence as long as the engine takes
    kv_wanted: float  # of all sequences that may be decoded together, each as long as a training sample may be


def trainer_memory(cfg: Config) -> TrainerMemory:
    model, ranks = cfg.model, cfg.hardware.trainer_ranks
    master, compute = BYTES[cfg.trainer.optimization_dtype], BYTES[model.dtype]
    states = STATES.get(str(cfg.optim.get("_target_", "")).rpartition(".")[2].lower(), 2)
    shard = model.num_parameters / ranks
    table = model.vocab_size * model.hidden_size
    layer = max(0.0, model.num_parameters - table) / model.num_layers
    per_layer = ACTIVATION / 2 * compute * model.hidden_size * cfg.micro_batch_tokens
    freq = cfg.trainer.ac.freq
    kept = model.num_layers if freq == 0 else model.num_layers - model.num_layers // freq
    inputs = 0.0 if freq == 0 else model.num_layers // freq * compute * model.hidden_size * cfg.micro_batch_tokens
    return TrainerMemory(
        parameters=shard * master,
        gradients=shard * BYTES[cfg.trainer.reduce_dtype],
        optimizer=shard * master * states,
        gathered=(2 * layer + table) * compute,
        activations=max(1, kept) * per_layer + inputs,
        reference=shard * (compute if cfg.ref.sync_interval is None else master) if cfg.uses_reference else 0.0,
        on_host=cfg.trainer.fsdp_cpu_offload,
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
