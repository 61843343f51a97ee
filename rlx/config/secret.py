"""Secret keys (`key(…, secret=True)`): their values stay in memory and in one file of the run directory that only its owner can read.

Everything that is shown, written or sent elsewhere passes through `redacted` or `redact_lines`. This module reads and writes no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from rlx.config.keys import HIDDEN
from rlx.config.roots import ROOTS
from rlx.config.validate import secret_keys

T = TypeVar("T")
FILE = "secrets.yaml"  # in the run directory, mode 0600: dotted key -> value


def secrets_of(cfg: Any) -> dict[str, Any]:
    """The secrets in a configuration, by dotted key, without those that are None."""
    values = {key: attrgetter(key)(cfg) for key in secret_keys(type(cfg))}
    return {key: value for key, value in values.items() if value is not None}


def redacted(cfg: T) -> T:
    """A copy of a configuration with `<secret>` in place of each secret."""
    return _hide(cfg, list(secrets_of(cfg)))


def _hide(section: Any, keys: list[str]) -> Any:
    inner = {key.partition(".")[0] for key in keys}
    below = {name: [key.partition(".")[2] for key in keys if key.startswith(f"{name}.")] for name in inner}
    return replace(section, **{name: _hide(getattr(section, name), rest) if rest else HIDDEN for name, rest in below.items()})


def redact(line: str) -> str:
    """A command-line argument for display, with `<secret>` in place of all that follows the name of a secret key.

    The argument may be one that cannot be parsed, such as `inference={api_key: …`. References to variables, `${oc.env:…}`, stay.
    """
    names = "|".join({re.escape(key.rpartition(".")[2]) for root in ROOTS for key in secret_keys(root.schema)})
    return re.sub(rf"\b({names})\b(\s*+[:=]?+\s*+['\"]?+)(?!null\b|\$\{{).+", rf"\1\2{HIDDEN}", line, flags=re.DOTALL)


def redact_lines(lines: Sequence[str], cfg: Any) -> list[str]:
    """Command-line arguments of a run without the secrets in them."""
    return list(map(redact, lines))
