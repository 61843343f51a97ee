"""A policy version on its way from files into a worker: each tensor is read once, and a damaged one refuses the version."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlx.inference.server import reading
from rlx.inference.server.policy_files import tensors
from rlx.inference.server.reading import Reading, read
from rlx.inference.server.served import Place, Split
from rlx.weights.files import header
from rlx.weights.saving import save

SHAPES = {"embed": (50, 8), "q": (8, 8), "up": (40, 8), "norm": (8,)}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    torch.manual_seed(0)
    trained = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return trained, save(trained, tmp_path / "model.safetensors")[1]


def finished(one: Reading) -> str:
    while not one.state.done:
        time.sleep(0.001)
    return one.state.why


@pytest.mark.parametrize("several", [False, True], ids=["one thread", "several threads"])
def test_what_has_a_place_is_written_there_and_the_rest_is_left_for_the_pause(
    tmp_path: Path, stored: Any, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, written = stored
    if several:
        monkeypatch.setattr("rlx.weights.files.ALONE", 1)
    fused = torch.zeros(48, 8)
    places = {"q": Place(fused[:8], 0, None), "up": Place(fused[8:], 0, None), "norm": Place(torch.zeros(8, dtype=torch.bfloat16), 0, None)}
    one = Reading(tmp_path, tensors(tmp_path), written, places)
    assert finished(one) == ""
    assert torch.equal(fused, torch.cat([trained["q"], trained["up"]]))
    rest = dict(one.rest)
    assert rest.keys() == {"embed", "norm"}, "a tensor that must be cast is loaded by vLLM"
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rest.items())


def test_workers_take_their_slices_and_each_tensor_is_summed_by_one_of_them(
    tmp_path: Path, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, written = stored
    summed: list[int] = []
    checksum = reading.checksum
    monkeypatch.setattr(reading, "checksum", lambda tensor: summed.append(tensor.numel()) or checksum(tensor))
    for rank in range(2):
        mine = torch.zeros(20, 8)
        one = Reading(tmp_path, tensors(tmp_path), written, {"up": Place(mine, rank * 20, 0)}, Split(rank, 2))
        assert finished(one) == ""
        assert torch.equal(mine, trained["up"][rank * 20 : rank * 20 + 20])
        assert {name for name, _ in one.rest} == SHAPES.keys() - {"up"}
    assert sorted(summed) == sorted(tensor.numel() for tensor in trained.values())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_tensor_refuses_the_version_wherever_it_belongs(tmp_path: Path, stored: Any, name: str, rank: int) -> None:
    _, written = stored
    file = tmp_path / "model.safetensors"
    entries, begin = header(file)
    content = bytearray(file.read_bytes())
    content[begin + entries[name]["data_offsets"][1] - 1] ^= 1
    file.write_bytes(content)
    places = {"q": Place(torch.zeros(8, 8), 0, None), "up": Place(torch.zeros(20, 8), 20 * rank, 0)}
    workers = [Reading(tmp_path, tensors(tmp_path), written, places, Split(number, 2)) for number in (rank, 1 - rank)]

    async def call(method: str, *arguments: Any) -> list[Any]:
        return [tuple(one.state) for one in workers] if method == "reading_state" else []

    with pytest.raises(ValueError, match=rf"expected checksum {written[name]['sum']}, found \w{{16}}; the tensor {name} is damaged"):
        asyncio.run(read(call, tmp_path))
    assert all(one.rest == [] for one in workers if one.state.why), "nothing stays mapped"
