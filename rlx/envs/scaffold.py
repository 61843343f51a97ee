"""Writes the package of a new environment: its module, pyproject.toml, README and test, from `templates/`.

The package works as it is: it passes its own test and `rlx env check`, and rlx's tiny model learns it. Knows nothing of verifiers.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rlx.config.errors import ConfigError

TEMPLATES = Path(__file__).resolve().parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Flavour:
    """One kind of environment that can be scaffolded."""

    summary: str  # of the environment that is written
    about: str  # for its README
    keys: tuple[str, ...] = ()  # that the tiny model needs to play it, for `train` and `check`
    is_v1: bool = False


ARGUMENTS = "The arguments of `load_environment` are set by `env.args.KEY=VALUE`; `rlx env info @ID@` lists them."
FLAVOURS = {
    "single-turn": Flavour(
        "Sort letters",
        f"One turn. Reward: `right`, 1 if the reply is the sorted letters, else 0. Metric: `same_letters`. {ARGUMENTS}",
    ),
    "multi-turn": Flavour(
        "Guess a number from higher and lower",
        "Several turns: `env_response` answers each guess. Reward: `solved`, 1 if the number is found in time, else 0. " + ARGUMENTS,
        ("seq_len=128",),
    ),
    "tools": Flavour(
        "Answer with the help of a tool",
        f"The model calls the tool `price`, then answers. Reward: `right`, 1 for the price alone, else 0. Metric: `called`. {ARGUMENTS}",
        ("seq_len=256", "sampling.max_tokens=80"),
    ),
    "v1": Flavour(
        "Sort letters",
        "A v1 taskset of one turn. Reward: `right`, 1 if the reply is the sorted letters, else 0. Metric: `same_letters`. Its keys are "
        "set by `env.args.taskset.KEY=VALUE`; `rlx env info @ID@` lists them.",
        is_v1=True,
    ),
}


def create(name: str, folder: Path, flavour: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Write the package `name` into `folder`: its name, its files there, and the keys to play it with. `flavour`: a key of FLAVOURS.

    Raises ConfigError for a name that no package can have, or if the folder has files already.
    """
    name = name.replace("_", "-")
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise ConfigError(
            f"{name!r} cannot be the name of an environment: it becomes the name of a Python module.\n"
            "  fix: lower-case letters, digits and single dashes, beginning with a letter, and no module of Python's own: my-env"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already.\n  fix: another name, or another folder: rlx env init {name} --folder FOLDER")
    found = importlib.util.find_spec(module)
    if found is not None and found.origin is not None:  # a folder without modules has no origin
        raise ConfigError(f"there is a module {module} already ({found.origin}), which would hide the environment's.\n  fix: another name")
    chosen = FLAVOURS[flavour]
    needs = ["verifiers>=0.3.1"] if chosen.is_v1 else ["datasets", "verifiers>=0.3.1,<0.4"]
    values = {
        "ABOUT": chosen.about,
        "SUMMARY": chosen.summary,
        "ID": name,
        "MODULE": module,
        "CLASS": "".join(part.capitalize() for part in name.split("-")),
        "DEPENDENCIES": ", ".join(f'"{one}"' for one in needs),
        "TRAIN": " ".join(["rlx train env=custom", f"envs.custom.id={name}", *chosen.keys]),
        "CHECK_KEYS": "".join(f" {key}" for key in chosen.keys),
    }
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{module}.py": f"{flavour}.py",
        f"tests/test_{module}.py": f"test_{flavour}.py",
    }
    for place, template in files.items():
        text = (TEMPLATES / f"{template}.txt").read_text()
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    return name, tuple(files), chosen.keys
