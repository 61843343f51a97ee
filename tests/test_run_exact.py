"""On the real stack: what is trained is exactly the trajectory, and trainer and engine agree on every token of it."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from policy_stand_in import OUTSIDE
from recorded import check_recorded, normalised, recorded_samples

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = ("sampling", "beside", "rewrite", "nested")


def test_trajectories_of_all_kinds_are_trained_as_they_were_sampled(start):
    job = start(
        "run",
        "env=[]",
        *(f"+envs.{name}.id=rlx-test-{name}" for name in NAMES),
        "max_async_level=0",
        "max_steps=3",
        "model.warm_start.steps=20",
        "model.warm_start.batch_size=16",  # it learns when to stop, and nothing here needs more
        "orchestrator.batch_size=64",
        "seq_len=256",
        env={"PYTHONPATH": OUTSIDE},
    )
    assert job.wait() == 0, job.text()
    for record in job.metrics("trainer"):
        assert record["mismatch/kl"] <= 1e-6
        assert record["mismatch/abs_logp_diff_max"] <= 1e-3
    played = [rollout for step in range(3) for rollout in job.rollouts(step)]
    assert {rollout["env"] for rollout in played} == set(NAMES)
    assert check_recorded(job.run_dir, 3, normalised)[0] > 0
    temperatures, turns = defaultdict(set), Counter()
    tokens: Counter[tuple[int, int]] = Counter()
    for step in range(3):
        for sample in recorded_samples(job.run_dir, step):
            on = sample.loss_mask
            temperatures[sample.env] |= set(sample.temperature[on].tolist())
            assert set(sample.temperature[~on].tolist()) <= {1.0}
            assert np.isfinite(sample.inference_logprobs[on]).all()
            assert set(sample.versions[on].tolist()) == {step}
            turns[sample.env] += 1
            starts = np.flatnonzero(np.diff(on.astype(int), prepend=0) == 1)
            if sample.env == "rewrite" and len(starts) > 1:
                assert not on[starts[0] + 1], "only an empty answer is the same in capitals"
                turns[sample.env] += 1
            tokens[sample.group, sample.member] += int(on.sum())
    assert dict(temperatures) == {"sampling": {1.0, 0.5, 1.5}, "beside": {1.0}, "rewrite": {1.0}, "nested": {1.0}}
    assert turns["rewrite"] == 3 * sum(rollout["env"] == "rewrite" for rollout in played), "every rewritten prompt begins a sample"
    assert tokens == Counter({(rollout["group"], rollout["member"]): rollout["num_tokens"] for rollout in played if rollout["num_tokens"]})
    beside = [record["env/beside/requests_beside"] for record in job.metrics("orchestrator") if "env/beside/requests_beside" in record]
    assert set(beside) == {2.0}
    log = (job.run_dir / "logs" / "latest" / "orchestrator.log").read_text()
    assert log.count("envs.sampling asks for top_p:") == 1, log[-3000:]
