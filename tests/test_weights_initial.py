"""Version 0, which no one sends: trainer and servers compare the models that each found on its own host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from run_servers import Servers
from server_stand_in import Stand, serving, until
from trainer_examples import make_model

from rlx.inference.endpoints import Endpoint
from rlx.inference.wire import InferenceError
from rlx.paths import RunPaths
from rlx.types import InitialModel
from rlx.weights.files import identity
from rlx.weights.subscribe import Subscriber, write_initial

pytestmark = pytest.mark.usefixtures("quick_clients")


def test_the_trainer_says_what_servers_say_of_the_same_weights_in_another_folder_and_in_other_files(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "folder")
    model.save_pretrained(tmp_path / "blobs", max_shard_size="20KB")
    cached = tmp_path / "cache" / "snapshots" / "1a2b"  # as the hub's cache: links
    cached.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (cached / file.name).symlink_to(file)
    assert len(list(cached.glob("*.safetensors"))) > 1
    paths = RunPaths(tmp_path / "run")
    assert Subscriber(paths).initial() is None
    write_initial(paths, cached)
    said = Subscriber(paths).initial()
    assert said.identity == identity(tmp_path / "folder")
    assert said.where == str(cached)
    dict(model.named_parameters())["model.norm.weight"].data[0] += 1
    model.save_pretrained(tmp_path / "other")
    assert identity(tmp_path / "other") != said.identity


def test_what_the_trainer_of_another_attempt_began_with_is_ignored_and_a_model_that_no_server_loads_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path / "folder")
    paths = RunPaths(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    write_initial(paths, tmp_path / "empty")
    assert not paths.trained_initial.exists()
    write_initial(paths, tmp_path / "folder")
    monkeypatch.setenv("RLX_RUN_TOKEN", "the next attempt")
    assert Subscriber(paths).initial() is None


async def test_a_run_ends_when_the_trainer_began_with_another_model_than_a_server_that_serves() -> None:
    async with serving(Stand(), look=60) as (client, *stands):
        playing = asyncio.ensure_future(client.fleet.held())
        await asyncio.sleep(0.15)
        assert not playing.done(), "the trainer has not said anything yet"
        client.fleet.trained = lambda: InitialModel(identity="b", where="/cache/of/trainer", host="node2")
        with pytest.raises(InferenceError) as caught:
            await asyncio.wait_for(playing, 30)
        for part in (stands[0].endpoint.url, "model (identity a)", "the trainer on node2 is /cache/of/trainer (identity b)", "model.name"):
            assert part in str(caught.value)


async def test_a_run_goes_on_if_the_trainer_has_the_servers_model_also_beside_a_server_that_may_not_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Stand() as first, Stand() as other:
        other.state["identity"] = "b"
        found: list[Endpoint] = [first.endpoint]
        async with Servers(found, 60, look=0.02, find=lambda: list(found)) as client:
            await client.ready()
            found.append(other.endpoint)
            await until(lambda: "started with" in caplog.text)
            client.fleet.trained = lambda: InitialModel(identity="a", where="/somewhere/else", host="node2")
            playing = asyncio.ensure_future(client.fleet.held())
            await asyncio.sleep(0.2)
            assert not playing.done()
            playing.cancel()


async def test_servers_of_others_may_have_the_weights_in_another_form_and_the_difference_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Stand(), look=60) as (client, _):
        client.fleet.insists = False
        client.fleet.trained = lambda: InitialModel(identity="b", where="/cache/of/trainer", host="node2")
        playing = asyncio.ensure_future(client.fleet.held())
        await until(lambda: "started with other weights than the trainer" in caplog.text)
        await asyncio.sleep(0.15)
        assert not playing.done()
        assert caplog.text.count("started with other weights") == 1
        playing.cancel()


@pytest.mark.parametrize("longest", [64, 63, None])
async def test_a_server_with_the_rotary_frequencies_of_longer_texts_than_the_trainers_ends_the_run(
    longest: int | None, tmp_path: Path
) -> None:
    """Also one that already ran (inference.base_url), whose context no key of the run says."""
    make_model().save_pretrained(tmp_path / "folder")
    paths = RunPaths(tmp_path / "run")
    write_initial(paths, tmp_path / "folder", longest)

    stand = Stand()
    stand.state["identity"] = identity(tmp_path / "folder")
    async with serving(stand, look=60) as (client, _):
        client.fleet.insists = False
        client.fleet.trained = lambda: Subscriber(paths).initial()
        playing = asyncio.ensure_future(client.fleet.held())
        await asyncio.sleep(0.2)
        assert playing.done() == (longest == 63)
        if longest == 63:
            with pytest.raises(
                InferenceError, match=r"(?s)has a context of 64 tokens.*up to 63 tokens.*inference\.max_model_len=63 or less"
            ):
                await playing
        playing.cancel()
