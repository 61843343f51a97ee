"""A run's own `config.yaml` as the file to start from: what has no effect then, and what the user is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from rlx.config.environment import Variable
from rlx.config.overrides import LATE, read_request, read_variable
from rlx.config.roots import Root
from rlx.config.saved import is_ambiguous, is_saved
from rlx.config.sources import SAVED, label
from rlx.config.tree import HIDDEN, Origins, show


def with_all_values(loaded: ConfigResult | None, name: str, variables: Sequence[Variable]) -> tuple[list[Variable], list[str]]:
    """The variables that may have an effect on the file `name`, and notes for the user.

    A run's file lists no experiment and no sweep. A variable that chooses one would count as a choice of the command line, which fails.
    """
    if loaded is None or SAVED not in loaded.header:
        return list(variables), []
    file = label(loaded, name)
    late = [v for v in variables if v.is_group and v.key in LATE and v.text != "null"]
    notes = [f"{v.name}={v.text} has no effect: {file} is a run's configuration, which has every value already" for v in late]
    content = OmegaConf.to_container(loaded.config, resolve=False)
    if keys := _texts(content, "", lambda text: "${" in text):
        notes.append(f"{file} is a run's configuration, so `${{` is text, not a reference, in {', '.join(keys)}")
    return [v for v in variables if not (v.is_group and v.key in LATE)], notes


def without_effect(
    loaded: ConfigResult | None, name: str, variables: Sequence[Variable], data: Mapping[str, Any], origins: Origins, secret: Sequence[str]
) -> list[str]:
    """A note for each variable that a run's file `name` leaves without effect, with what was used; none if that is the variable's value.

    `data`: the composed values. `secret`: keys whose values are not shown.
    """
    notes: list[str] = []
    if loaded is None or SAVED not in loaded.header:
        return notes
    for each in variables:
        used: Any = data
        for part in each.key.split("."):
            used = used.get(part) if isinstance(used, dict) else None
        key, text = each.key, each.text
        if each.is_group:
            inside = next((inner for inner in ("_target_", "name") if isinstance(used, dict) and inner in used), None)
            key, used = (f"{key}.{inside}", used[inside]) if inside else (key, None)
        elif key in origins.typed or show(read_variable(each)) == show(used):
            continue  # the command line comes after variables in any case
        if key in secret:
            text, used = HIDDEN, HIDDEN if used is not None else None
        had = "" if each.is_group and used is None else f"; {key}={show(used)} was used"
        notes.append(
            f"{each.name}={text} has no effect: {label(loaded, name)} is a run's configuration, which has every value already{had}"
        )
    return notes


def ambiguous(loaded: ConfigResult | None) -> list[str]:
    """The keys of a run's file of an older version that hold a text such as 1e-5, which may be meant as a number."""
    if loaded is None or loaded.header.get(SAVED) != "before":
        return []
    return _texts(OmegaConf.to_container(loaded.config, resolve=False), "", is_ambiguous)


def _texts(value: Any, key: str, counts: Callable[[str], bool]) -> list[str]:
    """The keys inside `value` that hold a text that `counts`."""
    if isinstance(value, dict):
        return [found for name, inner in value.items() for found in _texts(inner, f"{key}.{name}" if key else str(name), counts)]
    if isinstance(value, list):
        return [key] if any(_texts(inner, key, counts) for inner in value) else []
    return [key] if isinstance(value, str) and counts(value) else []


def starts_from_a_run(argv: Sequence[str], environ: Mapping[str, str], root: Root) -> bool:
    """Whether a command line starts from a run's `config.yaml`. Raises ConfigError when it cannot be parsed."""
    request = read_request([part for part in argv if not part.startswith(("hydra/", "hydra."))], environ, root)
    files = [Path(directory, f"{request.config_name}.yaml") for _, directory in request.directories]
    file = next((file for file in files if file.is_file()), None)
    return file is not None and is_saved(file.read_text(encoding="utf-8", errors="replace"))
