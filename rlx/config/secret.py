"""Secret keys (`key(…, secret=True)`): their values stay in memory and in one file of the run directory that only its owner can read.

Whatever is shown, written or sent elsewhere goes through `hidden` or `hide_lines`. Standard library and the schema's keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rlx.config.keys import MISSING
from rlx.config.tree import secret_keys

T = TypeVar("T")
HIDDEN = MISSING  # a file that holds it is refused until the value is given again
FILE = "secrets.yaml"  # in the run directory, mode 0600: dotted key -> value


def secrets_of(cfg: Any) -> dict[str, Any]:
    """The secrets that a configuration holds, by dotted key; without those that are null."""
    found = {}
    for key in secret_keys(type(cfg)):
        value = cfg
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is not None:
            found[key] = value
    return found


def hidden(cfg: T) -> T:
    """A copy of a configuration without its secrets: `???` stands for each."""
    return _hide(cfg, list(secrets_of(cfg)))


def _hide(section: Any, keys: list[str]) -> Any:
    inner = {key.partition(".")[0] for key in keys}
    below = {name: [key.partition(".")[2] for key in keys if key.startswith(f"{name}.")] for name in inner}
    return replace(section, **{name: _hide(getattr(section, name), rest) if rest else HIDDEN for name, rest in below.items()})


def hide_lines(lines: Sequence[str], cfg: Any) -> list[str]:
    """Command-line arguments without the secrets in them. What refers to an environment variable, `${oc.env:…}`, stays."""
    return [hide_line(line, secrets_of(cfg)) for line in lines]


def hide_line(line: str, secrets: dict[str, Any]) -> str:
    """One argument without the values of `secrets`, also where it sets a whole section: `inference={api_key: …}`."""
    name, equals, value = line.partition("=")
    for key, secret in secrets.items():
        if name.lstrip("+") == key:
            return line if value.startswith("${") else f"{name}{equals}{HIDDEN}"
        if key.rpartition(".")[2] in line:
            line = line.replace(str(secret), HIDDEN)
    return line
