"""`rlx env check`: plays a few rollouts of an environment and says whether it is worth training on.

It is an evaluation (`rlx eval`) of the initial model on training examples, without retries, whose rollouts are then judged
(`rlx.rollout.env_report`). So it plays on servers of its own, on servers that run already, or on any OpenAI-compatible endpoint.
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

WORTH, NOT_PLAYABLE, NOT_WORTH = 0, 1, 3  # exit codes
DEFAULTS = {  # of a check; the user's own values win
    "num_examples": "16",
    "rollouts_per_example": "8",
    "orchestrator.max_retries": "0",  # a retry would hide a failure
    "orchestrator.max_error_rate": "1",  # they are judged
}


def run(name: str, given: Sequence[str], as_json: bool) -> int:
    """Check the environment with the user's values `given`. Returns the exit code."""
    from rlx.cli.commands import EVAL
    from rlx.cli.env import next_commands
    from rlx.config.errors import ConfigError
    from rlx.config.load import compose
    from rlx.config.yaml_files import described
    from rlx.paths import RunPaths
    from rlx.preflight.env_probe import environments_of
    from rlx.rollout.env_report import diagnose
    from rlx.rollout.eval_results import RESULTS, read_results
    from rlx.runs.status import read_status

    env, arguments = overrides(name, given)
    cfg = compose(arguments, None, EVAL.root).cfg
    if cfg.rollouts_per_example < 2 or len(cfg.envs) != 1 or cfg.weights_dir is not None:
        raise ConfigError(
            "a check plays one environment with the initial model, two rollouts of an example or more.\n"
            "  fix: leave out env=, weights_dir= and rollouts_per_example=1; rlx eval has them"
        )
    answer = {"env": name, "trainable": False, "playable": False, "reasons": [], "notes": [], "facts": None, "results": None}
    paths, code = RunPaths(Path(cfg.run.dir or Path("outputs") / str(cfg.run.name)).expanduser().absolute()), NOT_PLAYABLE
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            if not cfg.dry_run:
                environments_of([cfg])
        except ConfigError as error:
            print(f"rlx: {error}\n\n{name} cannot be played.")
            answer["reasons"] = error.problems
        else:
            code = EVAL.run(arguments)
            status = read_status(paths)
            answer["reasons"] = [] if status is None or status.cause is None else [*status.cause.last_lines[-1:]]
    if cfg.dry_run:
        return code
    file = paths.evaluation_of(env, str(cfg.model.name), 0) / RESULTS
    if code == 0 and file.is_file():
        own = cfg.envs[env]
        verdict = diagnose(read_results(file), own.sampling.max_tokens or cfg.sampling.max_tokens)
        answer |= asdict(verdict) | {"results": str(file)}
        code = WORTH if verdict.trainable else NOT_WORTH if verdict.playable else NOT_PLAYABLE
        head = "worth training on" if verdict.trainable else "not worth training on as it is" if verdict.playable else "not playable"
        said = [f"\n{own.id} with {cfg.model.name}", described(verdict.facts), f"{head}:"]
        said += [f"  {note}" for note in (*verdict.reasons, *(f"note: {note}" for note in verdict.notes))]
        said += [f"next: {next_commands(own.id)[1]}"] if verdict.trainable else []
        print("\n".join([*said, f"results: {file}"]), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(answer | {"exit_code": code}, indent=1))
    return code


def overrides(name: str, given: Sequence[str]) -> tuple[str, list[str]]:
    """(its name in the configuration, the arguments of the evaluation) for an environment or an option of the group `env`."""
    from rlx.config.presets import options_by_id, shipped_options

    option = name if name in shipped_options() else options_by_id().get(name)
    env, keys = option or "custom", {word.partition("=")[0].lstrip("+") for word in given}
    defaults = DEFAULTS | {"env": env, f"envs.{env}.split": "train"} | ({} if option else {"envs.custom.id": name})
    if not keys & {"run.name", "run.dir", "dry_run"}:
        defaults["run.name"] = f"check-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{secrets.token_hex(3)}"
    return env, [*(f"{key}={value}" for key, value in defaults.items() if key not in keys), *given]
