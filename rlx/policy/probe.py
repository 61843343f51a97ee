"""Looks at a model's chat format in a process of its own, before a run starts anything.

    python -m rlx.policy.probe < {"model": {"name": "…", …}, "tools": {"math": ["add", "subtract"]}}

answers `{"problem": null}` on its standard output, or the reason why the format does not serve these tools, for people. The tokenizer is
read from this machine alone: if it is not here yet, there is no problem to see. The caller is `rlx.preflight.chat_template_check`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rlx.config.schema import ModelConfig
from rlx.policy.chat import family_of, load_chat
from rlx.policy.templates import TOOL, ends_of, read_template, refusal
from rlx.process import die_with_parent


def problem_of(model: ModelConfig, tools: dict[str, list[str]]) -> str | None:
    """Why the model's chat format does not serve these tools (names by environment); None if it does, or is not on this machine."""
    from transformers import AutoTokenizer

    local = Path(model.name).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else model.name, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except OSError:
        return None
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(model.chat_template)
    if tokenizer.chat_template is None and family_of(model) is None:
        return f"the tokenizer of {model.name} has no chat template, as of a base model\n  fix: model.chat_template=FILE or a shipped name"
    if tokenizer.eos_token_id is None and not ends_of(tokenizer.name_or_path):
        return f"the tokenizer of {model.name} has no eos_token, so no answer would end\n  fix: name it in its tokenizer_config.json"
    functions: dict[str, Any] = TOOL["function"]  # type: ignore[assignment]
    named = {env: [{**TOOL, "function": {**functions, "name": name}} for name in names] for env, names in tools.items()}
    try:
        return refusal(model.name, load_chat(tokenizer, model), named)
    except ValueError as error:
        return str(error)


def main() -> None:
    """Answer the request on the standard input."""
    die_with_parent()
    request = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get into the answer
    print(json.dumps({"problem": problem_of(ModelConfig(**request["model"]), request["tools"])}), file=answer, flush=True)


if __name__ == "__main__":
    main()
