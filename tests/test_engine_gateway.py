"""Programs on real vLLM through the gateway, with updates in flight: each trace holds what the engine answered, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from inference_server import CONTEXT, EXACT, Run, running
from policy_stand_in import policy_of
from run_servers import Servers

from rlx.agents.gateway import Gateway, Session
from rlx.trace import Turn
from rlx.types import Task

pytestmark = [pytest.mark.slow, pytest.mark.long]
PROGRAMS, TURNS = 64, 2
LENGTH = 60  # tokens of an answer


class Recording:
    """The engine, with what it answered to each rollout."""

    def __init__(self, client: Any) -> None:
        self.client, self.turns = client, dict[int, list[Turn]]()

    async def generate(self, prompt_ids: Any, sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        turn = await self.client.generate(prompt_ids, {**sampling, "min_tokens": LENGTH}, request_id, affinity)
        self.turns.setdefault(affinity, []).append(turn)
        return turn


async def program(number: int, url: str, session: Session) -> None:
    """Two turns in one of the three languages, with and without a stream."""
    language, stream, said = number % 3, number % 2 == 0, [{"role": "user", "content": f"q{number}"}]
    for _ in range(TURNS):
        if language == 0:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key) as client:
                if stream:
                    chunks = await client.chat.completions.create(model="m", messages=said, stream=True)  # type: ignore[call-overload]
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
                else:
                    made = await client.chat.completions.create(model="m", messages=said)  # type: ignore[call-overload]
                    text = made.choices[0].message.content or ""
        elif language == 1:
            async with anthropic.AsyncAnthropic(base_url=url, api_key=session.key) as other:
                if stream:
                    async with other.messages.stream(model="m", max_tokens=200, messages=said) as parts:  # type: ignore[arg-type]
                        text = await parts.get_final_text()
                else:
                    text = (await other.messages.create(model="m", max_tokens=200, messages=said)).content[0].text  # type: ignore
        else:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key) as client:
                if stream:
                    events = await client.responses.create(model="m", input=said, stream=True)  # type: ignore[call-overload]
                    text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
                else:
                    text = (await client.responses.create(model="m", input=said)).output_text  # type: ignore[arg-type]
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def test_each_trace_is_what_the_engine_answered_with_an_update_in_its_middle(engines: Callable[[str], Run]) -> None:
    run = engines("tied")
    folder = run.version(1)

    async def play(client: Servers) -> tuple[list[Any], Recording]:
        gateway, engine = Gateway(), Recording(client)
        await gateway.start()
        policy = policy_of(engine, context_length=CONTEXT)
        sessions = [
            gateway.open(policy.episode(Task(env="e", example_id=0, index=number, row={}), 0, 0), longest=LENGTH)
            for number in range(PROGRAMS)
        ]
        playing = [asyncio.create_task(program(number, gateway.url, session)) for number, session in enumerate(sessions)]
        await running(client, PROGRAMS // 4)
        await client.update(folder, 1)
        await asyncio.gather(*playing)
        traces = [session.episode.keep(session.delivered) for session in sessions]
        await gateway.stop()
        return traces, engine

    traces, engine = run.talk(play)
    turns = [turn for number in range(PROGRAMS) for turn in engine.turns[number]]
    assert len(turns) == PROGRAMS * TURNS
    for number, trace in enumerate(traces):
        answers = [trace.nodes[place] for place in trace.answers]
        assert len(answers) == TURNS
        for place, turn in zip(trace.answers, engine.turns[number], strict=True):
            np.testing.assert_array_equal(trace.ids(place), np.concatenate([turn.prompt_ids, turn.completion_ids]))
            np.testing.assert_array_equal(trace.nodes[place].logprobs, turn.logprobs)
            np.testing.assert_array_equal(trace.nodes[place].token_versions, turn.versions)
    crossed = {number % 6 for number in range(PROGRAMS) for turn in engine.turns[number] if len(set(turn.versions.tolist())) > 1}
    assert crossed == {*range(6)}, "each language, with and without a stream, had an answer under way at the update"
    assert run.errors(turns, min_tokens=LENGTH).max() < EXACT
