"""The right answer to a row of an environment as the text a model would write, for the warm start's teacher.

Knows where kinds of classic verifiers environments keep it. Environments that do not say give None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verifiers as vf

from rlx.envs.verifiers_v0 import VerifiersEnvironment


def answer_text(environment: VerifiersEnvironment, row: Mapping[str, Any]) -> str | None:
    """The answer in the form that the environment's parser reads; None where the row does not hold one.

    reasoning-gym's rows hold the index of an entry, which holds the answer. An XML parser wants its tags.
    """
    env = environment.env
    answer = row.get("answer")
    if (entries := getattr(env, "rg_dataset", None)) is not None:  # vf.ReasoningGymEnv, without importing reasoning-gym for the others
        answer = entries[int(row["answer"])]["answer"]
    if not isinstance(answer, str) or not answer:
        return None
    parser = env.parser
    if isinstance(parser, vf.XMLParser) and len(parser.get_fields()) == 1:
        return parser.format(**{parser.get_fields()[0]: answer})
    return answer
