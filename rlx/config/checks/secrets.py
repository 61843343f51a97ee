"""The rule that no secret is written in an open key, such as an environment's argument: `config.yaml` and trackers would show it.

Keys of rlx's own that hold secrets are marked in the schema, and are hidden everywhere (`rlx.config.secret`). A key that a package names is
known only by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlx.config.checks.kubernetes import names_a_secret
from rlx.config.rules import Show, rule
from rlx.config.schema import CommandConfig
from rlx.config.tree import secret_keys

# Not every `…_key` or `…_token`: `answer_key` names a column, `pad_token` a token. `…_api_key_var` names a variable.
NAME = re.compile(
    r"(^|[_-])(api[_-]?key|password|passwd|secret|((hf|hub|auth|access|bearer|github|gitlab|wandb|refresh|api)[_-]token))$", re.I
)
PLACEHOLDERS = {"", "EMPTY", "NONE", "DUMMY"}  # what servers without a key are given
ASSIGNED = re.compile(r"(?:^|[\s;])([A-Za-z_][A-Za-z0-9_]*)=(['\"]?)([^\s;$`'\"]+)")  # of a shell line: a variable and a literal value
LOGIN = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
OF_KUBERNETES = "kubernetes"  # it has rules and places of its own


@rule("run")
def secrets_in_open_keys(cfg: CommandConfig, of: Show) -> Iterator[str]:
    known = set(secret_keys(type(cfg)))
    for key, value in _texts(asdict(cfg), ""):
        if key in known or key.partition(".")[0] == OF_KUBERNETES:
            continue
        name = key.rpartition(".")[2]
        if NAME.search(name) and value.upper() not in PLACEHOLDERS:
            yield (
                f"a secret would be written to the run's config.yaml, and shown to trackers: {key}.\n"
                f"Leave it out, and set an environment variable that the package reads, such as {_variable(name)}. Many environments take "
                "the name of a variable (judge_api_key_var=OPENAI_API_KEY)."
            )
        for variable in sorted({found[1] for found in ASSIGNED.finditer(value)}) if key == "slurm.setup" else ():
            if not names_a_secret(variable):
                continue
            yield (
                f"a secret would be written to the run's config.yaml, and shown to trackers: {variable} in {key}.\n"
                f"Export it in the shell that starts rlx, or read it from a file of yours: export {variable}=$(cat ~/.{variable.lower()})."
            )
        if name.endswith("url") and LOGIN.search(value):
            yield (
                f"a password would be written to the run's config.yaml, and shown to trackers: in the address of {key}.\n"
                "Use an address without a login."
            )


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """All texts of a configuration with their dotted keys. Those of a list have the list's."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node
