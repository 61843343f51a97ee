"""Numbers as a file has them. YAML 1.1 reads 0x10 as 16 and 12:30 as 750; a key that holds text, such as a variable, keeps these texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from rlx.config.tree import Origins, split_optional, type_at

NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read(text: str, loader: Any) -> tuple[Any, str]:
    """The content of a file, and as JSON its numbers that Python would write otherwise: pairs of the names that lead there and the text."""
    reader = loader(text)
    try:
        node = reader.get_single_node()
        data = None if node is None else reader.construct_document(node)
        return data, json.dumps([] if node is None else list(_unlike(reader, node, ())))
    finally:
        reader.dispose()


def _unlike(reader: Any, node: yaml.Node, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, yaml.MappingNode):  # what `<<` merges into it is in it by now
        for key, value in node.value:
            yield from _unlike(reader, value, (*names, str(key.value)))
    elif isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS and str(reader.construct_object(node)) != node.value:
        yield names, node.value


def note(origins: Origins, written: str | None, package: str) -> None:
    """Record the texts of one file, after it was noted as the origin of its keys. `written`: from `read`."""
    for names, text in json.loads(written or "[]"):
        whole = (*filter(None, package.split(".")), *names)
        origins.texts[".".join(whole)] = whole, text


def keep(schema: type, data: dict[str, Any], origins: Origins) -> None:
    """Put such a text in place of its number, in `data`, where the schema's key holds text."""
    for (*above, last), text in origins.texts.values():
        section: Any = data
        for name in above:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(last), int | float) and _holds_text(schema, [*above, last]):
            section[last] = text


def _holds_text(schema: type, names: list[str]) -> bool:
    try:
        kind = type_at(schema, ".".join(name.replace(".", "_") for name in names))  # a label of a node has dots in its name
    except KeyError:
        return False
    return split_optional(kind)[0] is str
