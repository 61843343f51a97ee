"""Builds the dataclasses of `schema.py` from plain nested dictionaries, and finds every problem in one pass.

Checks types and ranges, not the rules between keys. A role reads its run's `config.yaml` with this module alone, so it starts
without hydra.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING as NO_FACTORY
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlx.config.keys import HIDDEN, MISSING

# Not every `…_key` or `…_token`: `answer_key` names a column, `pad_token` a token. `…_api_key_var` names a variable.
SECRET = re.compile(
    r"(api[_-]?keys?|(secret|access|private)[_-]?key|client[_-]?secret|password|passwd|passphrase|authorization"
    r"|(^|[_-])(hf|hub|auth|access|bearer|github|gitlab|wandb|refresh|api)[_-]token)$",
    re.IGNORECASE,
)
IN_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "a section of keys",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the text for the user, and the dotted keys that it is about."""

    text: str
    keys: tuple[str, ...] = ()


@dataclass
class Origins:
    """Where values were set: dotted key -> `command line`, `RLX_SEQ_LEN` or a file. A key that is not listed has its default."""

    of_key: dict[str, str] = field(default_factory=dict)
    in_files: set[str] = field(default_factory=set)  # keys that some file sets, even if something else set them later
    of_groups: set[str] = field(default_factory=set)  # keys set last by a group file, not by the user or the primary file
    shipped: set[str] = field(default_factory=set)  # keys set last by a file that ships with rlx
    typed: set[str] = field(default_factory=set)  # keys set last by the command line or a variable
    secret: frozenset[str] = frozenset()  # keys whose values are not shown
    files: dict[str, Path] = field(default_factory=dict)  # the user's own files that count: `loss/mine.yaml` → where it is

    def note(self, keys: Iterable[str], origin: str, of_group: bool = False, shipped: bool = False, typed: bool = False) -> None:
        """Record that `origin` set `keys`, after any earlier origin."""
        for key in keys:
            self.of_key.pop(key, None)
            self.of_key[key] = origin  # keys set last are at the end
            (self.of_groups.add if of_group else self.of_groups.discard)(key)
            (self.shipped.add if shipped else self.shipped.discard)(key)
            (self.typed.add if typed else self.typed.discard)(key)

    def written(self, key: str) -> str:
        """The whole key that the user wrote when `key` is an unknown section: `trianer.compile` for `trianer`."""
        return next((known for known in self.of_key if known.startswith(key + ".")), key)

    def find(self, key: str) -> str:
        """Where `key` or a key inside it was set last; otherwise where the section around it was set; empty when unknown."""
        parts = re.split(r"\.|(?=\[)", key)  # an element of a list (`slurm.setup[0]`) was set with the list
        around = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        inside = (known for known in reversed(self.of_key) if known == key or known.startswith(key + "."))
        return next((self.of_key[known] for known in (*inside, *around) if known in self.of_key), "")

    def show(self, key: str, value: Any) -> str:
        """`seq_len=64 (conf/model/tiny.yaml)`."""
        origin = (self.find(key) or "default") if self.of_key else ""  # without any origins, do not even claim a default
        hidden = value is not None and (key in self.secret or (isinstance(value, str) and called_a_secret(key.rpartition(".")[2])))
        return f"{key}={HIDDEN if hidden else show(value)}" + (f" ({origin})" if origin else "")


def show(value: Any) -> str:
    """A value as written on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    return str(value)


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """Field names of a dataclass with their types, as types rather than strings."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union in their order; of any other type that type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def split_optional(kind: Any) -> tuple[Any, bool]:
    """A type without `None`, and whether it allowed `None`.

    Not cached: `int | str` equals `str | int`, so the one would get the order of the other, and values are read as the first that fits.
    """
    members = alternatives(kind)
    rest = [each for each in members if each is not type(None)]
    return (functools.reduce(operator.or_, rest), True) if 0 < len(rest) < len(members) else (kind, False)


def _walk(cls: type, prefix: str = "", mappings: bool = True) -> Iterator[tuple[str, Any, Field]]:
    """Every dotted key of a dataclass with its type and field, sections before their keys; `envs.<name>.id` for mappings of sections."""
    for f in fields(cls):
        kind, key = types_of(cls)[f.name], f"{prefix}{f.name}"
        plain, _ = split_optional(kind)
        yield key, kind, f
        if typing.get_origin(plain) is dict and is_dataclass(typing.get_args(plain)[1]) and mappings:
            yield from _walk(typing.get_args(plain)[1], f"{key}.<name>.")
        elif is_dataclass(plain):
            yield from _walk(typing.cast(type, plain), f"{key}.", mappings)


