"""The rules for environments in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlx.config.evaluated import PREFIX, environments, section_of
from rlx.config.pythons import program_of
from rlx.config.rules import Show, rule
from rlx.config.schema import Config


@rule("envs", "eval", "orchestrator.env_workers", "launcher")
def another_python(cfg: Config, of: Show) -> Iterator[str]:
    if any(entry.id is None and name not in cfg.envs for name, entry in cfg.eval.envs.items()):
        return  # reported with the evaluations
    for name, env in environments(cfg).items():
        if env.python is None:
            continue
        section = section_of(name)
        key = f"{_where_python_is_set(cfg, name)}.python"
        if (cfg.orchestrator.env_workers if env.workers is None else env.workers) == 0:
            yield (
                f"{key}={env.python} needs a process of its own, but {section} has no workers.\n"
                f"Set {section}.workers=1 or more, or remove {key}."
            )
        program = program_of(env.python)
        if cfg.launcher.name == "local" and not (os.path.isfile(program) and os.access(program, os.X_OK)):
            yield (
                f"{key}={env.python} is no Python that can be run here ({program}).\n"
                "Give the path of one, such as /…/venv/bin/python, or install the environment: rlx env install NAME."
            )


def _where_python_is_set(cfg: Config, name: str) -> str:
    """The section that says which Python an environment has: an evaluation takes that of the mix unless it has its own."""
    own, entry = section_of(name), cfg.eval.envs.get(name.removeprefix(PREFIX))
    if not name.startswith(PREFIX) or (entry is not None and entry.python is not None):
        return own
    return own.removeprefix("eval.")
