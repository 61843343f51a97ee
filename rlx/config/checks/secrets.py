"""The rule that no secret is written in an open key, such as an environment's argument: `config.yaml` and trackers would show it.

Keys of rlx's own that hold secrets are marked in the schema, and are hidden everywhere (`rlx.config.secret`). A key that a package names is
recognised by its name or its value. This finds the usual mistakes, not every secret.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rlx.config.roots import ROOTS
from rlx.config.rules import Show, rule
from rlx.config.schema import CommandConfig
from rlx.config.tree import called_a_secret, secret_keys

# As the best-known services make them: a folder may be called hf_checkpoint, or a model sk-something.
VALUE = re.compile(r"^(Bearer \S+|(hf_|gh[opsu]_)[A-Za-z0-9]{30,}|sk-(?=\S*\d)[A-Za-z0-9_-]{20,}|github_pat_\w{30,}|xox[abp]-[\w-]{20,})$")
# What no secret looks like: what servers without keys are given, a number, a truth value, a path, a variable's name or value.
HARMLESS = re.compile(
    r"(|empty|none|null|dummy|local|ollama|not-needed|sk-no-key-required|true|false|[\d.]+|[/~.].*|[A-Z][A-Z0-9]*_[A-Z0-9_]+|\$.*)"
)
ASSIGNED = re.compile(r"(?:^|[\s;,])([A-Za-z_][A-Za-z0-9_]*)=(['\"]?)([^\s;,`'\"]+)")  # in a shell line: a variable and its value
LOGIN = re.compile(r"://[^/\s:@$]*:[^/\s@$]+@")
SHELL = ("slurm.setup", "slurm.options")
# Sections with keys that rlx does not know, or with addresses. `kubernetes` has rules and places of its own.
OPEN = (
    "model",
    "envs",
    "sampling",
    "inference",
    "loss",
    "advantage",
    "optim",
    "teacher",
    "eval",
    "client",
    "data",
    "slurm",
    "launcher",
    "logger",
)
SHOWN = "would be written to the run's config.yaml, and shown to trackers"


def secrets_in_open_keys(section: str, cfg: CommandConfig, of: Show) -> Iterator[str]:
    marked = {key for root in ROOTS for key in secret_keys(root.schema)}
    known = {*marked, "inference.vllm.api_key"}  # a rule of its own names the key to set instead
    found: dict[str, None] = {}
    for key, value in _texts(getattr(cfg, section), section):
        if key not in known:
            found |= dict.fromkeys(_problems(key, value))
    yield from found


for each in OPEN:  # a rule names what it reads, and holds for commands that have that
    rule(each)(functools.wraps(secrets_in_open_keys)(functools.partial(secrets_in_open_keys, each)))


def _problems(key: str, value: str) -> Iterator[str]:
    name = key.rpartition(".")[2]
    if _is_secret(name, value):
        yield (
            f"a secret {SHOWN}: {key}.\n"
            "Leave it out, and set an environment variable that the package reads. Many environments take the name of a variable "
            "(judge_api_key_var=OPENAI_API_KEY), and servers that want no key take EMPTY."
        )
    for variable, _, content in ASSIGNED.findall(value) if key.startswith(SHELL) else ():
        if _is_secret(variable, content):
            yield (
                f"a secret {SHOWN}: {variable} in {key}.\n"
                f"Export it in the shell that starts rlx, or read it from a file of yours: export {variable}=$(cat ~/.{variable.lower()})."
            )
    if LOGIN.search(value) and (key.startswith(SHELL) or " " not in value):
        yield f"a password {SHOWN}: in the address of {key}.\nUse an address without a login."


def _is_secret(name: str, value: str) -> bool:
    harmless = HARMLESS.fullmatch(value) or HARMLESS.fullmatch(value.lower())
    return not harmless and (called_a_secret(name) or VALUE.match(value) is not None)


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """All texts of a configuration with their dotted keys. Those of a list have the list's."""
    if is_dataclass(node):
        node = {f.name: getattr(node, f.name) for f in fields(node)}
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node
