"""Updates in flight on real vLLM: every token has the log-probability that a Hugging Face forward of its version gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from inference_server import CONTEXT, EXACT, Run, generated, prompts, running, same, sample, sample_all, versions_of
from run_servers import Servers

from rlx.trace import Turn

REQUESTS, UPDATES = 64, 5
BETWEEN = 20  # tokens of each request between two updates
MOST, LEAST = CONTEXT - 40, BETWEEN * (UPDATES + 1)  # tokens of a completion

pytestmark = pytest.mark.slow


OTHERS = [pytest.param(kind, marks=pytest.mark.long) for kind in ("experts", "split", "adapters")]


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.nightly), *OTHERS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(kind: str, engines: Callable[[str], Run]) -> Run:
    return engines(kind)


def check_flight(run: Run) -> str:
    """Update a server five times while it samples 64 completions, every second one with a seed. Returns what was found, in a line.

    A whole model changes under all of them. A request keeps its adapter, so then some requests begin after each update, and those of
    several versions are in one batch. Afterwards the same prompts find no KV cache of an older version.
    """
    ids, folders = prompts(REQUESTS, seed=1), {version: run.version(version) for version in range(1, UPDATES + 1)}
    groups = np.array_split(np.arange(REQUESTS), 1 if run.lora is None else UPDATES + 1)
    asked = {"max_tokens": MOST, "min_tokens": LEAST}

    async def fly(client: Servers) -> tuple[list[Turn], list[Turn], float]:
        def begin(numbers: np.ndarray) -> None:
            flying.extend(asyncio.create_task(sample(client, ids[n], int(n) if n % 2 else None, **asked)) for n in numbers)

        before, flying = await generated(run), list[asyncio.Task[Turn]]()
        begin(groups[0])
        await running(client, len(flying))
        for version, folder in folders.items():
            async with asyncio.timeout(300):
                while await generated(run) < before + len(groups[0]) * BETWEEN * version:
                    await asyncio.sleep(0.01)
            await client.update(folder, version)
            for group in groups[version : version + 1]:
                begin(group)
        return await asyncio.gather(*flying), await sample_all(client, ids, max_tokens=20), client.fleet.compared

    flying, later, compared = run.talk(fly)
    errors, after = run.errors(flying, min_tokens=LEAST), run.errors(later)
    spans = [len(set(turn.versions.tolist())) for turn in flying]
    assert errors.max() < EXACT
    assert after.max() < EXACT
    assert versions_of(flying) == {0, *folders}
    assert versions_of(later) == {UPDATES}
    assert np.mean(spans) > UPDATES or run.lora is not None
    assert all((np.diff(turn.versions) >= 0).all() for turn in flying)
    assert compared > 0.99 or run.lora is not None, "vLLM has no reload of adapters to compare them with"
    return (
        f"{run.paths.root.name}: {len(errors)} tokens in flight, {np.mean(spans):.1f} versions each, {(errors > EXACT).sum()} wrong, "
        f"worst {errors.max():.1e}; {len(after)} tokens afterwards, worst {after.max():.1e}; {compared:.1%} compared"
    )


def test_every_token_in_flight_has_the_log_probability_of_its_version(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_flight(run)
    with capsys.disabled():
        print(f"\n{found}")


def test_a_seed_gives_the_same_bits_in_another_order_and_alone(run: Run) -> None:
    ids = prompts(32, seed=2)

    async def three_times(client: Servers) -> list[list[Turn]]:
        together = await sample_all(client, ids)
        backwards = await asyncio.gather(*[sample(client, ids[seed], seed) for seed in reversed(range(32))])
        return [together, backwards[::-1], [await sample(client, ids[seed], seed) for seed in range(4)]]

    together, backwards, alone = run.talk(three_times)
    assert all(map(same, together, backwards))
    assert all(map(same, together, alone))
    assert len({turn.completion_ids.tobytes() for turn in together}) > 25


def test_log_probabilities_are_those_of_the_sampling_temperature(run: Run) -> None:
    turns = run.talk(lambda client: sample_all(client, prompts(16, seed=3), temperature=0.7))
    assert run.worst(turns, 0.7) < EXACT
    assert run.worst(turns, 1.0) > 0.1
    assert {turn.temperature for turn in turns} == {0.7}
