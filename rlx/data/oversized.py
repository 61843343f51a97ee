"""A warning of rollouts that take a longer row than `trainer.micro_batch_tokens`.

Objectives that look at whole rollouts need them in one row (`rlx.data.packing`). A rollout of many turns that do not extend each other is
many samples, each with its own prompt, so the row and its memory grow with the number of turns. Rows with padding have their own warning
(`rlx.data.padding`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)

_said = [0]  # tokens of the largest row that this process has warned of


def warn_of_the_largest(units: Sequence[Sequence[int]], tokens: int) -> None:
    """Say how large a row becomes that one rollout makes larger than `tokens`; again only for a larger one.

    `units`: the lengths of each rollout's samples.
    """
    unit = max(units, key=sum, default=())
    if (size := sum(unit)) > max(tokens, _said[0]):
        _said[0] = size
        log.warning(
            "a rollout of %d samples takes a row of %d tokens, more than trainer.micro_batch_tokens=%d, since its objective needs a "
            "rollout in one row; the memory of the step grows with it. orchestrator.trajectory_strategy=interleaved with a renderer "
            "(model.renderer) makes one sample of a conversation that only appends messages; otherwise limit the turns of a rollout",
            *(len(unit), size, tokens),
        )
