"""What was fetched from the hub is found again without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hub_stand_in import hub

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.plan.environment import hub_variables
from rlx.preflight import doctor
from rlx.preflight.hub import check_cache, lacks, models_of, use_cache
from rlx.weights.files import STATIC
from rlx.weights.hub import WANTED

CARD = """---
configs:
- config_name: easy
  default: true
  data_files: [{split: train, path: easy/train.jsonl}, {split: test, path: easy/test.jsonl}]
- config_name: hard
  data_files: [{split: train, path: hard.jsonl}]
---
"""
READ = """
import json, sys
from rlx.data.rows import HubNotReached, digest_of, open_rows
for name, subset, split in json.loads(sys.argv[1]):
    try:
        rows = open_rows(name, subset=subset, split=split)
        print(json.dumps([len(rows), rows[0], rows.where(0), digest_of(name, rows)]))
    except ValueError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def chats(folder: Path) -> None:
    """A data set with two subsets, one of them with two splits."""
    for file, count in (("easy/train.jsonl", 10), ("easy/test.jsonl", 3), ("hard.jsonl", 4)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"{file} {n}", "completion": "yes"} for n in range(count)]
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(CARD)


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=given | variables, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.long
def test_subsets_and_splits_are_read_and_found_again_without_the_hub(tmp_path: Path) -> None:
    chats(tmp_path / "hub" / "datasets" / "team" / "chats")
    wanted = [["team/chats", "easy", "train"], ["team/chats", "easy", "test[1:]"], ["team/chats", "hard", "train[50%:]"]]
    default = ["team/chats", None, "train"]
    home = {"HF_HOME": str(tmp_path / "home")}
    with hub(tmp_path / "hub") as (url, asked):
        done = python(
            "-c",
            READ,
            json.dumps([*wanted, default, ["team/chats", "hard", "test"], ["team/none", None, "train"]]),
            **home,
            HF_ENDPOINT=url,
        )
    assert done.returncode == 0, done.stderr
    *found, of_default, no_split, no_data = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(count, row["prompt"]) for count, row, *_ in found] == [
        (10, "easy/train.jsonl 0"),
        (2, "easy/test.jsonl 1"),
        (2, "hard.jsonl 2"),
    ]
    assert [where for _, _, where, _ in found][2] == "row 0 of team/chats/hard, split train[50%:]"
    assert len({json.dumps(digest) for *_, digest in found}) == 3
    assert of_default[:2] == found[0][:2]
    assert no_split[0] == no_data[0] == "ValueError"
    assert "cannot be loaded from the hub: ValueError: Unknown split" in no_split[1]
    assert "DatasetNotFoundError: Dataset 'team/none' doesn't exist" in no_data[1]
    assert any("/resolve/" in path for path in asked)

    again = python("-c", READ, json.dumps([*wanted, default, ["team/other", None, "train"]]), **home, HF_HUB_OFFLINE="1")
    *same, several, lacking = [json.loads(line) for line in again.stdout.splitlines()]
    assert same == found
    assert several[1].endswith("There are multiple 'team/chats' configurations in the cache: easy, hard"), "which one was the default?"
    said = "is no file or folder here, the cache lacks it, and HF_HUB_OFFLINE=1 forbids asking the hub"
    assert lacking == ["HubNotReached", f"the data set team/other (subset None, split train) {said}"]


