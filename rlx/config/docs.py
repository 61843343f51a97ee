"""Writes `docs/configuration.md` from the schema and the presets: `python -m rlx.config.docs`.

This file holds the prose of the page. Keys, types, defaults and meanings come from `schema.py`, options from the shipped groups.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlx.config.environment import RESERVED
from rlx.config.roots import TRAIN, Root, has_key, key_of
from rlx.config.schema import MISSING
from rlx.config.shipped import shipped_groups
from rlx.config.tree import range_of, show, split_optional, types_of

GROUPS = {
    "model": "the policy, with suitable lengths and a suitable learning rate",
    "env": "the environments to train on; a list mixes several",
    "loss": "the objective; it also chooses an advantage",
    "advantage": "how rewards become advantages",
    "optim": "the optimizer",
    "hardware": "which roles run on which GPUs",
    "launcher": "where processes are started",
    "logger": "where metrics go, besides `metrics.jsonl`; a list chooses several",
    "experiment": "the settings of one experiment, as differences from the defaults",
    "slurm": "the cluster for `launcher=slurm`; the files are in `slurm/`",
    "sweeps": "which values a sweep varies; the files are in `sweeps/`",
}

FOR_ALL = ("experiment", "sweeps")  # groups without a key of their own

HEAD = """\
# Configuration

Generated from `rlx/config/schema.py`, `conf/`, `slurm/` and `sweeps/` by `python -m rlx.config.docs`.

```
python train.py loss=gspo env=[math,reverse_text] model=qwen3_8b optim.lr=1e-6 dry_run=true
```

`group=option` chooses a file of `conf/`, `slurm/` or `sweeps/`; `key=value` sets a key. rlx checks everything before it starts
anything. It reports all problems at once: the keys, where their values come from, and what to do. The exit code is then 2.

## Where values come from

Weakest first:

1. the defaults below
2. the values in `conf/train.yaml` and in the chosen options of the groups
3. environment variables: `RLX_SEQ_LEN=128` sets `seq_len`, `RLX_MODEL__DTYPE=float32` sets `model.dtype` (two underscores separate
   levels), `RLX_LOSS=gspo` chooses an option of the group `loss`. Write values as on the command line
4. `experiment=NAME`, or a file of your own
5. the command line

Further forms: `env.KEY=VALUE` is short for `envs.<name>.KEY=VALUE` when the run has one environment. `env.id=MODULE` runs any
installed verifiers environment. `~envs.math` removes a key; this works for keys of `loss`, `advantage`, `optim`, `envs`, `eval.envs`
and `inference.vllm`. `env@eval.envs.math=math` evaluates on an option of `env` that the run does not train on.

## Files of your own

A directory of your own with the same groups adds options to them. This repository stays unchanged. Your files win over shipped
files of the same name. Name the directory with `--config-dir DIR` or `RLX_CONFIG_DIR=DIR`.

```
my_conf/env/riddles.yaml          # @package envs.riddles      →  --config-dir my_conf env=riddles
my_conf/experiment/first.yaml     # @package _global_          →  --config-dir my_conf experiment=first
my_conf/mine.yaml                 defaults: [train, _self_]    →  --config-dir my_conf --config-name mine
```

A run's own `config.yaml` holds every value: `--config-dir outputs/RUN --config-name config run.dir=NEW` runs it again. The value of a
secret key (`inference.api_key`) is never in this file, and never shown, logged or sent: `<secret>` replaces it. A new run needs it again.
`inference.api_key='${oc.env:NAME}'` takes it from a variable. This keeps it out of the list of processes and the shell's history.
"""


def render(root: Root = TRAIN) -> str:
    """The whole page of a root."""
    parts = [HEAD, "## Groups\n", *_groups(root), "## Keys\n", "A key with the default `???` needs a value; the presets set it.\n"]
    schema: Any = root.schema
    parts += _table("Top level", schema, "")
    for f in fields(schema):
        kind, _ = split_optional(types_of(schema)[f.name])
        if is_dataclass(kind):
            parts += _section(f.name, typing.cast(type, kind))
            if f.name == "eval":
                parts += _section("eval.envs.<name>", typing.get_args(types_of(typing.cast(type, kind))["envs"])[1])
        elif f.name == "envs":
            parts += _section("envs.<name>", typing.get_args(kind)[1])
    parts += [
        "## Open nodes\n",
        "`loss`, `advantage` and `optim` name a function or class by `_target_`; their other keys are its arguments.\n",
    ]
    for name, terms in ((f.name, f.metadata["terms"]) for f in fields(schema) if f.metadata.get("terms")):
        own, *inner = _section(name, terms)
        parts += [own.replace(f"### `{name}`", f"### Keys of every `{name}`"), *inner]
    parts += ["## Other environment variables\n", "| variable | meaning |\n| --- | --- |"]
    parts += [f"| `{name}` | {meaning} |" for name, meaning in RESERVED.items()]
    return "\n".join(parts).rstrip() + "\n"


def _groups(root: Root) -> Iterator[str]:
    for group, meaning in GROUPS.items():
        if group not in FOR_ALL and not has_key(root.schema, key_of(group)):
            continue
        yield f"### `{group}=`\n\n{meaning[0].upper()}{meaning[1:]}.\n\n| option | |\n| --- | --- |"
        for file in sorted(shipped_groups()[group].glob("*.yaml")):
            yield f"| `{file.stem}` | {_comment(file)} |"
        yield ""


def _comment(file: Path) -> str:
    """The comment at the head of a preset, without the package line, with commands as code."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if not text.startswith("@package"):
            lines.append(f"`{text}`:" if text.startswith("python ") else text)
    return " ".join(lines).replace("|", "\\|")


def _section(name: str, cls: type) -> list[str]:
    """The table of a section, followed by the tables of its inner sections."""
    parts = _table(f"`{name}`", cls, name + ".")
    for f in fields(cls):
        kind, optional = split_optional(types_of(cls)[f.name])
        if is_dataclass(kind):
            parts += _section(f"{name}.{f.name}", typing.cast(type, kind))
            if optional:
                parts += [f"`{name}.{f.name}` is null unless a preset sets it: {f.metadata['doc']}.\n"]
    return parts


def _table(title: str, cls: type, prefix: str) -> list[str]:
    rows = []
    for f in fields(cls):
        kind, optional = split_optional(types_of(cls)[f.name])
        if is_dataclass(kind) or f.name == "envs":
            continue
        limits = "" if f.metadata["choices"] else range_of(f.metadata)
        doc = f.metadata["doc"] + (f" ({limits})" if limits else "")
        rows.append(f"| `{prefix}{f.name}` | {_type_name(kind, optional)} | {_default(f)} | {doc.replace('|', chr(92) + '|')} |")
    return [f"### {title}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |", *rows, ""] if rows else []


def _type_name(kind: Any, optional: bool) -> str:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_type_name(each, False) for each in typing.get_args(kind)) + (" or null" if optional else "")
    name = {"list": "list of strings", "dict": "keys"}.get(getattr(typing.get_origin(kind), "__name__", ""), "")
    name = name or {int: "integer", float: "number", bool: "true or false", str: "string"}[kind]
    return f"{name} or null" if optional else name


def _default(f: Field) -> str:
    value = f.default_factory() if f.default_factory is not NO_DEFAULT else f.default
    return "`???`" if value == MISSING and isinstance(value, str) else f"`{show(value)}`"


if __name__ == "__main__":
    page = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    page.write_text(render())
    print(f"wrote {page}")
