"""Numbers as a file has them. YAML 1.1 reads 0x10 as 16 and 12:30 as 750; a key that holds text, such as a variable, keeps these texts."""

from __future__ import annotations

import itertools
import json
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from rlx.config.tree import Origins, split_optional, type_at

Path = tuple[str | int, ...]
"""What leads to a value: names of keys, and places in lists."""
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read(text: str, loader: Any) -> tuple[Any, str]:
    """The content of a file, and as JSON its numbers that Python would write otherwise: pairs of the names that lead there and the text."""
    reader = loader(text)
    try:
        node = reader.get_single_node()
        data = None if node is None else reader.construct_document(node)
        return data, json.dumps([] if node is None else list(_unlike(reader, node, (), ())))
    finally:
        reader.dispose()


def _unlike(reader: Any, node: yaml.Node, names: Path, around: tuple[yaml.Node, ...]) -> Iterator[tuple[Path, str]]:
    """`around`: the nodes that hold this one. An alias of one of those has no end; what reads the content reports it."""
    if any(node is each for each in around):
        return
    around = (*around, node)
    if isinstance(node, yaml.MappingNode):  # what `<<` merges into it is in it by now, before its own keys: the last one of a name counts
        for name, value in {str(key.value): value for key, value in node.value}.items():
            yield from _unlike(reader, value, (*names, name), around)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _unlike(reader, value, (*names, place), around)
    elif isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS and str(reader.construct_object(node)) != node.value:
        yield names, node.value


def note(origins: Origins, written: str | None, package: str) -> None:
    """Record the texts of one file, after it was noted as the origin of its keys. `written`: from `read`."""
    for names, text in json.loads(written or "[]"):
        whole = (*filter(None, package.split(".")), *names)
        origins.texts.setdefault(".".join(_names(whole)), []).append((whole, text))  # a list is one key: it is replaced as a whole


def keep(schema: type, data: dict[str, Any], origins: Origins) -> None:
    """Put such a text in place of its number, in `data`, where the schema's key holds text."""
    for path, text in (each for found in origins.texts.values() for each in found):
        section: Any = data
        for step in path[:-1]:
            section = _inside(section, step)
        if isinstance(_inside(section, path[-1]), int | float) and _holds_text(schema, path):
            section[path[-1]] = text


def _inside(section: Any, step: str | int) -> Any:
    if isinstance(section, list) and isinstance(step, int):
        return section[step] if step < len(section) else None
    return section.get(step) if isinstance(section, dict) else None


def _names(path: Path) -> list[str]:
    """The names that lead to a value, or to the list that it is in."""
    return list(itertools.takewhile(lambda step: isinstance(step, str), path))  # type: ignore[arg-type]


def _holds_text(schema: type, path: Path) -> bool:
    names = _names(path)
    try:
        kind = type_at(schema, ".".join(name.replace(".", "_") for name in names))  # a label of a node has dots in its name
    except KeyError:
        return False
    for _ in path[len(names) :]:
        kind = split_optional(kind)[0]
        kind = typing.get_args(kind)[0] if typing.get_origin(kind) is list else None
    return split_optional(kind)[0] is str
