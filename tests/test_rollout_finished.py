"""The file of finished rollouts: what a kill leaves of it is what was finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.policy.transcript import Transcript
from rlx.rollout.finished import Finished, read
from rlx.rollout.selection import Candidate


def candidate(member: int, text: str = "4") -> Candidate:
    call = {"type": "function", "id": "a", "function": {"name": "add", "arguments": "{}"}}
    said = Transcript(
        prompt=[{"role": "user", "content": "2+2?\u2028"}],
        completion=[{"role": "assistant", "content": text, "tool_calls": [call]}],
        tools=({"type": "function", "function": {"name": "add"}},),
    )
    about = {"example_id": 3, "rewards": {"right": 1.0}, "policy_version": None}
    return Candidate(env="sums", index=0, member=member, reward=0.1 + 0.2, failed=False, truncated=False, transcripts=(said,), about=about)


def test_what_is_added_is_read_back_in_order(tmp_path: Path):
    path = tmp_path / "rollouts" / "finished.jsonl"
    finished = Finished(path)
    finished.add([candidate(1), candidate(0)])
    assert list(read(path)) == [candidate(1), candidate(0)], "flushed before it returns"
    finished.close()
    again = Finished(path)
    assert again.done == {("sums", 0, 0), ("sums", 0, 1)}
    again.add([candidate(2)])
    assert [one.member for one in read(path)] == [1, 0, 2]


@pytest.mark.parametrize("cut", [1, 30, 70_000])
def test_a_line_that_a_kill_cut_is_forgotten(tmp_path: Path, cut: int):
    path = tmp_path / "finished.jsonl"
    finished = Finished(path)
    finished.add([candidate(0), candidate(1, "x" * 200_000)])
    finished.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = Finished(path)
    assert again.done == {("sums", 0, 0)}
    again.add([candidate(1, "x" * 200_000)])
    assert path.read_bytes() == whole


def test_a_file_of_half_a_line_is_empty(tmp_path: Path):
    path = tmp_path / "finished.jsonl"
    path.write_bytes(b'{"env": ')
    assert Finished(path).done == set()
    assert path.read_bytes() == b""


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "finished.jsonl"
    path.write_bytes(b'{"env": \n')
    with pytest.raises(ValueError, match=r"finished\.jsonl, line 1, is no finished rollout"):
        Finished(path)
