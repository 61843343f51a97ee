"""A program by its command line (`envs.NAME.harness`): what is run, what it is told, and what its box must see."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlx.agents.gateway import UNTRAINED
from rlx.agents.images import installed
from rlx.config.schema_rollout import BoxConfig, HarnessConfig


class Program:
    """The program of an environment, installed once on this machine."""

    def __init__(self, config: HarnessConfig) -> None:
        self.config = config
        self.folder = installed(config.install) if config.install else ""
        parts = [part.replace("{python}", sys.executable).replace("{folder}", self.folder) for part in config.command]
        self.command = [str(Path(part).absolute()) if os.path.isfile(part) else part for part in parts]

    def call(self, url: str, key: str, prompt: str, system: str, row: Mapping[str, object]) -> tuple[list[str], dict[str, str]]:
        """The command of a rollout, and the variables by which programs of the field find a model. `url`: of the gateway, without /v1."""
        own = {name: value for name, value in row.items() if isinstance(value, str)}
        words = {**own, "prompt": prompt, "system": system, "base_url": f"{url}/v1", "key": key}
        variables = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1") | {"ANTHROPIC_BASE_URL": url}
        variables |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key)
        variables |= dict.fromkeys(("OPENAI_MODEL", "ANTHROPIC_MODEL"), "policy") | {"TASK": prompt, "TASK_SYSTEM": system}
        variables |= dict.fromkeys(("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), UNTRAINED)
        variables |= {name: value.replace("{folder}", self.folder) for name, value in self.config.variables.items()}
        return [re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), part) for part in self.command], variables

    def seen(self, box: BoxConfig, *more: str) -> BoxConfig:
        """The configuration of boxes that see the program, and the files `more`."""
        named = {path for part in (*self.command, *more) if os.path.isabs(part) and os.path.isfile(part) for path in _seen(Path(part))}
        return replace(box, folders=[*box.folders, *([self.folder] if self.folder else []), *sorted(named)])


def _seen(file: Path) -> list[str]:
    """What a box must see for a file: of a Python, or a script, in a virtual environment what belongs to it."""
    own = file.parent.parent
    places = [file]
    if (own / "pyvenv.cfg").is_file():
        settings = dict(line.split(" = ", 1) for line in (own / "pyvenv.cfg").read_text().splitlines() if " = " in line)
        places = [own, Path(settings["home"]).resolve().parent]
    return [str(place) for place in places if not place.is_relative_to("/usr")]
