"""The closing summary names the trainer's kernels, also if `auto` chose them."""

from __future__ import annotations

from pathlib import Path

from launch_configs import config

from rlx.cli.console import Console
from rlx.paths import write_text


def test_the_summary_says_which_kernels_trained(tmp_path: Path):
    console = Console(tmp_path, config("cpu"))
    assert "kernels" not in console.summary(1), "the trainer did not get that far"
    write_text(console.paths.kernels, '{"logprob": "triton", "layers": "rope, rms_norm of qwen3; 11 modules"}')
    assert "  kernels   log-probabilities by triton · Liger's layer kernels rope, rms_norm of qwen3; 11 modules\n" in console.summary(0)
    write_text(console.paths.kernels, '{"logprob": "torch", "layers": "off", "warning": "rounding alone clips sequences"}')
    assert "  warning   rounding alone clips sequences\n" in console.summary(0)
