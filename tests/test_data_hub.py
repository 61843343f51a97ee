"""Data sets of the hub, from a server that answers as the hub does: subsets, splits, the cache, and a machine without internet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import hub
from test_preflight_hub import model

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
