"""The pages in docs/ agree with the code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from rlx.config.errors import ConfigError
from rlx.config.load import compose, instantiate
from rlx.config.oom_hints import when_out_of_memory
from rlx.config.roots import ROOTS, SFT, Root
from rlx.config.schema import LossTerms, split_terms
from rlx.config.validate import leaves
from rlx.losses.base import Objective
from rlx.losses.tokens import TokenBatch
from rlx.metrics import METRICS
from rlx.paths import RunPaths
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.preflight.env_probe import environments_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import commands_doc  # noqa: E402  (scripts, not modules of the package)
import config_doc  # noqa: E402
import metrics_doc  # noqa: E402


@pytest.mark.parametrize(
    ("page", "render"), [("metrics", metrics_doc.render), ("configuration", config_doc.render), ("commands", commands_doc.render)]
)
def test_a_generated_page_is_up_to_date(page: str, render: Callable[[], str]):
    assert (ROOT / "docs" / f"{page}.md").read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.command)
def test_the_page_of_the_keys_names_every_key_of_every_command(root: Root):
    page = config_doc.render()
    assert [key for key in leaves(root.schema) if f"`{key}`" not in page and not key.startswith("envs.")] == []


def test_every_preset_is_explained_and_none_that_does_not_ship():
    page = (ROOT / "docs" / "objectives.md").read_text()
    presets, _, rest = page.partition("## Advantages")
    assert set(re.findall(r"^### `(\w+)`$", presets, re.MULTILINE)) == {path.stem for path in (ROOT / "conf" / "loss").glob("*.yaml")}
    advantages = rest.partition("## What any")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", advantages, re.MULTILINE)) == {
        path.stem for path in (ROOT / "conf" / "advantage").glob("*.yaml")
    }
    for command in re.findall(r"^python train\.py (.*)$", page, re.MULTILINE):
        compose(command.split(), {})


def commands_of(page: str) -> list[list[str]]:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return [shlex.split(line, comments=True) for line in re.findall(r"^python train\.py (.*)$", text, re.MULTILINE)]


def test_the_commands_of_pages_are_not_refused_by_the_configuration_or_the_environments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY", "secret")
    elsewhere = {
        "model.name=outputs/shown/weights/step_250",  # made by another command of the page: tests/test_distillation_page.py composes it
        "envs.custom.id=proposer-solver",  # a taskset that is not installed everywhere
        "eval.envs.mine.id=my-environment",
        "env.id=my-environment",
        "env.args.data=mine.jsonl",
        "env.args.dataset=openai/gsm8k",
        "my_conf",  # a folder of the reader's
    }
    commands = [argv for page in ("distillation", "evaluation", "gpu", "environments", "from_prime_rl") for argv in commands_of(page)]
    assert len(commands) > 30
    environments_of([compose([*argv, "dry_run=true"], {}).cfg for argv in commands if not elsewhere.intersection(argv)])


def test_the_experiment_that_the_page_for_users_of_prime_rl_shows_composes(tmp_path: Path):
    (yaml_file,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "from_prime_rl.md").read_text(), re.DOTALL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(yaml_file)
    cfg = compose([f"--config-dir={tmp_path}", "experiment=mine", "dry_run=true"], {}).cfg
    assert (cfg.orchestrator.rollouts_per_example, cfg.loss["_target_"]) == (16, "rlx.losses.aipo.masked_is")


def translations() -> list[tuple[str, str]]:
    """The right-hand sides of the tables for users of other frameworks: the page, and the overrides of one row."""
    found = []
    for page in ("from_prime_rl", "from_trl", "from_verl"):
        for row in re.findall(r"^\| .* \| `([^`|]*=[^`|]*)` \|$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE):
            found.append((page, row))
    return found


@pytest.mark.parametrize(("page", "overrides"), translations())
def test_what_the_pages_for_users_of_other_frameworks_translate_to_composes(
    page: str, overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"prompt": "1 + 1", "completion": "2", "answer": "2"}\n')
    of_sft = "data." in overrides or overrides == "seq_len=1024"
    device = [] if "hardware=" in overrides else ["hardware=gpu2"]
    model = [] if "model=" in overrides else ["model=qwen3_0_6b"]
    if of_sft:
        compose(["data.name=mine.jsonl", "dry_run=true", *device, *model, *overrides.split()], {}, SFT)
    else:
        compose(["dry_run=true", "launcher.check_envs=false", *device, *model, *overrides.split()], {})


@pytest.mark.parametrize(
    ("page", "name", "loss", "advantage"),
    [  # the name of the other framework -> the objective that its row composes
        ("from_prime_rl", '"rae"', "grpo.grpo", "batch.Ema"),
        ("from_prime_rl", '"max_rl"', "grpo.grpo", "group.max_rl"),
        ("from_prime_rl", 'type="default"', "dppo.dppo", "group.group_mean"),
        ("from_trl", '"sapo"', "sapo.sapo", "group.group_norm"),
        ("from_trl", '"cispo"', "cispo.cispo", "group.group_norm"),
        ("from_trl", '"dr_grpo"', "grpo.grpo", "group.group_mean"),
        ("from_trl", '="sequence"', "gspo.gspo", "group.group_norm"),
        ("from_trl", '="batch"', "grpo.grpo", "batch.batch_norm"),
        ("from_verl", "=rloo", "grpo.grpo", "group.leave_one_out"),
    ],
)
def test_the_rows_that_name_an_objective_translate_to_it(page: str, name: str, loss: str, advantage: str):
    (row,) = re.findall(rf"^\|[^|]*{re.escape(name)}[^|]*\| `([^`|]*)` \|$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    cfg = compose(["model=qwen3_0_6b", "hardware=gpu2", "launcher.check_envs=false", "dry_run=true", *row.split()], {}).cfg
    assert (cfg.loss["_target_"], cfg.advantage["_target_"]) == (f"rlx.losses.{loss}", f"rlx.advantages.{advantage}")
    assert cfg.advantage.get("of", "rewards") == "rewards"  # TRL's standard deviation is that of the rewards


def test_the_metrics_that_the_pages_for_users_of_other_frameworks_name_exist():
    known = {re.sub(r"<\w+>", "", name) for name in METRICS} | set(METRICS)
    for page in ("from_prime_rl", "from_trl", "from_verl"):
        table = (ROOT / "docs" / f"{page}.md").read_text().rpartition("\n| metric of verl" if page == "from_verl" else "## Metrics")[2]
        named = re.findall(r"`([a-z_/<>@]+)`", "".join(re.findall(r"^\|[^|]*\|([^|]*)\|$", table, re.MULTILINE)))
        assert len(named) > 5
        assert set(named) <= known


def test_the_environment_that_the_page_adds_is_found(tmp_path: Path):
    (yaml_file,) = re.findall(r"```yaml\n(# @package envs\.capitals\n.*?)```", (ROOT / "docs" / "own.md").read_text(), re.DOTALL)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "capitals.yaml").write_text(yaml_file)
    argv = [f"--config-dir={tmp_path}", "env=capitals", "model=smollm2_135m", "launcher.check_envs=false", "dry_run=true"]
    assert compose(argv, {}).cfg.envs["capitals"].sampling.max_tokens == 32


def test_the_plan_that_the_page_of_the_first_run_shows_is_what_a_dry_run_says():
    page = (ROOT / "docs" / "gpu.md").read_text()
    (shown,) = re.findall(r"```\n(processes\n.*?)```", page, re.DOTALL)
    cfg = compose([*commands_of("gpu")[0], "run.dir=/run"], {}).cfg
    said = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run").splitlines()
    assert not [line for line in shown.splitlines() if line not in said]


def test_the_advice_on_memory_that_the_page_shows_is_what_a_run_says():
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    (argv,) = re.findall(r"by the estimates of `dry_run=true`\. For\s`(.*?)`", page)
    (shown,) = re.findall(r"```\n(the device ran out of memory.*?)\n```", page, re.DOTALL)
    assert when_out_of_memory(compose([*argv.split(), "dry_run=true"], {}).cfg) == shown


def test_the_objective_that_the_page_adds_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "objectives.md").read_text()
    (function,) = re.findall(r"```python\n# my_losses\.py\n(.*?)```", page, re.DOTALL)
    (preset,) = re.findall(r"```yaml\n# my_conf/loss/leaky\.yaml\n(.*?)```", page, re.DOTALL)
    (arguments,) = re.findall(r"`PYTHONPATH=\. python train\.py (.*?)`", page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_losses.py").write_text(function)
    Path("my_conf/loss").mkdir(parents=True)
    Path("my_conf/loss/leaky.yaml").write_text(preset)
    cfg = compose(arguments.split(), {}).cfg
    assert cfg.advantage["_target_"] == "rlx.advantages.group.group_mean"
    terms, loss = split_terms(cfg.loss, LossTerms)
    tokens = TokenBatch(
        logp=torch.tensor([-1.0, -2.0], requires_grad=True),
        old_logp=torch.zeros(2),
        inference_logp=torch.zeros(2),
        entropy=torch.zeros(2),
        advantages=torch.tensor([1.0, -1.0]),
        rollout_ids=torch.tensor([0, 1]),
        rollout_lengths=torch.tensor([1, 1]),
    )
    total, _ = Objective(instantiate(loss), terms)(tokens, 2, 2)
    total.backward()
    assert tokens.logp.grad.tolist() == [-0.5, 0.25], "half of the gradient where the advantage is negative: loss.leak=0.5"
    with pytest.raises(ConfigError, match=r"leaky takes leak, "):
        compose([*arguments.split(), "loss.lek=1"], {})
    with pytest.raises(ConfigError, match=r"`loss\.leak` must be at least 0"):
        compose([*arguments.split(), "loss.leak=-1"], {})
    compose([*arguments.split(), "sampling.top_p=0.9"], {})  # the objective uses no ratio that truncated sampling would bias


def test_every_learning_rate_that_ships_has_its_row_on_the_page_of_tuning():
    table = (ROOT / "docs" / "tuning.md").read_text().partition("### Learning rates")[2].partition("\n#")[0]
    rows = [
        (names, {float(rate) for rate in rates.split(";")})
        for names, rates in re.findall(r"^\| (.*?) \| (\d[\de.; -]*) \|", table, re.MULTILINE)
    ]
    shipped = []
    for path in (*(ROOT / "conf").glob("*/*.yaml"), *(ROOT / "examples").glob("*/experiment/*.yaml")):
        option = yaml.safe_load(path.read_text()) or {}
        places = (option if path.parent.name == "optim" else option.get("optim"), (option.get("model") or {}).get("warm_start"))
        shipped += [(path.stem, float(place["lr"])) for place in places if place and "lr" in place]
    assert len(shipped) > 25
    assert [(name, lr) for name, lr in shipped if not any(re.search(rf"\b{name}\b", names) and lr in rates for names, rates in rows)] == []


def test_links_between_the_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken


def test_a_commit_is_checked_by_what_make_lint_runs():
    hooks = [hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]]
    recipe = re.findall(r"^lint: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    assert [hook["entry"] for hook in hooks] == [line.strip() for line in recipe.splitlines()]
    assert {hook["language"] for hook in hooks} == {"system"}, "nothing is downloaded"


def test_keys_that_the_pages_name_exist():
    keys = set(re.findall(r"^\| `([a-z_.<>]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    table = re.findall(r"^\| `([a-z_.]+)`", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert table
    assert set(table) <= keys


def test_every_layout_has_its_line_on_the_page_of_gpus():
    layouts = {path.stem for path in (ROOT / "conf" / "hardware").glob("*.yaml")} - {"cpu_3nodes"}
    table = (ROOT / "docs" / "gpu.md").read_text().partition("## Attention")[0]
    assert layouts == set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE))))


WORDS = {  # a pattern of our own -> the field's words for it; code is not read
    r"\b[Pp]lay(s|ed|ing)?\b(?!=)": "roll out, sample, run",
    r"\b[Bb]eside\b": "during, compared with, alongside, next to",
    r"\b(is|are|was|were) refused\b|\brefuses?\b": "exits with code 2, raises ConfigError, returns 400",
    r"\b([Nn]ot|was|were) seen\b|\bSeen:": "tested, untested, measured (docs/status.md)",
    r"\b([Tt]hose|[Ww]hat is said) who\b|\bnobody who\b": "name the agent",
    r", too[.,;]|\balike\b|\bas well[.;]": "leave it out",
    r"\b(no|not) (valid|such) one\b|\bthat is none\b": "unknown X, not a valid X",
    r"\bkeys and values of (a|the) (request|sequence|prompt)": "KV cache",
    r"\b[Ww]hoever\b": "name the agent",
    r"\bis then (no|not)\b": "then … is",
    r"\bnothing is left\b|\bthat are none\b": "say what is wrong",
    r"\b(rollouts|weights|versions) (that are )?too old\b|\bage of (the )?rollouts\b": "stale, staleness",
}


def test_the_pages_use_the_fields_words():
    """Also the generated pages: their words are those of `key(…)`, the presets' comments, `rlx.metrics` and the help texts."""
    texts = {
        page.name: page.read_text() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "RESULTS.md"]
    }
    texts["CHANGELOG.md"] = texts["CHANGELOG.md"].split("\n## ")[1]  # the newest release; older ones stay as they were written
    texts["commands.md"] = texts["commands.md"].replace("```", "")  # help texts, not code
    found = [
        f"{page}: {match[0]!r} → {instead}"
        for page, text in texts.items()
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL))
    ]
    assert not found


