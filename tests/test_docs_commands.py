"""Every command of README and docs composes: its keys, options and files are those of today."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import ROOTS
from rlx.config.sweeps import expand

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PREFIX = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:rlx (train|eval|sft|synthesize)|(python train\.py)) (.*)$")
LATER = re.compile(r"…|\.\.\.|RUN|FOLDER|--help|my_conf|replay=|\$\(|`|outputs/|examples/|\bNAME\b|http|\$alone")
"""What needs a run, a file or a server of the reader's."""
NOT_MINE = ("gspoo",)  # shown as a mistake


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                match = PREFIX.match(line.strip())
                if match and not LATER.search(match[3].partition("  #")[0]) and not any(word in line for word in NOT_MINE):
                    found.append((page.name, f"{match[1] or 'train'} {match[3]}"))
    return found


@pytest.mark.parametrize("page", sorted({page for page, _ in commands()}))
def test_the_commands_of_a_page_compose(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clusters = tmp_path / "clusters" / "slurm"
    clusters.mkdir(parents=True)
    for name in ("my_cluster", "falcon", "kestrel"):
        (clusters / f"{name}.yaml").write_text((ROOT / "slurm" / "example.yaml").read_text())
    Path("endpoints.yaml").write_text("mine: {base_url: 'http://host/v1', model: m}")
    for name in ("mine.jsonl", "rows.jsonl", "data.jsonl", "held_out.jsonl", "a.jsonl", "problems.jsonl"):
        Path(name).write_text(json.dumps({"question": "1", "problem": "1", "answer": "2", "prompt": "1", "completion": "2"}) + "\n")
    wrong = []
    for where, command in commands():
        if where == page:
            name, *argv = shlex.split(command, comments=True)
            root = next(root for root in ROOTS if root.command == name)
            one = ["dry_run=true", "launcher.check_envs=false", *(word for word in argv if word != "-m")]
            read = expand if "-m" in argv else compose
            try:
                read(one, {"RLX_CONFIG_DIR": str(clusters.parent)}, root)
            except ConfigError as error:
                wrong.append(f"{command}\n  {error}")
    assert not wrong, "\n".join(wrong)
