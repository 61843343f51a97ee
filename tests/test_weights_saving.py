"""The safetensors files that the trainer writes are those of the library, byte for byte of every value, with their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlx.weights import saving
from rlx.weights.attest import checksum
from rlx.weights.files import header
from rlx.weights.sums import ROW


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {str(dtype): (torch.rand(3, 5) * 4).to(dtype) for dtype in saving.CODES}
    return found | {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "long": torch.rand(ROW * 2 + 1), "odd": torch.ones(7).half()}


def test_the_library_reads_every_dtype_and_shape_and_a_file_of_its_own_is_the_same(tmp_path: Path) -> None:
    told, facts = saving.save(tensors(), tmp_path / "ours")
    save_file(tensors(), tmp_path / "theirs", metadata={"format": "pt"})
    found, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert found.keys() == theirs.keys() == facts.keys()
    for name, tensor in found.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert checksum(tensor) == checksum(theirs[name]) == facts[name]["sum"], name
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    content = (tmp_path / "ours").read_bytes()
    assert len(content) == (tmp_path / "theirs").stat().st_size == told["size"]
    _, begin = header(tmp_path / "ours")
    assert told["header"] == {"size": begin, "xxh3": xxhash.xxh3_64_hexdigest(content[:begin])}


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors has no torch\.complex128, which a has"):
        saving.save({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "x")


def test_a_disk_that_takes_a_part_of_a_write_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last write before a disk is full, and one interrupted by a signal, may be short."""
    opened = Path.open

    class Short:
        def __init__(self, file) -> None:  # type: ignore[no-untyped-def]
            self.file = file

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, part: memoryview) -> int:
            return self.file.write(part[: max(1, len(part) // 2)])

        def truncate(self) -> None:
            self.file.truncate()

        def tell(self) -> int:
            return self.file.tell()

    monkeypatch.setattr(Path, "open", lambda *args, **keys: Short(opened(*args, **keys)))
    saving.save({"a": torch.arange(1000)}, tmp_path / "x")
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "x")["a"], torch.arange(1000))
