"""Builds the dataclasses of `schema.py` from plain nested dictionaries, and finds every problem in one pass.

Checks types and ranges, not the rules between keys. A role reads its run's `config.yaml` with this module alone, so it starts
without hydra.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING as MISSING_FACTORY
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from rlx.config.keys import HIDDEN, MISSING

# Not every `…_key` or `…_token`: `answer_key` names a column, `pad_token` a token. `…_api_key_var` names a variable.
SECRET = re.compile(
    r"(api[_-]?keys?|(secret|access|private)[_-]?key|client[_-]?secret|password|passwd|passphrase|authorization"
    r"|(^|[_-])(hf|hub|auth|access|bearer|github|gitlab|wandb|refresh|api)[_-]token)$",
    re.IGNORECASE,
)
NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
IN_WORDS: dict[Any, str] = {**NAMES, list: "a list", tuple: "a list", dict: "a section of keys"}


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
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
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


def leaves(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass, also in optional sections, but not the sections themselves; `envs.<name>.id` for mappings."""
    for name, kind in types_of(cls).items():
        kind, _ = split_optional(kind)
        key = f"{prefix}{name}"
        if is_dataclass(kind):
            yield from leaves(typing.cast(type, kind), key + ".")
        elif typing.get_origin(kind) is dict and is_dataclass(typing.get_args(kind)[1]):
            yield from leaves(typing.get_args(kind)[1], f"{key}.<name>.")
        else:
            yield key


def called_a_secret(name: str) -> bool:
    """Whether a key or variable that rlx does not know is called like a secret."""
    return SECRET.search(name) is not None


def secret_keys(cls: type) -> tuple[str, ...]:
    """Every dotted key that the schema marks as secret."""
    return _secret_keys(cls, "")


@functools.cache
def _secret_keys(cls: type, prefix: str) -> tuple[str, ...]:
    found: list[str] = []
    for f in fields(cls):
        kind, _ = split_optional(types_of(cls)[f.name])
        if is_dataclass(kind):
            found += _secret_keys(typing.cast(type, kind), f"{prefix}{f.name}.")
        elif f.metadata.get("secret"):
            found.append(f"{prefix}{f.name}")
    return tuple(found)


def optional_sections(cls: type, prefix: str = "") -> Iterator[str]:
    """The dotted key of every section that may be None."""
    for name, kind in types_of(cls).items():
        kind, optional = split_optional(kind)
        if is_dataclass(kind):
            if optional:
                yield f"{prefix}{name}"
            yield from optional_sections(typing.cast(type, kind), f"{prefix}{name}.")


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


def convert(kind: Any, value: Any) -> Any:
    """`value` as `kind`. Raises TypeError with what was expected. Strings are read as numbers: environment variables are strings."""
    kind, optional = split_optional(kind)
    if value is None:
        if optional or kind is Any or kind is type(None):
            return None
        raise TypeError(_in_words(kind) + ", not null")
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_to_any_of([arg for arg in typing.get_args(kind) if arg is not type(None)], value)
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise TypeError("a list, like [a,b]")
        (item,) = typing.get_args(kind)
        return [convert(item, each) for each in value]
    if origin is dict or kind is dict:
        if not isinstance(value, dict):
            raise TypeError("a section of keys")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError("a list, like [a,b]")
        kinds = typing.get_args(kind)
        if Ellipsis in kinds:
            return [convert(kinds[0], each) for each in value]
        if len(kinds) != len(value):
            raise TypeError(f"a list of {len(kinds)} values")
        return [convert(each, item) for each, item in zip(kinds, value, strict=True)]
    if kind not in NAMES:
        return value
    or_null = " or null" if optional else ""
    if kind is bool:
        word = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}.get(str(value).lower())
        if word is None:
            raise TypeError(NAMES[bool] + or_null)
        return word
    if kind is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
        raise TypeError(NAMES[str] + or_null)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(NAMES[kind] + or_null)
    try:
        number = float(value)
    except ValueError:
        raise TypeError(NAMES[kind] + or_null) from None
    if kind is float:
        if math.isnan(number):
            raise TypeError("a number, not nan")
        return number
    if not number.is_integer():
        raise TypeError(NAMES[int] + or_null)
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.lstrip("+-").isdigit()) else int(number)


def _in_words(kind: Any) -> str:
    """`true or false or a string`."""
    if len(members := alternatives(kind)) > 1:
        return " or ".join(map(_in_words, members))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(show, typing.get_args(kind)))
    plain = typing.get_origin(kind) or kind
    return IN_WORDS.get(plain, getattr(plain, "__name__", str(plain)))


def _convert_to_any_of(kinds: list[Any], value: Any) -> Any:
    """`value` as the first type of a union that accepts it. Types that a file cannot hold (a tensor) are skipped."""
    kinds = [kind for kind in kinds if kind in NAMES or typing.get_origin(kind) is not None]
    expected = []
    for kind in kinds:
        try:
            return convert(kind, value)
        except TypeError as error:
            expected.append(str(error))
    if expected:
        raise TypeError(" or ".join(expected))
    return value


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
    if f.default_factory is MISSING_FACTORY:
        return f.default
    value = f.default_factory()
    return {} if is_dataclass(value) else value


