"""`rlx env` as a new user runs it: write a package, install it, check it, train on it; all in a Python that is not the checkout's.

The packages are real, as are uv, vLLM and verifiers. uv needs a package index for setuptools and for the packages of other Pythons.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from main_job import read_metrics
from public_classic import folder, judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
Rlx = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def rlx(tmp_path: Path, model_cache: Path) -> Rlx:
    """`rlx("env", "list")` in an empty folder. What it installs goes into a virtual environment that sees the checkout's packages."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "checkout.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    work = tmp_path / "work"
    work.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for uv
    own = {"RLX_CACHE": str(model_cache), "RLX_PYTHONS": str(tmp_path / "pythons"), "HF_HUB_OFFLINE": "1", "PATH": path, "PYTHONPATH": ""}

    def run(*arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
        command = [venv / "bin" / "python", "-m", "rlx.cli", *arguments]
        done = subprocess.run(
            command, cwd=work, env={**os.environ, **own, **(env or {})}, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    return run


def printed(done: subprocess.CompletedProcess, start: str) -> list[str]:
    """The arguments of the printed command that begins so."""
    return next(line.split()[2:] for line in done.stdout.splitlines() if line.strip().startswith(start))


@pytest.mark.nightly
def test_a_check_says_what_the_model_does_and_whether_to_train(rlx: Rlx) -> None:
    done = rlx("env", "check", "reverse_text", "num_examples=8", "--json")
    answer = json.loads(done.stdout)
    facts = answer["facts"]
    assert (answer["trainable"], answer["playable"], facts["examples"], facts["rollouts_per_example"], facts["failed"]) == (
        True,
        True,
        8,
        8,
        0,
    )
    assert 0 < facts["baseline_low"] <= facts["baseline"] <= facts["baseline_high"] < 1
    assert facts["differing"] > 0.2
    assert min(facts["tokens"], facts["seconds"]) > 0
    assert len(Path(answer["results"]).read_text().splitlines()) == 64


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flavour", [[], ["--kind", "multi-turn"], ["--kind", "tools"], ["--v1"]], ids=lambda words: "-".join(words) or "plain"
)
def test_a_new_environment_is_written_installed_checked_and_trained_on(rlx: Rlx, flavour: list[str], tmp_path: Path) -> None:
    """One of each kind of package is trained on; of the other two the printed command is accepted."""
    wrote = rlx("env", "init", "fresh-one", *flavour)
    installed = rlx("env", "install", "./fresh-one")
    assert "installed into" in installed.stdout
    assert any(line.startswith("fresh-one ") for line in rlx("env", "list").stdout.splitlines())
    assert "next" in rlx("env", "info", "fresh-one").stdout
    quick = ["model.warm_start.batch_size=16"]  # making the model is most of the time
    checked = rlx("env", "check", *printed(wrote, "rlx env check")[1:], *quick)
    assert "worth training on:" in checked.stdout
    train = ["train", *printed(wrote, "rlx train"), *quick, "max_steps=3", "run.name=mine"]
    if "--kind" in flavour:
        assert "dry run: nothing was started" in rlx(*train, "dry_run=true").stdout
        return
    rlx(*train)
    records = read_metrics(tmp_path / "work" / "outputs" / "mine")
    assert [record["step"] for record in records if record["source"] == "trainer"] == [0, 1, 2]
    assert all(0 < record["reward/mean"] < 1 for record in records if record["source"] == "orchestrator")


@pytest.mark.long
def test_an_environment_has_a_python_of_its_own_with_locked_packages_that_is_there_at_once_the_second_time(
    rlx: Rlx, tmp_path: Path
) -> None:
    """Its verifiers is 0.4, which has v1 only, and mcp 2; that of the checkout is 0.3.1."""
    other_one(rlx, tmp_path)
    installed = rlx("env", "install", "./other-one")
    (folder,) = (tmp_path / "pythons").iterdir()
    assert f"installed into {folder}" in installed.stdout
    lock = (folder / "lock.txt").read_text().splitlines()
    assert any(line.startswith("verifiers==0.4") for line in lock)
    assert all("==" in line or line == f"-e {tmp_path / 'work' / 'other-one'}" for line in lock)
    made = (folder / "pyvenv.cfg").stat().st_mtime_ns
    assert f"this was installed before: {folder}" in rlx("env", "install", "./other-one").stdout
    assert (folder / "pyvenv.cfg").stat().st_mtime_ns == made
    info = rlx("env", "info", "other-one").stdout
    assert f"python: {folder}/bin/python" in info
    assert "v1" in info
    plan = rlx("train", "env=custom", "envs.custom.id=other-one", "model=tiny", "dry_run=true").stdout
    assert f"envs.custom plays in the Python that was installed for it: {folder}" in plan
    failed = rlx("env", "install", "no-such-environment-anywhere", code=1)
    assert "no-such-environment-anywhere was not installed" in failed.stderr
    assert [path.name for path in (tmp_path / "pythons").iterdir()] == [folder.name]


def other_one(rlx: Rlx, tmp_path: Path) -> None:
    """Write a v1 taskset that needs verifiers 0.4."""
    rlx("env", "init", "other-one", "--v1")
    project = tmp_path / "work" / "other-one" / "pyproject.toml"
    project.write_text(project.read_text().replace("verifiers>=0.3.1", "verifiers>=0.4,<0.5"))


@pytest.mark.nightly
def test_environments_of_two_verifiers_train_one_model_that_learned_from_both(rlx: Rlx, tmp_path: Path) -> None:
    other_one(rlx, tmp_path)
    rlx("env", "install", "./other-one")
    quick = ["model.warm_start.batch_size=16", "max_steps=3", "run.name=mine"]
    rlx("train", "env=[reverse_text,custom]", "envs.custom.id=other-one", *quick)
    run = tmp_path / "work" / "outputs" / "mine"
    records = read_metrics(run)
    assert [record["step"] for record in records if record["source"] == "trainer"] == [0, 1, 2]
    played = {key for record in records for key in record if key.startswith("env/") and key.endswith("/trained_share")}
    assert played == {"env/reverse_text/trained_share", "env/custom/trained_share"}, "verifiers 0.3.1 and 0.4 play in one mix"
    assert "Traceback" not in (run / "logs" / "attempt_0" / "env_custom_0.log").read_text()
    (folder,) = (tmp_path / "pythons").iterdir()
    own = json.loads((run / "provenance.json").read_text())["pythons"]["custom"]
    assert own == {"python": f"{folder}/bin/python", "lock": f"environments/{folder.name}.txt"}
    assert (run / own["lock"]).read_text() == (folder / "lock.txt").read_text()
    with pytest.raises(importlib.metadata.PackageNotFoundError):  # the checkout's own Python was not touched
        importlib.metadata.version("other-one")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("import nothing_like_this\ndef load_environment(): ...\n", 1, "nothing_like_this"),
        ("import verifiers as vf\ndef load_environment():\n    raise OSError('no such disk')\n", 1, "OSError: no such disk"),
        ("EMPTY", 1, "no examples"),
        ("RAISES", 1, "reward_raised: score raised ZeroDivisionError: division by zero"),
        ("SETUP", 1, "in a row failed"),
    ],
    ids=["import", "load", "empty", "reward", "setup"],
)
def test_a_broken_package_gets_a_sentence(rlx: Rlx, source: str, code: int, says: str, tmp_path: Path) -> None:
    text = """\
import verifiers as vf
from datasets import Dataset

class Env(vf.SingleTurnEnv):
    async def setup_state(self, state):
        if {setup}:
            raise KeyError("no place")
        return state

def score(completion):
    return 1 / {divisor}

def load_environment():
    rows = Dataset.from_dict({{"question": {questions}, "answer": {questions}}})
    return Env(dataset=rows, rubric=vf.Rubric(funcs=[score]))
"""
    kinds = {
        "EMPTY": {"setup": False, "divisor": 1, "questions": []},
        "RAISES": {"setup": False, "divisor": 0, "questions": ["abc", "de", "fgh"]},
        "SETUP": {"setup": True, "divisor": 1, "questions": ["abc", "de", "fgh"]},
    }
    name = f"broken-{abs(hash(source)) % 10**6}"
    rlx("env", "init", name)
    (tmp_path / "work" / name / f"{name.replace('-', '_')}.py").write_text(text.format(**kinds[source]) if source in kinds else source)
    rlx("env", "install", f"./{name}")
    done = rlx("env", "check", name, "model.warm_start.steps=10", code=code)
    assert says in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tool_test", "tool_call_reward_func raised TypeError: 'NoneType' object is not iterable"),
        pytest.param("reasoning_gym_env", "all rewards are 0: too hard for this model as it is asked", marks=pytest.mark.nightly),
        ("gsm8k", "Couldn't reach 'openai/gsm8k'"),
    ],
)
def test_environments_of_others_are_judged_by_an_endpoints_answers(rlx: Rlx, name: str, says: str) -> None:
    """The endpoint says `yes` to everything, or calls no tool."""
    with judge("yes") as endpoint:
        own = {"PYTHONPATH": str(folder() / name), "OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1"}
        keys = [f"client.base_url={endpoint.url}", "model.name=m", "num_examples=3", "rollouts_per_example=2"]
        done = rlx("env", "check", name, *keys, code=3 if name == "reasoning_gym_env" else 1, env=own)
        assert says in done.stdout + done.stderr
        assert (len(endpoint.asked) >= 6) == (name != "gsm8k")


