"""Writes vLLM's options as its command line reads them. Pure.

flags({"max_num_seqs": 64, "enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"head_dtype": "float32"}})
→ ["--max-num-seqs", "64", "--enforce-eager", "--no-enable-prefix-caching", "--hf-overrides", '{"head_dtype": "float32"}']
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SWITCHES = ("aggregate_engine_logging",)  # flags without a `--no-` form: false leaves them out


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line arguments for options by their names in Python. `None` leaves an option at vLLM's default; a list is several values."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}"] if value else [f"--no-{flag}"] * (name not in SWITCHES)
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{flag}", *(json.dumps(each) if isinstance(each, Mapping) else str(each) for each in values)]
    return words
