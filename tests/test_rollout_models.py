"""The model that a command plays with: servers that somebody else started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.inference.protocol import InferenceError
from rlx.rollout.models import check_model


def test_servers_of_another_model_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, cached = str(tmp_path / "a"), "/cache/hub/models--some--name/snapshots/1f"
    check_model(a, [str(tmp_path / "link"), a], None)
    check_model("some/name", [cached], None)
    check_model(str(tmp_path / "weights" / "step_2"), [a], str(tmp_path / "weights"))
    assert not caplog.records
    for wanted, served in ((a, str(tmp_path / "b")), ("some/other", cached)):
        with pytest.raises(InferenceError, match=f"have the model {served}, and this run is to play {wanted}: "):
            check_model(wanted, [served], None)
    check_model("some/name", ["/elsewhere/name"], None)
    assert "have the model /elsewhere/name; whether that is some/name is not known" in caplog.text