@dataclass
class Builder:
    """Builds a dataclass from a dictionary and collects the problems."""

    root: type
    origins: Origins = field(default_factory=Origins)
    found: list[Problem] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # keys without a value, with their meaning
    hint: Callable[[str], str] = lambda key: ""  # what to say about an unknown key: where it is known, or the keys that are near
    siblings: dict[str, list[str]] = field(default_factory=dict)  # section of a mapping, such as `envs.math` -> all names in the mapping

    def __post_init__(self) -> None:
        self.origins.secret = frozenset(secret_keys(self.root))

    @property
    def problems(self) -> list[Problem]:
        """All problems. The missing values of one section are one problem."""
        return self.found + [self._lacks(section) for section in dict.fromkeys(key.rpartition(".")[0] for key, _ in self.missing)]

    def _lacks(self, section: str) -> Problem:
        missing = [(key, doc) for key, doc in self.missing if key.rpartition(".")[0] == section]
        keys = tuple(key for key, _ in missing)
        mapping, _, own = section.rpartition(".")
        if others := [each for each in self.siblings.get(section, []) if f"{mapping}.{each}.id" not in dict(self.missing)]:
            near = "".join(f" Did you mean `{mapping}.{each}`?" for each in closest(own, others, 1))
            text = f"there is no `{section}` ({self.origins.written(section)}); `{mapping}` has {', '.join(others)}.{near}"
            return Problem(f"{text}\nFor a new one, set {keys[0]}=…", keys)
        if set(keys) <= self.origins.secret:
            text = "".join(f"`{key}` is secret, so the file does not hold its value.\nGive it again: {key}=… " for key in keys)
            return Problem(text + "(${oc.env:NAME} reads a variable), or null if it is no longer needed.", keys)
        if len(keys) == 1:
            return Problem(f"`{keys[0]}` has no value: {missing[0][1]}. Set {keys[0]}=…", keys)
        names = ", ".join(key.rpartition(".")[2] for key in keys)
        of_section = f" of `{section}`" if section else ""
        text = f"keys{of_section} without a value: {names}.\nSet them in a file, as the presets in conf/ do, or each as {keys[0]}=…"
        return Problem(text, keys)

    def build(self, cls: type, data: Any, prefix: str = "") -> Any:
        """An instance of `cls`. A value with a problem becomes `???`, and the rules that read it are skipped."""
        if not isinstance(data, dict):
            section = prefix[:-1]
            self.found.append(
                Problem(
                    f"`{section}` is a section of keys, not a value: {self.origins.show(section, data)}. Set its keys instead.", (section,)
                )
            )
            return cls()
        known = {f.name: f for f in fields(cls)}
        for name in data:
            if name not in known:
                self._unknown(f"{prefix}{name}")
        return cls(
            **{name: self._value(types_of(cls)[name], data.get(name, _default(f)), f"{prefix}{name}", f) for name, f in known.items()}
        )

    def _unknown(self, key: str) -> None:
        """Report an unknown key as the user wrote it, even if only its first part was looked up."""
        written = self.origins.written(key)
        origin = self.origins.find(written)
        text = f"unknown key `{written}`" + (f" ({origin})" if origin else "") + f". {self.hint(written)}".rstrip()
        if key == "env" and origin.endswith(".yaml"):
            text += "\nA file of the group env must begin with the line `# @package envs.NAME`."
        self.found.append(Problem(text, (key, "envs") if key == "env" else (key,)))

    def _value(self, kind: Any, value: Any, key: str, f: Any) -> Any:
        plain, optional = split_optional(kind)
        if isinstance(value, str) and (value == MISSING or (value == HIDDEN and f.metadata.get("secret"))):
            self.missing.append((key, f.metadata.get("doc", "a section of keys")))
            return plain() if is_dataclass(plain) else value  # type: ignore[operator]
        if is_dataclass(plain):
            if optional and (value is None or (value == [] and f.metadata.get("was_list"))):
                return None
            if isinstance(value, list) and f.metadata.get("was_list"):
                self.found.append(Problem(f"`{key}`: {f.metadata['was_list']}: {self.origins.show(key, value)}.", (key,)))
                return None
            return self.build(typing.cast(type, plain), value, key + ".")
        if typing.get_origin(plain) is dict and is_dataclass(typing.get_args(plain)[1]) and isinstance(value, dict):
            item = typing.cast(type, typing.get_args(plain)[1])
            self.siblings |= {f"{key}.{name}": list(map(str, value)) for name in value}
            return {str(name): self.build(item, each, f"{key}.{name}.") for name, each in value.items()}
        try:
            value = convert(kind, value)
        except TypeError as error:
            expected = range_of(f.metadata) if value is None and f.metadata.get("choices") else error
            self.found.append(Problem(f"`{key}` must be {expected}: {self.origins.show(key, value)}.", (key,)))
            return MISSING
        if value is not None and f.metadata and not in_range(f.metadata, value):
            self.found.append(Problem(f"`{key}` must be {range_of(f.metadata)}: {self.origins.show(key, value)}.", (key,)))
            return MISSING
        return value
