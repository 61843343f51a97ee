"""What is known of environments before a run: asked once, in their own words; and what installs them."""

from __future__ import annotations

import shlex
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli.env import next_commands
from rlx.cli.env_check import overrides
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.config.schema import Config
from rlx.envs.probe import files_of, why
from rlx.preflight import env_install, env_probe
from rlx.process_tree import start_time

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`write(name, text)`: a single-file environment on the path of this process and its children."""

    def write(name: str, text: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(text))
        return file

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))


def config(*overrides: str) -> Config:
    return compose([*overrides]).cfg


def raised(text: str) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(compile(text, "here.py", "exec"), {})
    return caught.value


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("import my_env_that_is_not", "my-env-that-is-not is not installed: there is no module my_env_that_is_not", "rlx env install"),
        (
            "try:\n  import chromadb_that_is_not\nexcept ImportError as e:\n  raise ValueError('Could not import x. Ensure …') from e",
            "ValueError: Could not import x. Ensure … ← ModuleNotFoundError: No module named 'chromadb_that_is_not'; at here.py:2",
            "correct envs.mine.args",
        ),
        (
            'try:\n  {}["TOKEN"]\nexcept KeyError as e:\n  raise RuntimeError("Failed to load environment \'x\': ...") from e',
            "← KeyError: no key 'TOKEN'; at here.py:2",
            "correct envs.mine.args",
        ),
        ("raise ValueError('envs.mine: it has no training data set')", "it has no training data set", "correct envs.mine.args"),
        ("raise SystemExit(3)", "loading my-env-that-is-not failed: SystemExit: 3; at here.py:1", "correct envs.mine.args"),
    ],
)
def test_a_problem_is_said_in_the_packages_own_words(text: str, problem: str, fix: str):
    said, remedy = why("mine", "my-env-that-is-not", raised(text))
    assert problem in said
    assert fix in remedy


def test_each_different_environment_is_asked_once_and_then_known(package, cache, monkeypatch):
    file = package("one_env", "x = 1\n")
    asked: list[int] = []

    def run(python, entry):
        asked.append(entry["args"]["n"])
        probed = {"kind": "classic", "examples": asked[-1], "tools": [{"name": "add"}]}
        return {"probed": probed, "files": files_of("one-env"), "folders": {}}, ""

    monkeypatch.setattr(env_probe, "_run", run)
    three = [config("env.id=one-env", f"+env.args.n={n}", f"seed={seed}") for n, seed in ((7, 1), (7, 2), (8, 3))]
    found = env_probe.environments_of(three)
    assert [next(iter(each.values())).examples for each in found] == [7, 7, 8]
    assert str(next(iter(found[0].values()))) == "classic, 7 examples, tools add"
    assert asked == [7, 8]
    env_probe.environments_of(three)
    assert asked == [7, 8]
    file.write_text("x = 2\n")
    env_probe.environments_of(three[:1])
    assert asked == [7, 8, 7]


def test_problems_are_not_kept_and_the_check_can_be_left_out(package, cache, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # the message would name rlx fetch, too
    package("one_env", "x = 1\n")
    asked = []

    def run(python, entry):
        asked.append(1)
        return {"probed": {"problem": "it is broken", "fix": "mend it", "tools": []}, "files": {}, "folders": {}}, ""

    monkeypatch.setattr(env_probe, "_run", run)
    broken = config("env.id=one-env")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"it is broken.\n  fix: mend it; launcher.check_envs=false"):
            env_probe.environments_of([broken])
    assert len(asked) == 2
    assert env_probe.environments_of([config("env.id=one-env", "launcher.check_envs=false")]) == [{}]


def test_an_environment_that_ends_the_process_does_not_hide_the_others(package, cache, monkeypatch):
    package("one_env", "x = 1\n")

    def run(python, entry):
        if entry["args"]["n"] == 1:
            return None, "exit code 7; its last line: bye"
        return {"probed": {"kind": "v1", "examples": 1, "tools": []}, "files": {}, "folders": {}}, ""

    monkeypatch.setattr(env_probe, "_run", run)
    with pytest.raises(ConfigError, match="one-env cannot be loaded: exit code 7; its last line: bye") as caught:
        env_probe.environments_of([config("env.id=one-env", f"+env.args.n={n}") for n in (1, 2)])
    assert len(caught.value.problems) == 1


LEAVES_CHILDREN = """\
#!{python} -S
import getpass, json, os, subprocess, sys, time
request = json.load(sys.stdin)
print(json.dumps({{"loading": "0"}}), flush=True)
pids = [subprocess.Popen(["sleep", "3600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid]
for own_session in (False, True):
    if not (pid := os.fork()):
        if own_session:
            os.setsid()
        time.sleep(3600)
        os._exit(0)
    pids.append(pid)
try:
    os.close(os.open("/dev/tty", os.O_RDWR))
    terminal = True
except OSError:
    terminal = False
print(json.dumps({{"key": "0", "pids": pids, "terminal": terminal}}), flush=True)
os._exit(0)
"""


def test_what_an_environment_started_ends_with_the_check(tmp_path):
    """A fork keeps the pipe of the answers open: its end would never come. A server would keep a port that the run needs."""
    python = tmp_path / "python"
    python.write_text(LEAVES_CHILDREN.format(python=sys.executable))
    python.chmod(0o755)
    answer, ending = env_probe._run(str(python), {"key": "0", "name": "mine"})  # not for the hour that the children sleep
    assert answer is not None
    assert ending == "exit code 0"
    assert not answer["terminal"], "nothing waits for a password"
    assert [start_time(pid) for pid in answer["pids"]] == [None] * 3


@pytest.mark.parametrize(("file", "cause"), [("nowhere", "No such file or directory"), (".", "Permission denied")])
def test_a_python_that_only_the_nodes_have_is_a_problem_with_a_remedy(cache, tmp_path, file: str, cause: str):
    python = tmp_path / file
    remote = config(f"envs.reverse_text.python={python}", "launcher=slurm", "slurm.gpus_per_node=0", "dry_run=true")
    with pytest.raises(ConfigError) as found:
        env_probe.environments_of([remote])
    (problem,) = found.value.problems
    assert problem.startswith(f"envs.reverse_text: rlx-reverse-text cannot be loaded: {python} cannot be started here: {cause}.")
    assert f"or envs.reverse_text.python={python}; launcher.check_envs=false starts without this check" in problem


def test_a_python_that_ends_before_it_reads_is_a_problem(cache):
    """`false` is no Python."""
    with pytest.raises(ConfigError, match="rlx-reverse-text cannot be loaded: exit code 1"):
        env_probe.environments_of([config("envs.reverse_text.python=/bin/false")])


@pytest.mark.slow
@pytest.mark.long
def test_a_fork_that_lives_on_does_not_hold_up_the_check(package, cache):
    package(
        "fork_env",
        """\
        import os, time
        import verifiers as vf
        from datasets import Dataset

        def load_environment():
            if not os.fork():
                time.sleep(3600)
                os._exit(0)
            return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "hi", "answer": "ho"}]), rubric=vf.Rubric(funcs=[len]))
        """,
    )
    (found,) = env_probe.environments_of([config("env.id=fork-env")])  # not for the hour that the fork sleeps
    assert next(iter(found.values())).examples == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_names_every_environment_that_cannot_be_used_before_it_starts(package, cache, tmp_path):
    """One real process for each ending: a missing dependency, a failing `load_environment`, no data, a refused first example, an exit."""
    package(
        "five_envs",
        """\
        import os, sys
        import verifiers as vf
        from datasets import Dataset

        def load_environment(kind):
            print("noise on the standard output")
            if kind == "imports":
                import chromadb_that_is_not
            if kind == "raises":
                raise FileNotFoundError(f"no file {kind}.json")
            if kind == "exits":
                print("leaving", file=sys.stderr)
                os._exit(7)
            rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "ho", "info": "{no json" if kind == "refuses" else "{}"}]
            data = Dataset.from_list(rows)
            return vf.SingleTurnEnv(dataset=data.select([]) if kind == "empty" else data, rubric=vf.Rubric(funcs=[len]))
        """,
    )
    kinds = "imports,raises,exits,empty,refuses"
    command = [sys.executable, "train.py", "-m", "env.id=five-envs", f"+env.args.kind={kinds}", f"run.dir={tmp_path}/sweep", "dry_run=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    said = done.stderr
    assert "ModuleNotFoundError: No module named 'chromadb_that_is_not'" in said
    assert f"FileNotFoundError: no file raises.json; at {tmp_path}/five_envs.py:10 in load_environment" in said
    assert "five-envs cannot be loaded: exit code 7; its last line: leaving" in said
    assert "five-envs has no examples" in said
    assert "loading five-envs failed: JSONDecodeError" in said
    assert "Nothing was started." in said
    fine = [sys.executable, "train.py", "env.id=five-envs", "+env.args.kind=fine", f"run.dir={tmp_path}/run", "dry_run=true"]
    assert "classic, 1 example\n" in subprocess.run(fine, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.long
@pytest.mark.slow
def test_prompts_that_fill_the_tiny_models_context_are_refused_with_a_remedy(cache):
    with pytest.raises(ConfigError, match=r"envs\.math: rlx-math is for language models: its prompts have \d+ .* but seq_len=64") as found:
        env_probe.environments_of([config("env=math", "env.args.num_examples=64")])
    assert "env=sums" in str(found.value)
    (known,) = env_probe.environments_of([config("env=sums", "env.args.num_examples=64")])
    assert 5 <= known["sums"].prompt_chars <= 7


def test_what_is_to_be_installed_is_a_folder_a_package_one_of_the_hub_or_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    folder = env_install.Wanted(f"-e {tmp_path}", tmp_path.name)
    assert env_install.wanted(str(tmp_path)) == folder
    monkeypatch.chdir(tmp_path)
    assert env_install.wanted(".") == folder
    assert env_install.wanted("my-env[all]==1.2") == env_install.Wanted("my-env[all]==1.2", "my-env")
    assert env_install.wanted("git+https://host/owner/name.git@main") == env_install.Wanted("git+https://host/owner/name.git@main", "name")
    index = "https://hub.primeintellect.ai/owner/simple/"
    assert env_install.wanted("owner/my-env@0.1.2") == env_install.Wanted("my-env==0.1.2", "my-env", index)
    assert env_install.wanted("owner/my-env") == env_install.wanted("owner/my-env@latest") == env_install.Wanted("my-env", "my-env", index)


def test_a_package_of_the_hub_is_resolved_from_its_owners_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With uv, against an index of this machine: the owner's package wins over a higher version elsewhere."""
    for owner, version in (("owner", "0.1.2"), ("others", "9.0")):
        page = tmp_path / owner / "simple" / "my-env"
        page.mkdir(parents=True)
        name = f"my_env-{version}-py3-none-any.whl"
        with zipfile.ZipFile(page / name, "w") as wheel:
            wheel.writestr(f"my_env-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: my-env\nVersion: {version}\n")
        (page / "index.html").write_text(f'<a href="{name}">{name}</a>')
    monkeypatch.setattr(env_install, "HUB", f"file://{tmp_path}/{{owner}}/simple/")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"file://{tmp_path}/others/simple/")
    run = env_install._uv
    monkeypatch.setattr(env_install, "_uv", lambda command, text: run(command, text.splitlines()[0]))  # without what a worker needs
    assert env_install._resolved(env_install.wanted("owner/my-env")).split() == ["my-env==0.1.2"]
    with pytest.raises(env_install.InstallFailed, match=r"my-env was not installed"):
        env_install._resolved(env_install.wanted("owner/my-env@7.0"))


