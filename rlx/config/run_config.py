"""A run's `config.yaml`, and a run that starts from one: again (`--config-name config`), or a fork (`resume=outputs/mine optim.lr=1e-5`).

Values in the file are literal: `${seed}` is text there. In a file that a user writes it is the value of the key `seed`; the first line
tells the two apart, so it must stay as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from rlx.config.errors import ConfigError
from rlx.config.nested import use_own_names
from rlx.config.roots import Root, root_named
from rlx.config.strangers import executing, is_mine, said
from rlx.config.yaml_files import dumped, read

if TYPE_CHECKING:
    from rlx.config.overrides import CommandLine

FILE = "config.yaml"
FIRST = "# The whole configuration of a run of `rlx "
HEADER = f"""\
{FIRST}{{command}}`, with every value resolved.
# Values are literal: here ${{{{seed}}}} is text, not the value of the key seed. Without these lines it is a reference.
# To run it again, use the same command with --config-dir DIRECTORY_OF_THIS_FILE --config-name config run.dir=NEW
defaults:
  - {{schema}}
  - _self_
"""
ITS_OWN = {"run": {"name": None, "dir": None}, "clean": False, "dry_run": False}
"""What a run says of itself, and what a fork therefore does not take over."""


@dataclass(frozen=True)
class ConfigSource:
    """The configuration that a run starts from."""

    file: Path
    data: dict[str, Any]  # literal


def text_of(data: dict[str, Any], command: str, schema: str) -> str:
    """The text of a `config.yaml` of `command`, whose defaults list names `schema`."""
    return HEADER.format(command=command, schema=schema) + dumped(data)


def is_fork(resume: Any) -> TypeGuard[str]:
    """Whether `resume=` is the path of another run or its checkpoint."""
    return isinstance(resume, str) and resume != "latest" and not resume.isdecimal()


def source_of(request: CommandLine, root: Root) -> ConfigSource | None:
    """The run's configuration that a command line starts from; None if it starts from rlx's files or the user's.

    Raises ConfigError for a file of another command, and for the fork of a run of another user that would execute code.
    """
    named = (Path(directory, f"{request.config_name}.yaml") for _, directory in request.directories)
    file = next((file for file in named if file.is_file()), None)
    if file is not None:
        if not file.read_text(encoding="utf-8", errors="replace").startswith(FIRST):
            return None
        data = read(file)
        if (its := root_named(data.pop("defaults", None))) is not root:
            raise ConfigError(
                f"{file} is the configuration of `rlx {its.command}`, not of `rlx {root.command}`.\n"
                f"Use rlx {its.command} with the same arguments."
            )
        use_own_names(data)
        return ConfigSource(file, data)
    resume = ([o.value() for o in request.overrides if o.key_or_group == "resume" and not o.is_sweep_override()] or [None])[-1]
    if request.config_name != root.command or not is_fork(resume):
        return None
    path = Path(resume).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"resume={resume}: there is no {path}.\n  fix: name a run directory, or a checkpoints/step_N of one")
    run = next((place for place in (path, path.parent.parent) if (place / FILE).is_file()), None)
    data = read(run / FILE) if run is not None else {}
    if run is None or root_named(data.pop("defaults", None)) is not root:
        return None
    use_own_names(data)
    if not is_mine(run) and (found := dict(executing(data))):
        raise ConfigError(
            f"resume={resume} is a run of another user, whose configuration executes code: {said(found)}.\n"
            "  fix: read that code; then copy the run (cp -r), and resume from your copy"
        )
    return ConfigSource(run / FILE, {**data, **ITS_OWN})


def escaped(value: Any) -> Any:
    """A literal value for OmegaConf, which resolves it to exactly this value."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {name: escaped(inner) for name, inner in value.items()}
    return [escaped(inner) for inner in value] if isinstance(value, list) else value
