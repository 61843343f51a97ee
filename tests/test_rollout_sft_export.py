"""The rows of `rlx synthesize`."""

from __future__ import annotations

import json
from typing import Any

from test_rollout_rejection_sampling import candidate as made

from rlx.rollout.rejection_sampling import Candidate, Transcript
from rlx.rollout.sft_export import COLUMNS, rows_of, to_json

TOOL = {"type": "function", "function": {"name": "add", "description": "é", "parameters": {"type": "object", "properties": {"x": {}}}}}
CALLED = [
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "2+2",
        "tool_calls": [{"type": "function", "id": "a", "function": {"name": "add", "arguments": '{"x": null}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4.\u2028"},
]
FACTS = {"sums": {"env_id": "rlx-sums", "model": "tiny", "seed": 3, "sampling": '{"temperature": 1.0}', "run": "mine"}}


def candidate(*transcripts: Transcript, member: int = 1, env: str = "sums") -> Candidate:
    return made(2, member, env=env, transcripts=transcripts, example_id=7, rewards={"right": 1.0}, stop_condition="done", versions=[0])


def rows() -> list[dict[str, Any]]:
    plain = Transcript(prompt=[{"role": "user", "content": "1+1?"}], completion=[{"role": "assistant", "content": "2"}])
    called = Transcript(prompt=[{"role": "user", "content": "2+2?"}], completion=CALLED, tools=(TOOL,))
    return list(rows_of([candidate(plain), candidate(called, plain, member=2)], FACTS))


def test_a_row_says_where_it_comes_from():
    first, second, third = rows()
    assert list(first) == ["prompt", "completion", *COLUMNS]
    assert (first["env"], first["env_id"], first["example_id"], first["index"], first["member"]) == ("sums", "rlx-sums", 7, 2, 1)
    assert (first["reward"], json.loads(first["rewards"]), first["run"], first["seed"]) == (1.0, {"right": 1.0}, "mine", 3)
    assert (first["tools"], json.loads(second["tools"])) == (None, [TOOL])
    assert [row["part"] for row in (first, second, third)] == [0, 0, 1]
    assert all(len(to_json(row).splitlines()) == 1 for row in rows()), "some readers end a line at U+2028"


def test_supervised_training_marks_exactly_the_answers():
    """The reader of `rlx sft` takes the files as they are: answers and calls are trained, prompts and tool results are not."""
    from policy_stand_in import tiny_chat

    from rlx.data.conversations import read_conversation
    from rlx.data.masks import mark

    shown = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "2+2?"}]
    plain = Transcript(prompt=shown, completion=[{"role": "assistant", "content": "4"}])
    call = {key: value for key, value in CALLED[0].items() if key != "reasoning_content"}  # the tiny model's format does not show it
    called = Transcript(prompt=shown[:1], completion=[call, CALLED[1], {"role": "assistant", "content": "It is 4."}], tools=(TOOL,))
    lines = [to_json(row) for row in rows_of([candidate(plain), candidate(called, member=2)], FACTS)]
    texts = []
    for line in lines:
        (marked,) = mark(read_conversation(json.loads(line)), tiny_chat())
        trained = [token for token, is_trained in zip(marked.token_ids, marked.trained, strict=True) if is_trained]
        texts.append(tiny_chat().tokenizer.decode(trained))
    assert texts[0] == "4<|im_end|>", "the example in the prompt is context"
    assert '"name": "add"' in texts[1]
    assert texts[1].endswith("It is 4.<|im_end|>")
    assert texts[1].count("<|im_end|>") == 2, "two answers, no tool result"