def test_a_check_is_an_evaluation_on_training_examples_without_retries() -> None:
    env, arguments = overrides("math", ["num_examples=4", "model=qwen3_0_6b"])
    cfg = compose(arguments, {}, EVAL).cfg
    assert env == "math"
    assert (cfg.num_examples, cfg.rollouts_per_example, cfg.orchestrator.max_retries, cfg.envs["math"].split) == (4, 8, 0, "train")
    assert cfg.orchestrator.max_error_rate == 1
    env, arguments = overrides("rlx-sums", ["env.split=eval"])
    assert (env, compose(arguments, {}, EVAL).cfg.envs["sums"].split) == ("sums", "eval")
    env, arguments = overrides("rlx_test_single", [])
    assert (env, {"env=custom", "envs.custom.id=rlx_test_single"} <= {*arguments}) == ("custom", True)


def test_the_commands_that_follow_name_the_shipped_option_and_a_model_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlx", "env"])  # an installed rlx: there is no train.py
    assert next_commands("rlx-math") == ["rlx env check math", "rlx train env=math"]
    assert next_commands("my-env")[1] == "rlx train env=custom envs.custom.id=my-env"
    assert next_commands("rlx-sums", 30) == ["rlx env check sums", "rlx train env=sums"]
    long = next_commands("rlx-tool-math", 64)
    assert long == ["rlx env check tool_math model=qwen3_0_6b", "rlx train env=tool_math model=qwen3_0_6b"]


def test_the_commands_that_follow_survive_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlx", "env"])
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "my-env", "--folder", "my env"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "rlx env install" in line]
    assert shlex.split(line) == ["rlx", "env", "install", "./my env"]


def test_what_is_not_installed_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "info", "nothere"]) == 2
    assert "nothere is not installed.\n  fix: `rlx env list` shows what is" in capsys.readouterr().err
