"""The rule that no secret is written in an open key, such as an environment's argument: `config.yaml` and trackers would show it.

Keys of rlx's own that hold secrets are marked in the schema, and are hidden everywhere (`rlx.config.secret`). A key that a package names is
recognised by its name or its value. This finds the usual mistakes, not every secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rlx.config.roots import ROOTS
from rlx.config.rules import Describe, check_of
from rlx.config.schema import CommandConfig
from rlx.config.validate import Problem, called_a_secret, secret_keys

# As the best-known services make them: a folder may be called hf_checkpoint, or a model sk-something.
VALUE = re.compile(r"^(Bearer \S+|(hf_|gh[opsu]_)[A-Za-z0-9]{30,}|sk-(?=\S*\d)[A-Za-z0-9_-]{20,}|github_pat_\w{30,}|xox[abp]-[\w-]{20,})$")
# What no secret looks like: what servers without keys are given, a number, a truth value, a path, a variable's name or value.
HARMLESS = re.compile(
    r"(|empty|none|null|dummy([-_]key)?|unused|no[-_]key|local|ollama|not-needed|sk-no-key-required|true|false|[\d.]+|[/~.].*|[A-Z][A-Z0-9]*_[A-Z0-9_]+|\$.*)"
)
ASSIGNED = re.compile(r"(?:^|[\s;,])-{0,2}([A-Za-z_][A-Za-z0-9_-]*)=(['\"]?)([^\s;,`'\"]+)")  # in a shell line: a variable and its value
LOGIN = re.compile(r"://[^/\s:@$]*:[^/\s@$]+@")
SHELL = re.compile(r"slurm\.(setup|prefix|options)|.*\.harness\.command")
FIX = "leave it out; set an environment variable that the package or the job reads, or name one (judge_api_key_var=OPENAI_API_KEY)"


@check_of(CommandConfig)
def secrets_in_open_keys(cfg: CommandConfig, of: Describe) -> Iterator[Problem]:
    known = {"inference.vllm.api_key", *(key for root in ROOTS for key in secret_keys(root.schema))}  # the first has a rule of its own
    places = dict.fromkeys((place, key) for key, value in _texts(cfg, "") if key not in known for place in _secrets(key, value))
    for place, key in places:
        yield Problem(f"a secret would be written to the run's config.yaml, and shown to trackers: {place}.\n  fix: {FIX}", (key,))


def _secrets(key: str, value: str) -> Iterator[str]:
    """The places of secrets in a text."""
    if _is_secret(key.rpartition(".")[2], value):
        yield key
    if SHELL.match(key):
        yield from (f"{variable} in {key}" for variable, _, content in ASSIGNED.findall(value) if _is_secret(variable, content))
    if LOGIN.search(value) and (SHELL.match(key) or " " not in value):
        yield f"the password in the address of {key}"


def _is_secret(name: str, value: str) -> bool:
    harmless = HARMLESS.fullmatch(value) or HARMLESS.fullmatch(value.lower())
    return not harmless and (called_a_secret(name) or VALUE.match(value) is not None)


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """All texts of a configuration with their dotted keys. Those of a list have the list's."""
    if is_dataclass(node):
        node = {f.name: getattr(node, f.name) for f in fields(node)}
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node