@functools.cache
def _walked(cls: Any, mappings: bool = True) -> tuple[tuple[str, Any, Field], ...]:
    return tuple(_walk(cls, mappings=mappings))


def leaves(cls: Any) -> tuple[str, ...]:
    """Every dotted key of a dataclass, also in optional sections, but not the sections themselves."""
    keys = [key for key, _, _ in _walked(cls)]
    sections = {key.rpartition(".")[0].removesuffix(".<name>") for key in keys}
    return tuple(key for key in keys if key not in sections)


def secret_keys(cls: Any) -> tuple[str, ...]:
    """Every dotted key that the schema marks as secret."""
    return tuple(key for key, _, f in _walked(cls, mappings=False) if f.metadata.get("secret"))


def optional_sections(cls: Any) -> tuple[str, ...]:
    """The dotted key of every section that may be None."""
    optional = ((key, *split_optional(kind)) for key, kind, _ in _walked(cls, mappings=False))
    return tuple(key for key, plain, may_be_none in optional if may_be_none and is_dataclass(plain))


def called_a_secret(name: str) -> bool:
    """Whether a key or variable that rlx does not know is called like a secret."""
    return SECRET.search(name) is not None


def type_at(cls: Any, key: str) -> Any:
    """The type at a dotted key; `Any` inside an open node. Raises KeyError for a key that the schema does not have."""
    kind: Any = cls
    for part in key.split("."):
        kind, _ = split_optional(kind)
        if is_dataclass(kind):
            kind = types_of(typing.cast(type, kind))[part]
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif kind is not Any:
            raise KeyError(key)
    return kind


def closest(name: str, known: list[str], limit: int = 3) -> list[str]:
    """The known names that the user probably meant by `name`, best first."""
    return difflib.get_close_matches(name, known, n=limit, cutoff=0.6)


def convert(kind: Any, value: Any, strict: bool = False) -> Any:
    """`value` as `kind`. Raises TypeError with what was expected. Unless `strict`, strings are read as numbers: variables are strings."""
    plain, optional = split_optional(kind)
    if value is None and (optional or plain in (Any, type(None))):
        return None
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if origin in (types.UnionType, typing.Union):
        for member in inner:
            with contextlib.suppress(TypeError):
                if not _is_foreign(member):
                    return convert(member, value, strict)
        if all(map(_is_foreign, inner)):
            return value
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        kinds = inner[:1] * len(value) if origin is list or Ellipsis in inner else inner
        if len(kinds) == len(value):
            return [convert(each, item, strict) for each, item in zip(kinds, value, strict=True)]
    elif dict in (origin, plain) and isinstance(value, dict):
        return {name: convert(inner[1], each, strict) for name, each in value.items()} if inner else value
    elif _is_foreign(plain) or (plain in (bool, str) and isinstance(value, plain)) or (origin is typing.Literal and value in inner):
        return value
    elif plain in (int, float, str) and isinstance(value, int | float | str) and not isinstance(value, bool):
        if plain is str:
            return str(value)
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if strict and isinstance(value, str):
                raise TypeError(f"{_in_words(plain)}, and this is text (YAML reads 1.0e-5 as a number, 1e-5 as text)")
            if number.is_integer() or (plain is float and not math.isnan(number)):
                return plain(number)
    raise TypeError(_in_words(plain) + (" or null" if optional else ""))


def _is_foreign(kind: Any) -> bool:
    """Whether it is a type that a file cannot hold, such as a tensor: then a value is taken as it is."""
    origin = typing.get_origin(kind)
    return (origin or kind) not in IN_WORDS and origin not in (types.UnionType, typing.Union, typing.Literal)


def _in_words(kind: Any) -> str:
    """`true or false or a string`."""
    if len(members := alternatives(kind)) > 1:
        return " or ".join(map(_in_words, members))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(show, typing.get_args(kind)))
    size = len(typing.get_args(kind)) if typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind) else 0
    plain = typing.get_origin(kind) or kind
    return f"a list of {size} values" if size else IN_WORDS.get(plain, getattr(plain, "__name__", str(plain)))


def range_of(metadata: typing.Mapping[str, Any]) -> str:
    """The condition on a key's value, in words: `at least 1`, `above 0 and at most 1`, `one of a, b`."""
    if metadata["choices"]:
        return ("one of " if len(metadata["choices"]) > 1 else "") + ", ".join(metadata["choices"])
    parts = [f"at least {metadata['low']}"] if metadata["low"] is not None else []
    parts += [f"above {metadata['above']}"] if metadata["above"] is not None else []
    parts += [f"at most {metadata['high']}"] if metadata["high"] is not None else []
    return " and ".join(parts)


