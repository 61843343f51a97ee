"""Secret keys (`key(…, secret=True)`): their values stay in memory and in one file of the run directory that only its owner can read.

Everything that is shown, written or sent elsewhere passes through `hidden` or `hide_lines`. This module reads and writes no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rlx.config.keys import HIDDEN
from rlx.config.roots import ROOTS
from rlx.config.tree import secret_keys

T = TypeVar("T")
FILE = "secrets.yaml"  # in the run directory, mode 0600: dotted key -> value


def secrets_of(cfg: Any) -> dict[str, Any]:
    """The secrets in a configuration, by dotted key, without those that are None."""
    found = {}
    for key in secret_keys(type(cfg)):
        value = cfg
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is not None:
            found[key] = value
    return found


def hidden(cfg: T) -> T:
    """A copy of a configuration with `<secret>` in place of each secret."""
    return _hide(cfg, list(secrets_of(cfg)))


def _hide(section: Any, keys: list[str]) -> Any:
    inner = {key.partition(".")[0] for key in keys}
    below = {name: [key.partition(".")[2] for key in keys if key.startswith(f"{name}.")] for name in inner}
    return replace(section, **{name: _hide(getattr(section, name), rest) if rest else HIDDEN for name, rest in below.items()})


def conceal(line: str) -> str:
    """A command-line argument for display, with `<secret>` in place of the value of a secret key.

    The argument may be one that cannot be parsed, such as `inference={api_key: …`: all that follows the name of a secret is hidden.
    """
    name = line.partition("=")[0].strip().lstrip("+")
    keys = {key for root in ROOTS for key in secret_keys(root.schema)}
    if name in keys:
        return f"{name}={HIDDEN}"
    last = "|".join(sorted({re.escape(key.rpartition(".")[2]) for key in keys}))
    return re.sub(rf"\b({last})\b(\W*)\w.*", rf"\1\2{HIDDEN}", line, flags=re.DOTALL)


def hide_lines(lines: Sequence[str], cfg: Any) -> list[str]:
    """Command-line arguments without the secrets in them. References to environment variables, `${oc.env:…}`, stay."""
    return [hide_line(line, secrets_of(cfg)) for line in lines]


def hide_line(line: str, secrets: dict[str, Any]) -> str:
    """One argument without the values of `secrets`, even if it sets a whole section: `inference={api_key: …}`.

    Quotes and escapes may make a value unlike its text in the line. Then all that follows the secret's name is hidden.
    """
    name, equals, value = line.partition("=")
    for key, secret in secrets.items():
        if name.lstrip("+") == key:
            return line if value.startswith("${") else f"{name}{equals}{HIDDEN}"
        if key.startswith(f"{name.lstrip('+')}.") and key.rpartition(".")[2] in value:
            line = line.replace(str(secret), HIDDEN) if str(secret) in line else conceal(line)
    return line
