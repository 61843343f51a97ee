"""Renders the templates of `charts/rlx` as helm does, for the part of Go's templates that they use.

Actions: values (`.Values.a.b`, `$name`, literals, parentheses), pipes, `if`/`else`/`end`, `range`, `include`, trimming of white space.
Functions: those in `FUNCTIONS`. Anything else raises ValueError, so a template cannot use what this file does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\(|\)|\||:=|,|[^\s()|,"]+')


class Chart:
    """A chart's templates, with the defaults of its values."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.defaults = yaml.safe_load((root / "values.yaml").read_text())
        self.named: dict[str, list[Any]] = {}
        for file in root.glob("templates/*.tpl"):
            self._parse(file.read_text())

    def render(self, release: str, values: Mapping[str, Any], namespace: str = "default") -> list[dict[str, Any]]:
        """The objects of all templates, by helm's order of kinds."""
        dot = {"Values": merged(self.defaults, values), "Release": {"Name": release, "Namespace": namespace}}
        objects = []
        for file in sorted(self.root.glob("templates/*.yaml")):
            text = self._run(self._parse(file.read_text()), dot, {"$": dot})
            objects += [each for each in yaml.safe_load_all(text) if each]
        order = ["NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "Service", "Job"]
        return sorted(objects, key=lambda each: order.index(each["kind"]))

    # parsing: a list of texts and (action, words, branches)

    def _parse(self, source: str) -> list[Any]:
        pieces = self._pieces(source)
        tree, rest = self._block(pieces, 0)
        if rest != len(pieces):
            raise ValueError("an `end` too many")
        return tree

    def _pieces(self, source: str) -> list[str | list[str]]:
        found: list[str | list[str]] = []
        at, trim = 0, False
        for match in re.finditer(r"\{\{(-\s)?(.*?)(\s-)?\}\}", source, re.DOTALL):
            text = source[at : match.start()]
            text = text.lstrip() if trim else text
            found.append(text.rstrip() if match[1] else text)
            body = match[2].strip()
            if not body.startswith("/*"):
                found.append(WORD.findall(body))
            at, trim = match.end(), bool(match[3])
        return [*found, source[at:].lstrip() if trim else source[at:]]

    def _block(self, pieces: list[str | list[str]], at: int) -> tuple[list[Any], int]:
        tree: list[Any] = []
        while at < len(pieces):
            piece = pieces[at]
            if isinstance(piece, str):
                tree.append(piece)
            elif piece[0] in ("end", "else"):
                return tree, at
            elif piece[0] in ("if", "range", "with", "define"):
                inside, at = self._block(pieces, at + 1)
                other: list[Any] = []
                if pieces[at] == ["else"]:
                    other, at = self._block(pieces, at + 1)
                if pieces[at] != ["end"]:
                    raise ValueError(f"{piece} has no `end`")
                if piece[0] == "define":
                    self.named[json.loads(piece[1])] = inside
                else:
                    tree.append((piece[0], piece[1:], inside, other))
            else:
                tree.append(("show", piece, [], []))
            at += 1
        return tree, at

    # running

    def _run(self, tree: list[Any], dot: Any, scope: dict[str, Any]) -> str:
        out = []
        for node in tree:
            if isinstance(node, str):
                out.append(node)
                continue
            kind, words, inside, other = node
            if kind == "show":
                out.append(shown(self._value(words, dot, scope)))
            elif kind == "if":
                out.append(self._run(inside if self._value(words, dot, scope) else other, dot, scope))
            elif kind == "range":
                out += self._range(words, inside, dot, scope)
            else:
                raise ValueError(f"unknown action {kind}")
        return "".join(out)

    def _range(self, words: list[str], inside: list[Any], dot: Any, scope: dict[str, Any]) -> list[str]:
        names: list[str] = []
        if ":=" in words:
            names, words = [word for word in words[: words.index(":=")] if word != ","], words[words.index(":=") + 1 :]
        value = self._value(words, dot, scope)
        pairs = sorted(value.items()) if isinstance(value, Mapping) else list(enumerate(value or ()))
        return [
            self._run(inside, each, {**scope, **dict(zip(names, (key, each)[-len(names) :] if names else (), strict=False))})
            for key, each in pairs
        ]

    def _value(self, words: list[str], dot: Any, scope: dict[str, Any]) -> Any:
        stages: list[list[str]] = [[]]
        depth = 0
        for word in words:
            depth += (word == "(") - (word == ")")
            if word == "|" and depth == 0:
                stages.append([])
            else:
                stages[-1].append(word)
        value, first = None, True
        for stage in stages:
            arguments = [] if first else [value]
            value, first = self._call(stage, arguments, dot, scope), False
        return value

    def _call(self, words: list[str], last: list[Any], dot: Any, scope: dict[str, Any]) -> Any:
        operands: list[Any] = []
        function = words[0] if words[0] in FUNCTIONS or words[0] == "include" else None
        rest = words[1:] if function else words
        at = 0
        while at < len(rest):
            if rest[at] == "(":
                depth, end = 1, at + 1
                while depth:
                    depth += (rest[end] == "(") - (rest[end] == ")")
                    end += 1
                operands.append(self._value(rest[at + 1 : end - 1], dot, scope))
                at = end
            else:
                operands.append(atom(rest[at], dot, scope))
                at += 1
        if function == "include":
            name, inner = [*operands, *last]
            return self._run(self.named[name], inner, {"$": inner})
        if function:
            return FUNCTIONS[function](*operands, *last)
        if len(operands) != 1 or last:
            raise ValueError(f"{' '.join(words)} is no value")
        return operands[0]


def atom(word: str, dot: Any, scope: dict[str, Any]) -> Any:
    if word.startswith('"'):
        return json.loads(word)
    if word.lstrip("-").isdecimal():
        return int(word)
    if word == ".":
        return dot
    head, _, path = word.partition(".")
    if head and head not in scope:
        raise ValueError(f"unknown function or variable {word}")
    value = scope[head] if head else dot
    for part in filter(None, path.split(".")):
        value = value.get(part)
    return value


def shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """helm's values: maps are merged, anything else is replaced."""
    found = dict(defaults)
    for key, value in values.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


def required(message: str, value: Any) -> Any:
    if value in (None, ""):
        raise ValueError(message)
    return value


def kind_of(value: Any) -> str:
    kinds = {type(None): "invalid", bool: "bool", int: "int", float: "float64", str: "string", list: "slice", dict: "map"}
    return kinds[type(value)]


def nindent(spaces: int, text: str) -> str:
    return "\n" + "\n".join(" " * spaces + line for line in text.split("\n"))


FUNCTIONS = {
    "default": lambda default, value=None: value or default,
    "required": required,
    "quote": lambda value: json.dumps(shown(value), ensure_ascii=False),
    "nindent": nindent,
    "toYaml": lambda value: yaml.safe_dump(value, sort_keys=True).rstrip("\n"),
    "not": lambda value: not value,
    "or": lambda *values: next((each for each in values if each), values[-1]),
    "kindIs": lambda kind, value: kind_of(value) == kind,
}
