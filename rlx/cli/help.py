"""Help texts generated from the shipped configuration and the schema, without hydra."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields

from rlx.config.presets import shipped_groups
from rlx.config.roots import has_key, key_of
from rlx.config.validate import type_at

FOR_ALL = ("experiment", "sweeps")  # groups without a key of their own
WIDTH = 120


def groups(schema: type) -> str:
    """One line per configuration group of a command, with its options."""
    folders = {name: folder for name, folder in shipped_groups().items() if name in FOR_ALL or has_key(schema, key_of(name))}
    return _columns({name: ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) for name, folder in folders.items()})


def keys(schema: type, names: Sequence[str]) -> str:
    """One line for each of these keys."""
    found = {}
    for key in names:
        section, _, name = key.rpartition(".")
        cls = type_at(schema, section) if section else schema
        found[key] = next(field.metadata["doc"] for field in fields(cls) if field.name == name)
    return _columns(found)


def _columns(entries: dict[str, str]) -> str:
    width = max(map(len, entries)) + 2
    indent = " " * (width + 2)
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"  {name.ljust(width)}", subsequent_indent=indent) for name, text in entries.items()
    ]
    return "\n".join(lines)