def test_every_picture_is_shown_and_every_page_is_in_the_sites_navigation():
    shown = "".join(page.read_text() for folder in ("docs", "examples", "benchmarks") for page in (ROOT / folder).rglob("*.md"))
    assert [picture.name for picture in (ROOT / "docs").glob("*.png") if f"{picture.name})" not in shown] == []
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in (ROOT / "mkdocs.yml").read_text()] == []


def test_the_run_directory_that_the_page_describes_is_that_of_the_code():
    table = (ROOT / "docs" / "report.md").read_text().partition("## The run directory")[2]
    named = {
        name.partition("/")[0]
        for name in re.findall(r"`([a-z_.]+(?:/[a-zA-Z_.]*)*)`", "".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)))
    }
    places = {place.place.partition("/")[0] for place in vars(RunPaths).values() if hasattr(place, "place")}
    assert named - places == {"code", "conf"}


def test_the_numbers_of_the_readme_are_those_of_the_results():
    table = (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!run|---)[^|]*\| ([^|]*) \| ([^|]*) \|$", table, re.MULTILINE)
    numbers = [number for row in rows for number in (*re.findall(r"\b\d[\d.,:]*\d\b", row[0]), *re.findall(r"`(\w+)`", row[1]))]
    assert len(numbers) > 15
    assert [number for number in numbers if number not in (ROOT / "benchmarks" / "RESULTS.md").read_text()] == []


def test_the_commits_of_the_results_are_in_the_repository():
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)

    if not shutil.which("git") or not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git, or a clone without its history")
    named = re.findall(r"`([0-9a-f]{8})`", (ROOT / "benchmarks" / "RESULTS.md").read_text())
    assert len(named) > 5
    assert [commit for commit in named if git("cat-file", "-e", f"{commit}^{{commit}}").returncode] == []
