"""The environment variables that set configuration values: `RLX_SEQ_LEN=128`, `RLX_MODEL__DTYPE=float32`, `RLX_LOSS=gspo`.

Two underscores separate levels. Values are written as on the command line. A key that holds a string takes the variable's text as it is.
The caller parses the values, because this module does not know hydra's grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx.config.nested import own_name
from rlx.config.roots import has_key, key_of, where_else
from rlx.config.suggest import near_keys
from rlx.config.validate import closest, split_optional, type_at

PREFIX = "RLX_"
RESERVED = {
    "RLX_CACHE": "where models that rlx makes are kept between runs; default `~/.cache/rlx`",
    "RLX_CONFIG_DIR": "directories with configuration files of your own, like `--config-dir`; `:` separates several",
    "RLX_API_KEY": "sets no key; free for `inference.api_key=${oc.env:RLX_API_KEY}` with servers that already run",
    "RLX_PYTHONS": "where `rlx env install` makes Pythons; default `.pythons` of the checkout, else `~/.local/share/rlx/pythons`",
    "RLX_NEW_DIR": "read by a run's `reproduce.sh`: the directory of the new run",
    "RLX_SOURCE": "read by a run's `reproduce.sh`: the checkout to run instead of the recorded one",
    "RLX_TODAY": "the day (2026-11-30) that a chat template sees as today's; default: that on which the run began",
    "RLX_REQUIRE_SLURM": "read by the tests: when set, SLURM tests fail where SLURM cannot be started, instead of being skipped",
    "RLX_REQUIRE_NAMESPACES": "the same for the test of two hosts in network namespaces",
    "RLX_REQUIRE_SANDBOX": "the same for the tests of boxes, which take bubblewrap",
    "RLX_HOST": "the name or address by which other hosts reach this one; the supervisor sets it, for roles by hand you do",
    "RLX_SECRET": "set for a vLLM server: what every request must carry as its key; set it yourself for a server that you start by hand",
    "RLX_STALLS": "set by a role for the processes that it starts: the folder in which they answer the supervisor's questions",
    "RLX_SUPERVISOR_PID": "set by the supervisor for the processes it starts: its process id",
    "RLX_MOUNTS": "set by a SLURM job for its supervisor: what the containers have mounted",
    "RLX_OUTSIDE": "set by a SLURM job for its supervisor in a container: the folder through which it gives commands to the host",
    "RLX_WORKER_TOKEN": "set for an environment worker and all that it starts: a random value of its own",
    "RLX_RUN_TOKEN": "set by the launcher for the processes it starts: a random value, the same for all processes of one attempt",
}
"""Variables with this prefix that set no configuration key."""


@dataclass(frozen=True)
class Variable:
    """One variable: its name, the group or the dotted key that it sets, and its text."""

    name: str
    key: str
    text: str
    is_group: bool  # chooses an option of a group
    is_text: bool  # sets a key that holds a string, so its value needs no quotes


def read_variables(environ: Mapping[str, str], groups: list[str], schema: type) -> tuple[list[Variable], list[str]]:
    """The configuration variables in `environ`, sorted by name, and one problem for each variable that sets no known key.

    `groups` and `schema` are those of one command. Variables for the keys of another command are skipped.
    """
    found, problems = [], []
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in RESERVED):
        key = own_name(name.removeprefix(PREFIX).lower().replace("__", "."))
        is_group = key in groups
        if is_group or has_key(schema, key):
            is_text = not is_group and split_optional(type_at(schema, key))[0] is str
            found.append(Variable(name, key, environ[name], is_group, is_text))
        elif not where_else(schema, key_of(key)):
            problems.append(_unknown(name, groups, schema))
    return found, problems


def variable_of(key: str) -> str:
    """The name of the variable that sets a key."""
    return PREFIX + key.upper().replace(".", "__")


def _unknown(name: str, groups: list[str], schema: type) -> str:
    key = name.removeprefix(PREFIX).lower()
    near = closest(name, [*map(variable_of, (*groups, *near_keys(schema, key.replace("__", ".")), *near_keys(schema, key))), *RESERVED], 1)
    hint = f"Did you mean {near[0]}?" if near else "docs/configuration.md lists the keys."
    return (
        f"the environment variable {name} sets no configuration key. {hint}\n"
        "Two underscores separate levels: RLX_MODEL__DTYPE sets model.dtype, RLX_LOSS chooses an option of the group loss."
    )
