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
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words += [] if name in SWITCHES else [f"--no-{flag}"]
        elif value is not None:
            words += [f"--{flag}", *([_word(each) for each in value] if isinstance(value, list | tuple) else [_word(value)])]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
