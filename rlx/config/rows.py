"""How long a packed row of the trainer is when the configuration does not say: as long as the work and a memory budget allow.

A row is one forward and backward pass. Every backward pass reads and writes all gradients, so short rows are slow. Long rows keep more
activations in memory. The length depends on the configuration alone, so `config.yaml` gives the same number on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.config.schema import TrainingRoot

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATION = 17  # numbers kept per token, layer and unit of width, without attention scores: 34 bytes in 16 bits, arXiv 2205.05198, 4.1
PRODUCTS = 11  # of these, results of matrix products and attention in a gated layer: q, k and v, attention, o, gate, up and down
GATHERED = 2  # with `trainer.tp`, tokens gathered for attention and for feed-forward, once for each of the ranks that they came from
BUDGET = {"cpu": 2 * 2**30, "cuda": 8 * 2**30}  # bytes for activations: on a workstation; on a GPU, a tenth of 80 GB
SHARED = 2  # an engine on the same card halves the budget
WHOLE = 256  # rows are a multiple of this many tokens, unless they are seq_len or the whole batch


def activation_bytes(cfg: TrainingRoot) -> float:
    """Bytes that a rank keeps for the backward pass, per token of a row. With `trainer.cp` or `tp`, a token's are on one of several ranks.

    A layer with activation checkpointing keeps only its input, or also its products. One such layer at a time is recomputed. Buffers of the
    exchange of tokens between experts (`trainer.ep`), and experts that get more tokens than others, are not counted. No attention of packed
    rows keeps its scores, also not with a softcap or sinks (`rlx.models.attention`);
    transformers' own may (`model.attention=rows`, GPT-OSS).
    """
    width, layers, ac = BYTES[cfg.model.dtype] * cfg.model.hidden_size, cfg.model.num_layers, cfg.trainer.ac
    recomputed = -(-layers // ac.freq) if ac.freq else 0
    kept = 0 if cfg.trainer.ac_offloading and cfg.hardware.device == "cuda" else 1 if ac.mode == "full" else 1 + PRODUCTS
    numbers = ACTIVATION + GATHERED * (cfg.trainer.tp - 1)
    return ((layers - recomputed + min(1, recomputed)) * numbers + recomputed * kept) * width / cfg.trainer.ranks_of_a_row


def tokens_of_an_update(cfg: TrainingRoot) -> int:
    """The most tokens that a rank, or the ranks that compute rows together, trains on in one optimizer step: its share of the rollouts or
    rows, each of length seq_len."""
    return -(-cfg.samples_per_update * cfg.seq_len // cfg.data_ranks)


def budget(cfg: TrainingRoot) -> int:
    """Bytes for the activations of a row."""
    return BUDGET[cfg.hardware.device] // (SHARED if cfg.hardware.shared and cfg.servers_placed else 1)


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
