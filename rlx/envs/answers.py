"""The right answer to a row of an environment, as the text that a model would write. The warm start's teacher needs it.

Each kind of classic verifiers environment keeps the answer in another place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verifiers as vf

from rlx.envs.verifiers_v0 import VerifiersEnvironment


def answer_text(environment: VerifiersEnvironment, row: Mapping[str, Any]) -> str | None:
    """The answer in the form that the environment's parser reads; None if the row has no answer.

    A reasoning-gym row holds the index of an entry, and the entry holds the answer. An XML parser needs its tags.
    """
    env = environment.env
    answer = row.get("answer")
    if (entries := getattr(env, "rg_dataset", None)) is not None:  # vf.ReasoningGymEnv; other environments do not import reasoning-gym
        answer = entries[int(row["answer"])]["answer"]
    if not isinstance(answer, str) or not answer:
        return None
    parser = env.parser
    if isinstance(parser, vf.XMLParser) and len(parser.get_fields()) == 1:
        return parser.format(**{parser.get_fields()[0]: answer})
    return answer
