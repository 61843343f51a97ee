"""Reads and writes YAML files. Numbers are those of YAML 1.2: `1e-5` is one; `12:30:00`, `0x10` and `007` are text, unlike in 1.1."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from rlx.config.errors import may_parse, may_read

BOTH_VERSIONS_DIFFER = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
DEEPEST = 100  # values within values
INT = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|[0-9]+(?=[eE])|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that a mapping has twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as in the class above)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in BOTH_VERSIONS_DIFFER]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names and key.value != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} is there twice", key.start_mark)
            names.append(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes text that either version takes for a number in quotes."""


for each in (Loader, _Dumper):
    each.add_implicit_resolver("tag:yaml.org,2002:int", INT, list("-+0123456789"))
    each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


@functools.lru_cache(maxsize=1024)
def parsed(text: str) -> dict[str, Any]:
    """The keys in the text of a file; to read only, because the runs of a sweep share them. Raises what `may_parse` explains."""
    depth = 0
    for event in yaml.parse(text, Loader):  # libyaml's loader goes down by recursion, to the end of the process's stack
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"its values are nested more than {DEEPEST} deep")
    data = yaml.load(text, Loader)
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"it holds {type(data).__name__} instead of keys: {data!r}")
    return data or {}


def read(path: Path) -> dict[str, Any]:
    """The keys of a file. Raises ConfigError that names the file and the line; FileNotFoundError."""
    with may_read(path), may_parse(path):
        return copy.deepcopy(parsed(path.read_text(encoding="utf-8")))


def dumped(data: dict[str, Any]) -> str:
    """The text of a file with these keys."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def described(record: Any) -> str:
    """A record for people, as YAML: without what is empty, numbers to four digits."""
    return dumped(_plain(record)).rstrip()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items() if each not in (None, "", (), [], {})}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
