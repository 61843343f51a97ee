"""What a teacher says in the environments of a run: the rows of its warm start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlx.config.schema import Config, EnvConfig, PlayRoot
from rlx.data.demonstrations import choose, counts_by_weight
from rlx.envs.answers import Conversation, answer_text, conversations
from rlx.envs.kinds import kind_of
from rlx.envs.load import load_one, settings_of


def demonstrations_of(config: PlayRoot, envs: Mapping[str, EnvConfig]) -> dict[str, list[Conversation]]:
    """The conversations by environment. Each of `envs` gets its share of `model.warm_start.num_examples`.

    Raises ValueError for a v1 taskset without answers.
    """
    settings = config.model.warm_start
    assert settings is not None
    counts = counts_by_weight(settings.num_examples, {name: env.weight for name, env in envs.items()})
    found = {}
    for name, env in envs.items():
        if counts[name] == 0:
            continue
        trained = env if isinstance(config, Config) else replace(env, split="train")  # the model is the same for every command
        environment = load_one(name, trained, settings_of(config, env))
        if kind_of(env.id) != "classic" and all(answer_text(environment, row) is None for row in environment.rows):
            raise ValueError(
                f"envs.{name}: the warm start (model.warm_start) learns from answers, and no row of {env.id} has a field `answer` with a "
                "text; choose a model that is trained already"
            )
        rows = choose(environment.rows, counts[name], settings.seed)
        found[name] = conversations(environment, rows, settings.teacher_error, settings.seed)
    return found
