"""Every command of README, the docs and the examples is one of today: its keys, options and files exist."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlx.cli import COMMANDS
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.nested import SYNONYMS
from rlx.config.roots import ROOTS, TRAIN, has_key
from rlx.config.sweeps import expand

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(EXAMPLES.glob("**/*.md"))]
COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:srun .* )?(?:rlx|(?:\S*python )?(?:rlx/)?train\.py) .*$")
COMPOSED = re.compile(r"(?:rlx (train|eval|sft|synthesize)|(python train\.py)) (.*)$")
LATER = re.compile(
    r"…|\.\.\.|RUN|FOLDER|--help|my_conf|replay=|\$\(|`|=outputs/[^ ]*/weights/|\b(NAME|DIR|LR|K|S)\b|\$alone|renderer=list"
    r"|gspoo"  # shown as a mistake
)
"""What needs a trained model, a file or a folder of the reader's, or has a place to fill in."""
ROW = json.dumps({"question": "1", "problem": "1", "answer": "2", "prompt": "1", "completion": "2"}) + "\n"


GROUPS = {path.name for path in (ROOT / "conf").iterdir()} | {"slurm", "sweeps", "bench"}  # `bench=` is `env=`


def known(schema: Any, key: str) -> bool:
    """Whether a command has the key; `env.` stands for the run's only environment, arguments and options of vLLM have any name."""
    return has_key(schema, re.sub(r"^env\.", "envs.any.", SYNONYMS.get(key, key)).partition(".args.")[0])


def lines() -> list[tuple[str, str]]:
    """The command lines of all fenced blocks: the page, and the line."""
    found = []
    for page in PAGES:
        if page.name == "RESULTS.md":  # a table's cells, of which some have only what comes after `rlx train`
            cells = re.findall(r"`(python train\.py [^`]*|(?:experiment=|--config-dir )[^`]*)`", page.read_text())
            found += [(str(page.relative_to(ROOT)), cell if cell.startswith("python") else f"rlx train {cell}") for cell in cells]
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if page.name == "commands.md":  # what follows two spaces is a remark, and what is not indented a sentence
                    line = re.sub(r"\s{2,}\S.*$", "", line[2:]) if line.startswith("  ") else ""
                if COMMAND.match(line.strip()):
                    found.append((str(page.relative_to(ROOT)), line.strip()))
    return found


def commands() -> list[tuple[str, str]]:
    found = []
    for page, line in lines():
        match = COMPOSED.search(line)
        if match and not LATER.search(match[3].partition("  #")[0]):
            found.append((page, f"{match[1] or 'train'} {match[3]}"))
    return found


@pytest.mark.parametrize("page", sorted({page for page, _ in commands()}))
def test_the_commands_of_a_page_compose(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("KEY", "RLX_API_KEY", "RLX_SECRET", "MY_KEY"):
        monkeypatch.setenv(name, "secret")
    clusters = tmp_path / "clusters" / "slurm"
    clusters.mkdir(parents=True)
    for name in ("my_cluster", "falcon", "kestrel"):
        (clusters / f"{name}.yaml").write_text((ROOT / "slurm" / "example.yaml").read_text())
    Path("endpoints.yaml").write_text("mine: {base_url: 'http://host/v1', model: m}")
    for name in ("mine.jsonl", "rows.jsonl", "data.jsonl", "held_out.jsonl", "a.jsonl", "b.parquet", "problems.jsonl", "tasks.jsonl"):
        Path(name).write_text(ROW)
    Path("folder").mkdir()
    Path("examples").symlink_to(EXAMPLES)
    wrong = []
    for where, command in commands():
        if where == page:
            name, *argv = shlex.split(command, comments=True)
            root = next(root for root in ROOTS if root.command == name)
            whose = root if any(word.startswith("outputs/") for word in argv) else TRAIN  # `--config-dir outputs/…`
            for made in (Path(path) for path in re.findall(r"\boutputs/[^ \"']+", " ".join(argv))):  # by other commands: data, or a run
                a_run = compose(["launcher.check_envs=false", "run.name=mine", "env=reverse_text"], {}, whose).yaml
                file, text = (made, ROW) if made.suffix == ".jsonl" else (made / "config.yaml", a_run)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            one = ["dry_run=true", "launcher.check_envs=false", *(word for word in argv if word != "-m")]
            read = expand if "-m" in argv else compose
            try:
                read(one, {"RLX_CONFIG_DIR": str(clusters.parent)}, root)
            except ConfigError as error:
                wrong.append(f"{command}\n  {error}")
    assert not wrong, "\n".join(wrong)


def test_commands_that_need_a_run_of_the_readers_name_commands_options_and_keys_that_exist() -> None:
    wrong = []
    for page, line in lines():
        words = shlex.split(line.replace("train.py", "rlx train").partition("  #")[0], comments=True)
        name, *argv = words[words.index("rlx") + 1 :]
        assert name in COMMANDS, page
        command: Any = pkgutil.resolve_name(COMMANDS[name])
        options = command.help_text() + " --config-dir --config-name --help"
        schema = next((root.schema for root in ROOTS if root.command == getattr(command, "configures", None) or root.command == name), None)
        for word in argv:
            key = word.partition("=")[0].lstrip("+~")
            if word.startswith("--") and key not in options:
                wrong.append(f"{page}: rlx {name} has no {word}")
            elif schema and "=" in word and not word.startswith("-") and key.partition("@")[0] not in GROUPS and not known(schema, key):
                wrong.append(f"{page}: rlx {name} has no key {key}")
    assert not wrong, "\n".join(wrong)
