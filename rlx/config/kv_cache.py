"""How large the key-value cache of a server on CPU is when the configuration does not say: as large as its sequences can use.

vLLM zeroes the cache at its start, so an idle gigabyte costs memory and a second of every start.
On CUDA, vLLM takes what the card has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.config.rows import BYTES

if TYPE_CHECKING:
    from rlx.config.schema_base import PlayRoot

CPU_BLOCK = 32  # tokens of a cache block. Rollouts cannot share prompts shorter than a block, and vLLM's CPU default is 128.
MOST = 2**30  # bytes: on a workstation
SPARE = 2  # as much again stays for prompts that are shared, and for rollouts that wait for their environments


def kv_token_bytes(cfg: PlayRoot) -> float:
    """Bytes of the keys and values of one token, on each device of a replica."""
    model = cfg.model
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    # If there are fewer key-value heads than devices, heads are copied, never split.
    heads = max(1.0, model.num_key_value_heads / cfg.hardware.tensor_parallel)
    return 2 * model.num_layers * heads * head_dim * BYTES[model.dtype]


def kv_cache_bytes(cfg: PlayRoot) -> int:
    """Bytes of the cache of one server on CPU.

    `inference.kv_cache_gb`, or SPARE times what all its sequences take at full length, but at most MOST unless one sequence takes more.
    """
    if cfg.inference.kv_cache_gb is not None:
        return int(cfg.inference.kv_cache_gb * 2**30)
    sequence = SPARE * kv_token_bytes(cfg) * CPU_BLOCK * -(-cfg.max_model_len // CPU_BLOCK)
    return int(max(sequence, min(MOST, sequence * cfg.inference.max_num_seqs)))