def in_range(metadata: typing.Mapping[str, Any], value: Any) -> bool:
    """Whether a value is one of a key's choices and within its range."""
    if metadata["choices"]:
        return show(value) in metadata["choices"]  # true and false as written
    low, above, high = metadata["low"], metadata["above"], metadata["high"]
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def _default(f: Field) -> Any:
    """A field's default; an empty dictionary for a section, so that its own missing values are found."""
    if is_dataclass(f.default_factory):
        return {}
    return f.default if f.default_factory is NO_FACTORY else f.default_factory()


@dataclass
class Builder:
    """Builds a dataclass from a dictionary and collects the problems."""

    root: type
    origins: Origins = field(default_factory=Origins)
    found: list[Problem] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # keys without a value, with their meaning
    strict: bool = False  # of `convert`
    hint: Callable[[str], str] = lambda key: ""  # what to say about an unknown key: where it is known, or the keys that are near

    def __post_init__(self) -> None:
        self.origins.secret = frozenset(secret_keys(self.root))

    @property
    def problems(self) -> list[Problem]:
        """All problems. The missing values of one section are one problem."""
        sections: dict[str, list[str]] = {}
        for key, _ in self.missing:
            sections.setdefault(key.rpartition(".")[0], []).append(key)
        return self.found + [self._lacks(keys) for keys in sections.values()]

    def _lacks(self, keys: list[str]) -> Problem:
        text, fix = f"no value: {', '.join(keys)}", " ".join(f"{key}=…" for key in keys)
        if self.origins.secret.issuperset(keys):
            text, fix = f"{text}; it is secret, so no file holds it", f"{fix} (${{oc.env:NAME}} reads a variable), or null"
        elif len(keys) == 1:
            text = f"{text} ({dict(self.missing)[keys[0]]})"
        return Problem(f"{text}.\n  fix: {fix}", tuple(keys))

    def build(self, cls: type, data: Any, prefix: str = "") -> Any:
        """An instance of `cls`. A value with a problem becomes `???`, and the rules that read it are skipped."""
        if not isinstance(data, dict):
            section = prefix[:-1]
            text = f"`{section}` is a section of keys, not a value: {self.origins.show(section, data)}.\n  fix: set its keys instead"
            self.found.append(Problem(text, (section,)))
            return cls()
        known = {f.name: f for f in fields(cls)}
        for name in data:
            if name not in known:
                self._unknown(f"{prefix}{name}")
        values = {name: _default(f) for name, f in known.items()} | data
        return cls(**{name: self._value(types_of(cls)[name], values[name], f"{prefix}{name}", f) for name, f in known.items()})

    def _unknown(self, key: str) -> None:
        """Report an unknown key as the user wrote it, even if only its first part was looked up."""
        written = self.origins.written(key)
        origin = self.origins.find(written)
        text = f"unknown key `{written}`" + (f" ({origin})" if origin else "") + f". {self.hint(written)}".rstrip()
        if key == "env" and origin.endswith(".yaml"):
            text += "\n  fix: the line `# @package envs.NAME` at the head of a file of the group env"
        self.found.append(Problem(text, (key, "envs") if key == "env" else (key,)))

    def _value(self, kind: Any, value: Any, key: str, f: Field) -> Any:
        plain, optional = split_optional(kind)
        if value == MISSING or (value == HIDDEN and f.metadata.get("secret")):
            self.missing.append((key, f.metadata.get("doc", "a section of keys")))
            return plain() if is_dataclass(plain) else value  # type: ignore[operator]
        if is_dataclass(plain):
            return None if optional and value is None else self.build(typing.cast(type, plain), value, key + ".")
        if typing.get_origin(plain) is dict and is_dataclass(item := typing.get_args(plain)[1]) and isinstance(value, dict):
            return {str(name): self.build(item, each, f"{key}.{name}.") for name, each in value.items()}  # type: ignore[arg-type]
        try:
            value = convert(kind, value, self.strict)
            if value is None or in_range(f.metadata, value):
                return value
            expected: object = range_of(f.metadata)
        except TypeError as error:
            expected = range_of(f.metadata) if f.metadata.get("choices") else error
        self.found.append(Problem(f"`{key}` must be {expected}: {self.origins.show(key, value)}.", (key,)))
        return MISSING
