"""What the plan says of the key-value cache of a server on CPU."""

from __future__ import annotations

from pathlib import Path

from rlx.config.load import compose
from rlx.plan.make import make_plan
from rlx.plan.servers import memory_of


def test_the_plan_says_how_many_sequences_the_cache_holds_and_what_all_would_take() -> None:
    cfg = compose(["experiment=math_smollm2", "hardware=cpu"], {}).cfg
    token = 2 * 30 * 3 * 64 * 4  # keys and values of 30 layers with 3 heads of 64, float32
    text = "\n".join(memory_of(cfg, make_plan(cfg, Path("/run"))))
    assert f"KV cache 1.0 GiB (inference.kv_cache_gb): {2**30 / token:,.0f} tokens, 91 sequences of full length" in text, text
    assert f"{256 * 256 * token / 2**30:.1f} GiB would hold all concurrent sequences at full length; they need less" in text, text
