"""The model that a command plays with: servers that somebody else started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from server_stand_in import Stand

from rlx.config.schema import Config, PlayRoot, SftRoot
from rlx.inference.wire import InferenceError
from rlx.paths import RunPaths
from rlx.rollout import policy_backend
from rlx.rollout.policy_backend import check_model, connect_servers


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
        with pytest.raises(InferenceError, match=f"have the model {served}, and this run is to play {wanted}.\n  fix: "):
            check_model(wanted, [served], None)
    check_model("some/name", ["/elsewhere/name"], None)
    assert "have the model /elsewhere/name; whether that is some/name is not known" in caplog.text


@pytest.mark.parametrize("root", [Config, SftRoot])
def test_no_run_trains_on_servers_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: type[PlayRoot]) -> None:
    monkeypatch.setattr(policy_backend, "give_policy", lambda *_: None)
    paths, config = RunPaths(tmp_path), root(max_steps=1, seq_len=8)
    nobody: Any = None

    async def connect(wanted: str) -> None:
        paths.initial_model.write_text(f"{wanted}\n")
        async with Stand() as stand:
            config.inference.base_url, config.inference.api_key = [stand.endpoint.url], "key"
            async with connect_servers(config, paths, {}, nobody, lambda _: None):
                pass

    asyncio.run(connect("model"))
    with pytest.raises(InferenceError, match=r"have the model model, and this run is to play some/other\."):
        asyncio.run(connect("some/other"))
