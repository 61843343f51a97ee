"""How long a packed row of the trainer is when the configuration does not say: as long as the work and a memory budget allow.

A row is one forward and backward pass. Every backward pass reads and writes all gradients, so short rows are slow. Long rows keep more
activations in memory. The length depends on the configuration alone, so `config.yaml` gives the same number on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.config.schema import TrainingRoot
    from rlx.config.schema_model import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EXPERTS = 8  # that a token is assumed to have where `model.num_experts_per_tok` does not say
GATHERED = 2  # with `trainer.tp`, tokens gathered for attention and for feed-forward, once for each of the ranks that they came from
BUDGET = {"cpu": 2 * 2**30, "cuda": 8 * 2**30}  # bytes for activations: on a workstation; on a GPU, a tenth of 80 GB
SHARED = 2  # an engine on the same card halves the budget
WHOLE = 256  # rows are a multiple of this many tokens, unless they are seq_len or the whole batch


def attention_widths(model: ModelConfig) -> tuple[int, int]:
    """Widths of a layer's queries, and of its keys, over all heads."""
    head = model.head_dim or model.hidden_size // model.num_attention_heads
    return model.num_attention_heads * head, model.num_key_value_heads * head


def feed_forward_width(model: ModelConfig) -> float:
    """Width of a feed-forward layer, or of each expert's; from the number of parameters if the configuration does not say."""
    if model.intermediate_size is not None:
        return model.intermediate_size
    layer = (model.num_parameters - model.vocab_size * model.hidden_size) / model.num_layers
    left = layer - 2 * model.hidden_size * sum(attention_widths(model))
    return max(0.0, left) / (3 * model.hidden_size * (model.num_experts or 1))


def kept_numbers(model: ModelConfig) -> tuple[float, float]:
    """Numbers that a layer keeps of a token for its backward pass, with all results, and with those of matrix products and attention alone.

    Measured on an H200 with Qwen3 models of 0.6, 4 and 8 billion parameters: tests/test_plan_memory.py.
    """
    hidden, inner, (queries, keys) = model.hidden_size, feed_forward_width(model), attention_widths(model)
    experts = model.num_experts_per_tok or EXPERTS
    of_results, of_products = 3 * inner, 2 * inner + hidden
    if model.num_experts is not None:
        of_results, of_products = experts * (2 * hidden + 4 * inner), experts * of_products
    return of_results + 4 * hidden + 3 * (queries + keys), of_products + hidden + 2 * (queries + keys)


def activation_bytes(cfg: TrainingRoot) -> float:
    """Bytes that a rank keeps for the backward pass, per token of a row. With `trainer.cp` or `tp`, a token's are on one of several ranks.

    A layer with activation checkpointing keeps only its input, or also its products. One such layer at a time is recomputed. Buffers of the
    exchange of tokens between experts (`trainer.ep`), and experts that get more tokens than others, are not counted. No attention of packed
    rows keeps its scores, also not with a softcap or sinks (`rlx.models.attention`);
    transformers' own may (`model.attention=rows`, GPT-OSS).
    """
    model, layers, ac = cfg.model, cfg.model.num_layers, cfg.trainer.ac
    results, products = kept_numbers(model)
    results += GATHERED * (cfg.trainer.tp - 1) * model.hidden_size
    recomputed = -(-layers // ac.freq) if ac.freq else 0
    kept = model.hidden_size + (products if ac.mode == "selective" else 0)
    if cfg.trainer.ac_offloading and cfg.hardware.device == "cuda":
        kept = 0
    numbers = (layers - recomputed + min(1, recomputed)) * results + recomputed * kept
    return BYTES[model.dtype] * numbers / cfg.trainer.ranks_of_a_row


def tokens_of_an_update(cfg: TrainingRoot) -> int:
    """The most tokens that a rank, or the ranks that compute rows together, trains on in one optimizer step: its share of the rollouts or
    rows, each of length seq_len."""
    return -(-cfg.samples_per_update * cfg.seq_len // cfg.data_ranks)


def budget(cfg: TrainingRoot) -> int:
    """Bytes for the activations of a row."""
    return BUDGET[cfg.hardware.device] // (SHARED if cfg.hardware.colocate and cfg.reserved_servers else 1)


def tokens_in_budget(cfg: TrainingRoot) -> int:
    """Tokens whose activations fit into the budget of the device, rounded down to a multiple of `WHOLE`."""
    return int(budget(cfg) / activation_bytes(cfg)) // WHOLE * WHOLE


def default_row(cfg: TrainingRoot) -> int:
    """Tokens of one packed row: what the budget allows, at most those of an optimizer step, at least the longest sample."""
    return max(cfg.seq_len, min(tokens_in_budget(cfg), tokens_of_an_update(cfg)))


def why(cfg: TrainingRoot) -> str:
    """Where the length of a row comes from, in words."""
    if cfg.trainer.micro_batch_tokens is not None:
        return "trainer.micro_batch_tokens"
    reasons = {
        tokens_of_an_update(cfg): f"all tokens of a {'group of ranks' if cfg.trainer.ranks_of_a_row > 1 else 'rank'} in an optimizer step",
        tokens_in_budget(cfg): f"what {budget(cfg) >> 30} GiB of activations at {activation_bytes(cfg) / 2**20:,.2f} MiB a token allow",
    }
    return reasons.get(default_row(cfg), "seq_len")