@pytest.mark.slow
def test_what_rlx_fetch_sft_fetched_is_all_that_a_machine_without_internet_needs(tmp_path: Path) -> None:
    model(tmp_path / "hub" / "models" / "team" / "tiny")
    chats(tmp_path / "hub" / "datasets" / "team" / "chats")
    line = ["hardware=cpu", "model=tiny_trained", "model.name=team/tiny", "data.name=team/chats", "val.name=team/chats", "val.split=test"]
    home = {"HF_HOME": str(tmp_path / "home"), "RLX_CACHE": str(tmp_path / "cache")}
    refused = python("-m", "rlx.cli", "sft", *line, "dry_run=true", **home, HF_HUB_OFFLINE="1")
    assert refused.returncode == 2, refused.stdout
    assert "data.name: the data set team/chats (subset None, split train) is no file or folder here" in refused.stderr
    assert "fix: rlx fetch sft, with the same arguments, where there is internet; or name a file or folder" in refused.stderr

    with hub(tmp_path / "hub") as (url, _):
        done = python("-m", "rlx.cli", "fetch", "sft", *line, **home, HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    assert "model team/tiny: " in done.stdout

    accepted = python("-m", "rlx.cli", "sft", *line, "dry_run=true", **home, HF_HUB_OFFLINE="1")
    assert accepted.returncode == 0, accepted.stderr
    for said in ("data.name: 10 rows of team/chats", "val.name: 3 rows of team/chats"):
        assert said in accepted.stdout + accepted.stderr


@pytest.mark.long
@pytest.mark.slow
def test_math_takes_a_data_set_of_the_hub_by_its_name_alone(tmp_path: Path) -> None:
    """Its subset and columns are those of gsm8k: two subsets without a default, a question, and a solution with the answer behind ####."""
    folder = tmp_path / "hub" / "datasets" / "team" / "problems"
    folder.mkdir(parents=True)
    for subset in ("main", "socratic"):
        rows = [{"question": f"{subset} {n}", "answer": f"So it is.\n#### {n}"} for n in range(6)]
        (folder / f"{subset}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = "".join(f"- config_name: {name}\n  data_files: [{{split: train, path: {name}.jsonl}}]\n" for name in ("main", "socratic"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    read = """
import json
import rlx_math
rows = rlx_math.load_environment(dataset="team/problems", num_eval_examples=2).get_dataset()
print(json.dumps(dict(zip(rows["question"], rows["answer"]))))
"""
    with hub(tmp_path / "hub") as (url, _):
        done = python("-c", read, HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=url)
    again = python("-c", read, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    for one in (done, again):
        assert one.returncode == 0, one.stderr
        found = json.loads(one.stdout.splitlines()[-1])
        assert len(found) == 4
        assert all(question == f"main {answer}" for question, answer in found.items())


LINE = ["launcher=slurm", "slurm=dev", "hardware=cpu", "model=qwen3_0_6b", "model.name=team/tiny", "env=math"]
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model(folder: Path, weights: tuple[str, ...] = ("model.safetensors",)) -> Path:
    """A model's files; their content does not matter here."""
    folder.mkdir(parents=True)
    for name in (*SMALL, *weights, "pytorch_model.bin"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that this process uses; the folder of the model team/tiny in it."""
    from huggingface_hub import constants

    home = tmp_path / "home"
    repository = home / "hub" / "models--team--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setenv("HF_HOME", str(home))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, "")  # so that what a test sets ends with it
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    return repository / "snapshots" / ("a" * 40)


def test_a_model_is_complete_with_its_configuration_tokenizer_and_all_shards(cache: Path) -> None:
    assert lacks("team/tiny") == ["all of it"]
    folder = model(cache, weights=())
    assert lacks("team/tiny") == ["model.safetensors"]
    (folder / "model.safetensors").touch()
    assert lacks("team/tiny") == []
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (folder / "1.safetensors").touch()
    assert lacks("team/tiny") == ["2.safetensors"]
    (folder / "tokenizer.json").unlink()
    assert lacks("team/tiny") == ["tokenizer.json", "2.safetensors"]


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "qwen.tiktoken", "vocab.txt", "vocab.json", "tekken.json"])
def test_a_tokenizer_may_be_another_file_than_tokenizer_json(cache: Path, name: str) -> None:
    folder = model(cache)
    (folder / "tokenizer.json").unlink()
    assert lacks("team/tiny") == ["tokenizer.json"]
    (folder / name).touch()
    assert lacks("team/tiny") == []
    assert any(fnmatch(name, kind) for kind in WANTED), "`rlx fetch` gets it"
    assert any(fnmatch(name, kind) for kind in STATIC), "it goes with each version of the weights"


def test_a_job_whose_nodes_have_no_internet_is_refused_if_the_cache_lacks_its_models(cache: Path) -> None:
    line = [*LINE, "dry_run=true", "ref.name=team/other", "loss.kl.beta=0.1"]
    offline = compose([*line, "slurm.offline=true", f"slurm.hf_home={cache.parents[3]}"], {}).cfg
    assert models_of(offline) == ["team/tiny", "team/other"]
    home = cache.parents[3]
    caches = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_DATASETS_CACHE": str(home / "datasets")}
    assert hub_variables(offline) == caches | {"HF_HUB_OFFLINE": "1"}
    offline.dry_run = False
    with pytest.raises(ConfigError) as error:
        check_cache([offline, offline])
    said = [text.partition("lacks of the model ")[2] for text in error.value.problems]
    fix = ".\n  fix: rlx fetch, with the same arguments, where there is internet"
    assert said == [f"team/tiny: all of it{fix}", f"team/other: all of it{fix}"]
    online = compose(line, {}).cfg
    online.dry_run = False
    check_cache([online])


def test_another_cache_than_that_of_the_cluster_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"uses the cache .*/home/hub already, and slurm.hf_home=/elsewhere"):
        use_cache({"HF_HOME": "/elsewhere", "HF_HUB_CACHE": "/elsewhere/hub"})
    use_cache({"HF_HOME": str(cache.parents[3]), "HF_HUB_CACHE": str(cache.parents[2])})


def test_doctor_looks_into_the_cache_of_the_cluster_and_advises_to_fetch(cache: Path, tmp_path: Path) -> None:
    line = [*LINE, "dry_run=true", "slurm.offline=true", f"slurm.hf_home={cache.parents[3]}"]
    examined = compose(line, {}).cfg
    state, found, remedy = doctor.hub(examined)
    assert (state, remedy) == ("failed", "rlx fetch, with the same arguments, where there is internet")
    assert found.endswith(f"offline, cache {cache.parents[2]}: the cache lacks team/tiny (all of it)")
    folder = model(cache, weights=())
    assert "team/tiny (model.safetensors)" in doctor.hub(examined)[1]
    (folder / "model.safetensors").touch()
    assert doctor.hub(examined)[0] == "ok"


def test_the_command_doctor_uses_the_cache_of_the_cluster(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(doctor, "CHECKS", {"hub": doctor.hub})
    model(cache)
    monkeypatch.delenv("HF_HOME")
    assert main(["doctor", *LINE, "slurm.offline=true", f"slurm.hf_home={cache.parents[3]}"]) == 0
    assert "nothing is missing" in capsys.readouterr().out
    assert (os.environ["HF_HOME"], os.environ["HF_HUB_OFFLINE"]) == (str(cache.parents[3]), "1")


def rlx(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With a cache in the user's environment that is not the cluster's."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    given |= {"HF_HUB_CACHE": "/nowhere/hub", "HF_DATASETS_CACHE": "/nowhere/datasets"}
    return subprocess.run([sys.executable, "-m", "rlx.cli", *words], capture_output=True, text=True, env=given | variables, check=False)


@pytest.mark.long
@pytest.mark.slow
def test_what_was_fetched_from_the_hub_is_all_that_a_job_without_internet_needs(tmp_path: Path) -> None:
    """The model's files and a data set of an environment, from a server that answers as the hub does."""
    model(tmp_path / "hub" / "models" / "team" / "tiny")
    data = tmp_path / "hub" / "datasets" / "team" / "problems"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("".join(json.dumps({"problem": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(30)))
    bin = tmp_path / "bin"
    bin.mkdir()
    for name in ("sbatch", "srun", "squeue", "scontrol"):
        (bin / name).write_text("#!/bin/sh\necho Submitted batch job 12\n")
        (bin / name).chmod(0o755)
    line = [*LINE, "envs.math.args.dataset=team/problems", f"slurm.hf_home={tmp_path / 'home'}", "slurm.offline=true"]
    line += [f"run.dir={tmp_path / 'run'}", "clean=true"]
    variables = {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "RLX_CACHE": str(tmp_path / "cache")}
    refused = rlx("train", *line, **variables)
    assert refused.returncode == 2
    assert f"the cache {tmp_path / 'home' / 'hub'} lacks of the model team/tiny: all of it" in refused.stderr

    with hub(tmp_path / "hub") as (url, asked):
        done = rlx("fetch", *line, **variables, HF_ENDPOINT=url)
        assert done.returncode == 0, done.stderr
        fetched = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
    assert {*SMALL, "model.safetensors", "train.jsonl"} <= fetched
    assert "pytorch_model.bin" not in fetched
    assert "environment math: classic, 15 examples" in done.stdout

    accepted = rlx("train", *line, **variables)  # the server is gone
    assert accepted.returncode == 0, accepted.stderr
    assert "job 12" in accepted.stdout
    assert "export HF_HUB_OFFLINE=1" in next((tmp_path / "run").glob("sbatch.sh")).read_text()
