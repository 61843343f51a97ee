"""`rlx env check`: plays a few rollouts of an environment and says whether it is worth training on.

It is an evaluation (`rlx eval`) of the initial model on training examples, without retries, whose rollouts are then judged
(`rlx.rollout.worth`). So it plays on servers of its own, on servers that run already, or on any OpenAI-compatible endpoint.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.cli.env_display import CheckDisplay

WORTH, NOT_PLAYABLE, NOT_WORTH = 0, 1, 3  # exit codes
DEFAULTS = {  # of a check; the user's own values win
    "num_examples": "16",
    "rollouts_per_example": "8",
    "orchestrator.max_retries": "0",  # a retry would hide a failure
    "orchestrator.max_error_rate": "1",  # they are judged
}
USAGE = "usage: rlx env check NAME [GROUP=OPTION …] [key=value …] [--json]. See rlx env --help."


def run(argv: list[str]) -> int:
    from rlx.cli import start
    from rlx.cli.command import Command
    from rlx.cli.env_display import CheckDisplay
    from rlx.config.errors import ConfigError
    from rlx.config.load import compose
    from rlx.config.roots import EVAL
    from rlx.preflight.probes import environments_of

    as_json, words = "--json" in argv, [word for word in argv if word != "--json"]
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(f"`rlx env check` needs an environment's name.\n  fix: {USAGE}")
    name, *given = words
    say_shadowed(name)
    env, arguments = overrides(name, given)
    cfg = compose(arguments, None, EVAL).cfg
    if cfg.rollouts_per_example < 2 or any((one.rollouts_per_example or 2) < 2 for one in cfg.envs.values()):
        raise ConfigError(
            f"rollouts_per_example={cfg.rollouts_per_example}: a check compares rollouts of one example.\n  fix: 2 or more; 8 shows more"
        )
    if len(cfg.envs) != 1:
        raise ConfigError(f"a check plays one environment, but these are chosen: {', '.join(cfg.envs)}.\n  fix: leave out env=")
    if cfg.weights_dir is not None:
        raise ConfigError("a check plays with one model, not with the weights of a run.\n  fix: rlx eval plays with weights_dir=")
    try:
        if not cfg.dry_run:
            environments_of([cfg])
    except ConfigError as error:
        said = "\n".join(error.problems)
        print(json.dumps({"env": name, "worth": False, "playable": False, "reasons": error.problems}) if as_json else f"rlx: {said}")
        print(f"\n{name} cannot be played.", file=sys.stderr)
        return NOT_PLAYABLE
    displays: list[CheckDisplay] = []

    def display(root: Path, settled: Any, _: Sequence[str]) -> CheckDisplay:
        displays.append(CheckDisplay(root, settled, env, given))
        return displays[-1]

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        code = start.run(arguments, Command(EVAL, display))
    if not displays:  # a dry run, or a job in a queue
        return code
    shown = displays[-1]
    if as_json:
        print(json.dumps(answer_of(name, shown, code), indent=1))
    if code != 0 or shown.verdict is None:
        return code or NOT_PLAYABLE
    return WORTH if shown.verdict.worth else NOT_WORTH if shown.verdict.playable else NOT_PLAYABLE


def overrides(name: str, given: Sequence[str]) -> tuple[str, list[str]]:
    """(its name in the configuration, the arguments of the evaluation) for an environment or an option of the group `env`."""
    from rlx.config.shipped import shipped_options

    options = shipped_options()
    by_id = {env_id: option for option, env_id in options.items()}
    option = name if name in options else by_id.get(name)
    chosen = [] if any(word.startswith("env=") for word in given) else [f"env={option or 'custom'}"]
    env = option or "custom"
    if option is None:
        chosen.append(f"envs.custom.id={name}")
    keys = {word.partition("=")[0].lstrip("+") for word in given}
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in keys]
    if not keys & {"run.name", "run.dir", "dry_run"}:
        defaults.append(f"run.name=check-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{secrets.token_hex(3)}")
    split = [] if f"envs.{env}.split" in keys or "env.split" in keys else [f"envs.{env}.split=train"]
    return env, [*chosen, *split, *defaults, *given]


def say_shadowed(name: str) -> None:
    """Print a note if an installed package has the name of a shipped environment: the name means the shipped one."""
    from rlx.config.pythons import sources_of
    from rlx.config.shipped import shipped_options

    shipped = shipped_options().get(name)
    if shipped is not None and sources_of(name) is not None:
        print(f"{name} ships with rlx ({shipped}); the installed package of that name is local/{name}", file=sys.stderr)


def answer_of(name: str, shown: CheckDisplay, code: int) -> dict[str, Any]:
    """The answer as JSON."""
    status, verdict = shown.run.status, shown.verdict
    why = [] if status is None or status.cause is None else [*status.cause.last_lines[-1:]]
    base = {"env": name, "worth": False, "playable": False, "reasons": why, "notes": [], "exit_code": code}
    facts = {"facts": None if shown.facts is None else asdict(shown.facts), "results": None if shown.file is None else str(shown.file)}
    return base | ({} if verdict is None else asdict(verdict)) | facts
