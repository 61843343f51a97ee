"""What a synthesis plays when it is resumed: nothing twice, unless other weights play now."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_eval_resume import Killed
from test_rollout_runner import Env, Model

from rlx.config.load import compose
from rlx.config.roots import SYNTHESIZE
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.roles.synthesizer import Synthesizer
from rlx.rollout.rollout_set import read_finished
from rlx.rollout.sft_export import NothingKept, export


@pytest.mark.parametrize(
    ("first", "then", "again"),
    [("a", "a", 10), ("a", "b", 20), (None, "b", 10), ("a", None, 10)],
    ids=["same weights", "other weights", "not noted before", "not known now"],
)
def test_a_resumed_synthesis_does_not_mix_the_rollouts_of_two_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str | None, then: str | None, again: int
) -> None:
    cfg = compose(["env=sums", "num_examples=10", "rollouts_per_example=2", "dry_run=true"], {}, SYNTHESIZE).cfg
    cfg, paths = replace(cfg, weights_dir="/there/weights", step=28), RunPaths(tmp_path)

    async def play(env: Any, digest: str | None, until: int | None = None) -> int:
        """The finished rollouts. `until`: rollouts after which it is killed."""
        role = Synthesizer(cfg, paths, {"sums": env}, Model(digest), Heartbeat(paths, "synthesizer"))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            running = asyncio.ensure_future(role.run())
            while until is not None and role.runner.finished < until:
                await asyncio.sleep(0.01)
            if until is not None:
                running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        assert role.rollouts is not None
        return len(role.rollouts.outcomes)

    assert asyncio.run(play(Killed(), first, until=10)) == 10
    env = Env()
    assert asyncio.run(play(env, then)) == 20
    assert len(env.asked) == again
    said = "version 28 of the weights has changed since an earlier attempt (digest a, now b)"
    assert (said in caplog.text) == (again == 20)
    assert len(read_finished(paths.finished)) == 10 + again, "nothing that was played is deleted"
    with pytest.raises(NothingKept, match="no rollout is kept: of 20, 20 nothing said"):  # the stand-in answers nothing
        export(cfg, paths)
