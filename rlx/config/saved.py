"""The text of a run's `config.yaml`. Its values are literal: whoever reads the file gets exactly what was written.

In a file that a user writes, `${seed}` is the value of the key `seed`. In a run's file it is text, such as an environment's prompt. The
first line tells the two apart, so it must stay as it is. A later version added the second line, which says that text that OmegaConf
would take for a number is in quotes.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

FIRST = "# The whole configuration of a run of `rlx "
QUOTED = "# Values are literal: here ${seed} is text, not the value of the key seed. Without these lines it is a reference."
HEADER = f"""\
{FIRST}{{command}}`, with every value resolved.
{QUOTED.replace("{", "{{").replace("}", "}}")}
# To run it again, use the same command with --config-dir DIRECTORY_OF_THIS_FILE --config-name config run.dir=NEW
defaults:
  - {{schema}}
  - _self_
"""
NUMBER = re.compile(  # what OmegaConf's loader reads as a float; YAML's own rule leaves out 1e-5
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes text that looks like a number in quotes, also where only OmegaConf would take it for one."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789."))


def text_of(data: dict[str, Any], command: str, schema: str) -> str:
    """The text of a `config.yaml` of `command`, whose defaults list names `schema`."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return HEADER.format(command=command, schema=schema) + text


def is_saved(text: str) -> bool:
    """Whether a file's text is that of a run's `config.yaml`."""
    return text.startswith(FIRST)


def has_quotes(text: str) -> bool:
    """Whether text that OmegaConf would take for a number is in quotes there. Older versions wrote 1e-5 without, and meant text."""
    return QUOTED in text[: len(HEADER) + 100]


def is_ambiguous(text: str) -> bool:
    """Whether OmegaConf takes text without quotes for a number, and YAML does not: 1e-5."""
    return NUMBER.match(text) is not None and isinstance(yaml.safe_load(text), str)


def escaped(value: Any) -> Any:
    """A value for OmegaConf, which resolves it to exactly this value."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {name: escaped(inner) for name, inner in value.items()}
    return [escaped(inner) for inner in value] if isinstance(value, list) else value
