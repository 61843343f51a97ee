"""Environments whose code misbehaves, in the run of a user: what the run does, what its output says, and how soon. On the real stack."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from main_job import MainJob
from policy_stand_in import OUTSIDE
from recorded import check_recorded, normalised

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.stand_in]
# By environment: its arguments, the status of its rollouts that misbehave, and what their errors say.
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "exits": ({"kind": "exit"}, "worker_died", "it left with exit code 1"),
    "killed": ({"kind": "kill"}, "worker_died", "SIGKILL"),
    "sleeps": ({"kind": "c", "seconds": 3600}, "timeout", "rlx_test_faults.py"),
    "deaf": ({"kind": "power", "where": "env_response"}, "timeout", "rlx_test_faults.py"),
    "raises": ({"kind": "raise"}, "reward_raised", "the word list is not there"),
    "burns": ({"kind": "cpu", "seconds": 2}, "ok", ""),
    "hoards": ({"kind": "hoard", "seconds": 4096, "num_examples": 9, "every": 9}, "worker_memory", " in hoard"),  # at most so many MiB
    "leaks": ({"kind": "leak", "seconds": 100, "every": 2}, "ok", ""),  # MiB a rollout
}
TIMEOUT = 120.0  # seconds for one rollout
SOON = 20.0  # the same where it is to be exceeded
MEMORY = 1.0  # GiB of a worker's memory, of which the environment needs a third
SMALL = (
    "env=[]",
    "model.warm_start.steps=20",
    "model.warm_start.batch_size=16",
    "orchestrator.rollouts_per_example=2",
    "ckpt.interval=null",
    f"orchestrator.rollout_timeout={TIMEOUT}",
)


def environment(name: str, args: dict, **keys: object) -> list[str]:
    """The overrides that add an environment whose every sixth example misbehaves."""
    args = {"num_examples": 6, "every": 6} | args
    words = [f"+envs.{name}.id=rlx-test-faults", *(f"+envs.{name}.args.{key}={value}" for key, value in args.items())]
    return words + [f"+envs.{name}.{key}={value}" for key, value in keys.items()]


@pytest.mark.nightly
def test_each_fault_fails_its_own_rollouts_and_the_run_completes_and_counts_them(start):
    """Eight environments of the mix misbehave, each in its own way, in some of their examples. What is trained is what was sampled."""
    job: MainJob = start(
        "run",
        *SMALL,
        *(word for name, (args, _, _) in FAULTS.items() for word in environment(name, args)),
        *(f"+envs.{name}.rollout_timeout={SOON}" for name, (_, status, _) in FAULTS.items() if status == "timeout"),
        f"orchestrator.env_worker_memory_gb={MEMORY}",
        "max_steps=6",
        "orchestrator.batch_size=32",  # two groups of each, so an epoch in three steps
        "orchestrator.max_retries=1",
        "seq_len=128",
        env={"PYTHONPATH": OUTSIDE},
    )
    assert job.wait() == 0, job.text()
    job.wait_until_nothing_is_left()
    assert [record["step"] for record in job.metrics("trainer")] == list(range(6))
    found = json.loads((job.run_dir / "failures.json").read_text())
    said = [(cause["env"], cause["what"], cause["first"]) for cause in found["causes"]]  # a slow machine may add timeouts
    for name, (_, status, words) in FAULTS.items():
        if status != "ok":
            assert any((env, what) == (name, status) and words in first for env, what, first in said), said
    assert any(env == "exits" and "env_exits_suspects (process " in first for env, _, first in said), said
    assert not [cause for cause in said if FAULTS[cause[0]][1] == "ok"], said
    last = job.metrics("orchestrator")[-1]
    assert last["workers/replaced_died"] >= 2, last
    assert last["workers/replaced_timeout"] >= 2, last
    assert last["workers/replaced_memory"] >= 2, last
    log = (job.run_dir / "logs" / "latest" / "orchestrator.log").read_text()
    assert re.search(r"envs\.leaks: its worker env_leaks_0 has [\d.]+ GiB, env_worker_memory_gb is 1, so it is replaced", log), log[-4000:]
    tokens, groups = check_recorded(job.run_dir, 6, normalised)
    assert tokens > 0
    assert groups == 6 * 32 // 2
    trained = [rollout for step in range(6) for rollout in job.rollouts(step)]
    assert {rollout["env"] for rollout in trained} == set(FAULTS)
    closing = job.text()[-4000:]
    assert "raises: a reward function raised in " in closing
    assert re.search(r"and \d+ other causes", closing), closing


def test_a_blocked_environment_is_named_while_the_orchestrator_lives_and_ends_the_run_within_its_timeouts(start):
    """Every example of the only environment sleeps in C. First the stall is explained, then the run ends with the function's name."""
    job: MainJob = start(
        "run",
        *SMALL,
        *environment("stuck", {"kind": "c", "seconds": 3600, "every": 1}),
        "max_steps=2",
        "orchestrator.batch_size=4",
        "orchestrator.rollout_timeout=40",
        "orchestrator.max_retries=0",
        "orchestrator.max_error_rate=0.05",  # at 0.5 nine rollouts would have to time out, one after the other
        "launcher.stall_timeout=8",
        env={"PYTHONPATH": OUTSIDE},
    )

    def account() -> str | None:
        return next((text for file in job.run_dir.glob("logs/latest/stall_*.txt") if "sleep_in_c" in (text := file.read_text())), None)

    text = job.until(account, "account of the stall")
    assert "env_stuck_0" in text, text
    assert "rlx_test_faults.py" in text, text

    def beat() -> float:
        return json.loads((job.run_dir / "heartbeats" / "orchestrator.json").read_text())["time"]

    before = beat()
    job.until(lambda: beat() > before, "another beat: the orchestrator is alive while its environment blocks")
    assert job.wait(timeout=900) == 1, job.text()
    closing = job.text()[-3000:]
    assert "sleep_in_c" in closing, closing
    found = re.search(r"environment stuck: (\d+) of its latest", closing)
    assert found, closing
    assert int(found[1]) <= 3, "one group after the other could have waited for its own timeout"
    job.wait_until_nothing_is_left()
