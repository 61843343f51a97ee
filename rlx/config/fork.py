"""A fork starts from the configuration of its source: `resume=outputs/mine optim.lr=1e-5` changes the learning rate and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from rlx.config.errors import ConfigError, may_parse
from rlx.config.roots import Root, key_of, root_named
from rlx.config.strangers import executing, is_mine, said

FILE = "config.yaml"
LATE = ("experiment", "sweeps")
CHOICES = ("loss", "advantage", "optim", "env", "data", "model", "hardware", "launcher", "slurm", "logger")
"""The groups from which a fork may choose another option: its section then comes from there, not from the source."""
ITS_OWN = {"run.name": "null", "run.dir": "null", "clean": "false", "dry_run": "false"}
"""What a run says of itself, and what a fork therefore does not take over."""


def source_of(overrides: Iterable[Override], root: Root) -> Path | None:
    """The directory of the run whose configuration a command line starts from; None if it names no run of this command to fork.

    Raises ConfigError for a run of another user whose configuration would execute code.
    """
    resume = next((o.value() for o in overrides if o.key_or_group == "resume" and not o.is_sweep_override()), None)
    if not isinstance(resume, str) or resume == "latest" or resume.isdecimal():
        return None
    path = Path(resume).expanduser().absolute()
    run = next((place for place in (path, path.parent.parent) if (place / FILE).is_file()), None)
    if run is None:
        return None
    with may_parse(run / FILE):
        data = yaml.load((run / FILE).read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(data, dict) or root_named(data.get("defaults")) is not root:
        return None
    if not is_mine(run) and (found := dict(executing(data))):
        raise ConfigError(
            f"resume={resume} is a run of another user, whose configuration executes code: {said(found)}.\n"
            "  fix: read that code; then copy the run (cp -r), and resume from your copy"
        )
    return run


def own_values(overrides: Sequence[Override]) -> list[str]:
    """The overrides that make the source's configuration one of a new run."""
    given = {o.key_or_group for o in overrides}
    return [f"{key}={value}" for key, value in ITS_OWN.items() if key not in given and key.partition(".")[0] not in given]


def forked(
    source: Path,
    request: Any,
    argv: list[str],
    environ: Mapping[str, str],
    root: Root,
    compose: Callable[[list[str], Mapping[str, str]], Any],
) -> Any:
    """The tree of a fork: that of its source, but for what the command line gives. `compose`: makes a tree of words. Raises ConfigError."""
    if late := [line for line in request.lines if line.lstrip("+").partition("=")[0] in LATE]:
        raise ConfigError(
            f"{late[0]} has no effect: the run starts from the configuration of {source} (resume=).\n  fix: set its keys instead"
        )
    chosen = [o.key_or_group for o in request.overrides if o.key_or_group in CHOICES and not isinstance(o.value(), dict)]
    sections = {key_of(group) for group in chosen} | ({"advantage"} if "loss" in chosen else set())
    keys = {line: line.lstrip("+~").partition("=")[0] for line in request.lines}
    ours = [line for line, key in keys.items() if key in chosen or key.partition(".")[0] in sections]
    flags = [word for word in argv if word not in keys]
    rest = [line for line in keys if line not in ours]
    saved = ["--config-dir", str(source), "--config-name", "config", *own_values(request.overrides)]
    tree = compose([*flags, *saved, *rest], environ)
    if chosen:
        here = {name: text for name, text in environ.items() if name == "RLX_CONFIG_DIR"}
        other = compose([*flags, *ours], here)
        for key, origin in other.origins.of_key.items():
            in_section = key.partition(".")[0] in sections
            if (in_section or any(f"/{group}/" in f"/{origin}" for group in chosen)) and key not in tree.origins.typed:
                tree.origins.note([key], origin, key in other.origins.of_groups, key in other.origins.shipped, key in other.origins.typed)
                if not in_section:
                    _put(tree.data, key, other.data)
        tree.data |= {section: other.data.get(section) for section in sections}
        tree.choices |= {group: option for group, option in other.choices.items() if group in chosen}
    tree.overrides, tree.chosen = list(request.lines), chosen
    return tree


def _put(data: dict[str, Any], key: str, source: Mapping[str, Any]) -> None:
    """Set a dotted key to its value in `source`."""
    *above, last = key.split(".")
    value: Any = source
    for part in above:
        data, value = data.setdefault(part, {}), value[part]
    data[last] = value[last]
