"""`env=program`: programs in boxes, and the model with a shell in one, scored by what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from policy_stand_in import InTurn, policy_of, task_of
from sandboxes import ENGINES, NEEDS_BWRAP, image_of
from served_stand_in import give, served

from rlx.agents.box import BoxError
from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import BoxConfig, HarnessConfig
from rlx.envs.kinds import load_one
from rlx.envs.pool import WorkerPool
from rlx.envs.wire import Settings
from rlx.types import Rollout

pytestmark = pytest.mark.slow

AGENT = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
"""
TASKS = [
    {
        "question": "Write 7 into answer.txt.",
        "files": {"notes/a.txt": "seven is 7\n"},
        "test_files": {"check.sh": "grep -qx 7 answer.txt"},
    },
    {"question": "Say hello.", "files": {}, "test": "false"},
]
BOXES = [pytest.param("none", id="none"), pytest.param("bwrap", id="bwrap", marks=NEEDS_BWRAP), *ENGINES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(kind: str, *command: str, args: dict[str, Any] | None = None, box: Any = None, **harness: Any) -> Any:
    config = EnvConfig(
        id="rlx.envs.program",
        args={"data": "tasks.jsonl", **(args or {"test": "sh check.sh"})},
        sandbox=kind,
        box=box or BoxConfig(memory_gb=1.0, image=image_of(kind)),
        harness=HarnessConfig(command=list(command), **harness),
    )
    return load_one("e", config, Settings(timeout=60))


def play(env: Any, *texts: str, index: int = 0) -> Rollout:
    async def run() -> Rollout:
        env.policy = policy_of(InTurn(*texts), context_length=8192)
        (rollout,) = await env.play(task_of(env, index), [0], 0)
        await env.close()
        return rollout

    return asyncio.run(run())


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'


@pytest.mark.parametrize("kind", BOXES)
def test_a_program_plays_in_its_box_and_a_test_scores_what_it_left(folder: Path, kind: str):
    (folder / "agent.py").write_text(AGENT + 'open("answer.txt", "w").write(ask(os.environ["TASK"]) + "\\n"); print("done", sys.argv[1])')
    env = load(kind, "python3", "agent.py", "{prompt}")
    right, wrong = play(env, "7"), play(load(kind, "python3", "agent.py", "{prompt}"), "8")
    assert [right.reward, wrong.reward] == [1.0, 0.0], (right.error, wrong.error)
    assert (right.stop, right.metrics["exit_code"], right.metrics["turns"]) == ("program_ended", 0.0, 1.0)
    assert right.completion == [{"role": "assistant", "content": "7"}]
    assert right.trace.num_sampled == 2
    own = play(load(kind, "python3", "agent.py", "{prompt}"), "x", index=1)
    assert (own.status, own.reward) == ("ok", 0.0), "a task's own test"


@NEEDS_BWRAP
def test_a_program_that_was_installed_once_runs_with_its_own_python(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.agents.images.cache_root", lambda: folder / "cache")
    (folder / "agent.py").write_text(AGENT + 'open("answer.txt", "w").write(ask(sys.prefix) + "\\n")')
    install = [sys.executable, "-m", "venv", "--without-pip", "{folder}/own"]
    for _ in range(2):  # the second finds it there
        env = load("bwrap", "{folder}/own/bin/python", "agent.py", install=install)
        rollout = play(env, "7")
        assert (rollout.reward, rollout.metrics["exit_code"]) == (1.0, 0.0), rollout.error
        assert len(list((folder / "cache" / "programs").iterdir())) == 1


@pytest.mark.parametrize("kind", BOXES)
def test_a_model_with_a_shell_edits_a_file(folder: Path, kind: str):
    env = load(kind)
    rollout = play(env, call("cat notes/a.txt"), call("echo 7 > answer.txt"), "Done.")
    assert rollout.reward == 1.0, rollout.error
    assert [message["role"] for message in rollout.completion] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert rollout.completion[1]["content"] == "seven is 7"
    assert len(rollout.trace.branches()) == 1


def test_a_model_whose_context_is_full_is_scored_by_what_it_has_done(folder: Path):
    rollout = play(load("none"), call("echo 7 > answer.txt; head -c 16000 /dev/zero | tr '\\0' x"))
    assert (rollout.status, rollout.reward, rollout.stop, rollout.is_truncated) == ("ok", 1.0, "context_length", True), rollout.error


@pytest.mark.parametrize("kind", BOXES)
def test_what_the_model_leaves_running_does_not_change_its_test(folder: Path, kind: str):
    cheat = call("setsid -f sh -c 'while true; do echo exit 0 > check.sh; sleep 0.01; done'; sleep 0.1; ls")
    rollout = play(load(kind), cheat, "Done.")
    assert (rollout.status, rollout.reward) == ("ok", 0.0), rollout.error
    assert "check.sh" in rollout.completion[1]["content"]


def test_a_task_without_an_image_takes_that_of_the_configuration_not_that_of_another_task(folder: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[str | None] = []
    monkeypatch.setattr("rlx.envs.program.choose", lambda kind, image: "podman")
    monkeypatch.setattr("rlx.envs.program.prepared", lambda kind, image: image)
    (folder / "tasks.jsonl").write_text('{"question": "a", "image": "first"}\n{"question": "b"}\n')
    env = load("podman", box=BoxConfig(image="run"))

    async def opened(image: str | None) -> Any:
        made.append(image)
        raise BoxError("seen")

    monkeypatch.setattr(env, "_open", opened)
    assert play(env, "x", index=1).stop == "sandbox_error"
    assert made == ["run"]


def test_a_reward_function_may_look_into_the_box(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "box_rewards.py").write_text(
        "async def lines(completion, row, box):\n    return float(len((await box.read('answer.txt') or '').split()))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    env = load("none", args={"reward": "box_rewards.lines"})
    assert play(env, call("echo a b c > answer.txt"), "Done.").reward == 3.0


@pytest.mark.parametrize(
    ("body", "cause", "said"),
    [
        ("sys.exit('no such flag')", "program_error", "exit code 1 before it had an answer of the model: no such flag"),
        ("pass", "program_error", "exit code 0 before it had an answer"),
        ("ask('x' * 40000)", "prompt_too_long", "fills the context"),
    ],
)
def test_a_program_that_plays_nothing_has_failed(folder: Path, body: str, cause: str, said: str):
    (folder / "agent.py").write_text(AGENT + body)
    rollout = play(load("none", "python3", "agent.py"), "7")
    assert (rollout.status, rollout.stop) == ("error", cause)
    assert said in (rollout.error or "")


def test_a_program_that_crashes_after_an_answer_is_scored(folder: Path):
    (folder / "agent.py").write_text(AGENT + "ask('one'); sys.exit(3)")
    rollout = play(load("none", "python3", "agent.py"), "7")
    assert (rollout.status, rollout.reward, rollout.metrics["exit_code"]) == ("ok", 0.0, 3.0)


def test_a_program_that_floods_the_policy_is_ended_after_its_turns(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.envs.program.END_SECONDS", 0.5)
    (folder / "agent.py").write_text(AGENT + "print('mine', flush=True)\nwhile True:\n  try: ask('again')\n  except Exception: pass\n")
    (folder / "said_rewards.py").write_text("def mine(completion, row):\n    return float(completion == 'mine')\n")
    monkeypatch.syspath_prepend(str(folder))
    rollout = play(load("none", "python3", "agent.py", max_turns=3, args={"reward": "said_rewards.mine"}), *["7"] * 3)
    assert (rollout.status, rollout.stop, rollout.metrics["turns"]) == ("ok", "program_max_turns", 3.0)
    assert rollout.reward == 1.0, "what it had printed is scored"


def test_a_program_that_does_not_end_is_scored_at_its_time(folder: Path):
    (folder / "agent.py").write_text(AGENT + "open('answer.txt', 'w').write(ask('one') + '\\n')\nimport time; time.sleep(60)")
    rollout = play(load("none", "python3", "agent.py", timeout=3.0), "7")
    assert (rollout.status, rollout.stop, rollout.reward) == ("ok", "program_timeout", 1.0)


def test_a_test_that_cannot_run_is_a_failure_not_a_zero(folder: Path):
    rollout = play(load("none", args={"test": "no-such-checker"}), "Done.")
    assert (rollout.status, rollout.stop) == ("error", "program_error")
    assert "no-such-checker" in (rollout.error or "")


def test_no_sandbox_is_a_sentence_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.agents.images.problem_of", lambda kind: f"{kind} is not installed")
    with pytest.raises(ValueError, match=r"envs\.e: sandbox=bwrap: bwrap is not installed; .*sandbox=none"):
        load("auto")


@NEEDS_BWRAP
def test_tasks_in_harbors_folders_are_scored_by_what_their_verifier_writes(folder: Path):
    for name, score in (("first", '{"reward": 0.25, "seconds": 3}'), ("second", '"much"')):
        task = folder / "harbor" / name
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[metadata]\ndifficulty = "easy"\n')
        (task / "instruction.md").write_text(f"Do the {name}.")
        (task / "tests" / "test.sh").write_text(f"set -e -o pipefail\n[[ -f answer.txt ]]\necho '{score}' > /logs/verifier/reward.json\n")
    env = load("bwrap", args={"data": "harbor"})
    assert [row["prompt"][0]["content"] for row in env.rows] == ["Do the first.", "Do the second."]
    rollout = play(env, call("ls /tests /logs; touch answer.txt"), "Done.")
    assert (rollout.status, rollout.reward) == ("ok", 0.25), rollout.error
    assert rollout.completion[1]["content"] == "/logs:\n\n/tests:", "it sees the verifier's files only when it has ended"
    planted = call("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    rollout = play(load("bwrap", args={"data": "harbor"}), planted, "Done.")
    assert (rollout.status, rollout.stop) == ("error", "program_error"), "what the model has put there counts for nothing"
    with pytest.raises(ValueError, match="sandbox=none cannot keep them apart"):
        load("none", args={"data": "harbor"})
    rollout = play(load("bwrap", args={"data": "harbor"}), call("touch answer.txt"), "Done.", index=1)
    assert (rollout.status, rollout.stop) == ("error", "program_error")
    assert "left no number in /logs/verifier/reward.json or .txt" in (rollout.error or "")
    (folder / "harbor" / "first" / "environment").mkdir()
    (folder / "harbor" / "first" / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(
        ValueError, match=r"envs\.e: .*first needs several services \(environment/docker-compose.yaml\), which env=program does not have"
    ):
        load("bwrap", args={"data": "harbor"})


@NEEDS_BWRAP
def test_a_killed_worker_leaves_nothing_and_its_rollouts_are_played_again(folder: Path):
    marker = f"9{os.getpid()}"
    (folder / "agent.py").write_text(AGENT + f"ask('one'); os.system('sleep {marker} & sleep 2')\nopen('answer.txt', 'w').write('7\\n')")
    config = EnvConfig(
        id="rlx.envs.program",
        args={"data": "tasks.jsonl", "test": "sh check.sh"},
        sandbox="bwrap",
        harness=HarnessConfig(command=["python3", "agent.py"]),
    )

    pool = WorkerPool("e", config, Settings(timeout=60), 1)
    pool.wait_loaded()

    async def run() -> tuple[list[Rollout], int]:
        async with served(InTurn(*"7777")) as sampler:
            give(pool, sampler, context_length=8192)
            playing = asyncio.create_task(pool.play(task_of(pool), [0], 0))
            while not living(marker):
                await asyncio.sleep(0.05)
            os.kill(pool._workers[0].process.pid, signal.SIGKILL)
            rollouts = await asyncio.wait_for(playing, 60)
            await pool.close()
            return rollouts, pool.replayed

    (rollout,), replayed = asyncio.run(run())
    assert (rollout.status, rollout.reward) == ("ok", 1.0) or rollout.stop == "worker_died", rollout.error
    assert replayed == 1 or rollout.stop == "worker_died"
    assert not living(marker)


def living(marker: str) -> bool:
    """Whether a process with this argument lives."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                return True
    return False