BLOCKED = """\
import importlib.machinery, sys
found = importlib.machinery.PathFinder.find_spec
def find_spec(name, *more, **keys):
    return None if name == "verifiers" else found(name, *more, **keys)
if sys.prefix == {prefix!r}:
    importlib.machinery.PathFinder.find_spec = find_spec
"""


@pytest.mark.long
def test_rlxs_own_python_needs_no_verifiers_and_without_any_the_way_to_one_is_said(rlx: Rlx, tmp_path: Path) -> None:
    """The shipped environments play, and demonstrate for the warm start, in the Python that `rlx env install rlx` makes."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(prefix=str(tmp_path / "venv")))
    own = {"PYTHONPATH": str(tmp_path)}
    refused = rlx("train", "max_steps=2", code=2, env=own)
    assert "rlx-reverse-text needs verifiers" in refused.stderr
    assert "rlx env install rlx" in refused.stderr
    assert "rlx-math " in rlx("env", "install", "rlx", env=own).stdout
    rlx("train", "max_steps=2", "run.name=mine", "model.warm_start.steps=20", env=own)
    (folder,) = (tmp_path / "pythons").iterdir()
    run = tmp_path / "work" / "outputs" / "mine"
    assert json.loads((run / "provenance.json").read_text())["pythons"]["reverse_text"]["python"] == f"{folder}/bin/python"
    assert [record["step"] for record in read_metrics(run) if record["source"] == "trainer"] == [0, 1]
