"""Data sets on disk and their rows as conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.data.conversations import RowError, read_conversation
from rlx.data.rows import digest_of, open_rows

ASKED, SAID = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}


def write(path: Path, rows: list[dict], blank: str = "") -> str:
    path.write_text(blank.join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_jsonl_file_keeps_every_value_as_it_stands(tmp_path: Path) -> None:
    rows = [{"a": "2024-01-01T00:00:00"}, {"b": {"x": 1}}, {"b": {"y": "two"}, "a": None}, {"b": 3}]
    found = open_rows(write(tmp_path / "a.jsonl", rows, blank="\n  \n"))
    assert [found[i] for i in range(len(found))] == rows, "no dates are guessed, and no row gets the keys of another"
    assert found.where(2) == f"row 2 of {tmp_path}/a.jsonl (line 7)"


def test_a_file_with_brackets_in_its_name_is_that_file(tmp_path: Path) -> None:
    assert len(open_rows(write(tmp_path / "data[1].jsonl", [{"n": 1}]))) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.epochs=2", "max_steps=5"], "both say how long the run is"),
        (["data.epochs=2", "resume=outputs/other"], "it has no whole passes|outputs/other"),
        (["data.columns={promt: question}"], "a row has no part promt"),
        (["data.columns={prompt: question}", "data.name=null", "data.sets.a.name=README.md"], "no data set has these columns"),
    ],
)
def test_keys_of_data_that_would_have_no_effect_are_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(["data.name=README.md", *keys], {}, SFT)


def test_columns_with_other_names_are_read(tmp_path: Path) -> None:
    row = {"question": "2+3", "answer": "5"}
    columns = {"prompt": "question", "completion": "answer"}
    assert read_conversation(row, columns=columns).messages == [ASKED, SAID]
    both = {**row, "messages": [ASKED, {"role": "assistant", "content": "another"}]}
    assert read_conversation(both, columns=columns).messages == [ASKED, SAID], "what is named counts"
    with pytest.raises(RowError, match="it has no column reply; it has answer, question"):
        read_conversation(row, columns={"prompt": "question", "completion": "reply"})


def test_folders_patterns_and_parts_of_data_sets(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", [{"n": f"{name}{i}"} for i in range(3)])
    (tmp_path / "readme.md").write_text("no data")
    whole = open_rows(str(tmp_path))
    assert [whole[i]["n"] for i in range(len(whole))] == ["a0", "a1", "a2", "b0", "b1", "b2"], "in the order of names"
    assert len(open_rows(f"{tmp_path}/b*.jsonl")) == 3
    one, rest = (open_rows(str(tmp_path), split=split) for split in ("train[:50%]", "train[50%:]"))
    assert [one[2]["n"], rest[0]["n"], rest.where(0)] == ["a2", "b0", f"row 0 of {tmp_path}/b.jsonl (line 1)"]


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("train.jsonl", "test.jsonl"),
        ("train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl"),
        ("train/a.jsonl", "dev/a.jsonl"),
        ("main/train.jsonl", "main/Eval.jsonl"),
    ],
)
def test_a_folder_with_held_out_files_is_refused(tmp_path: Path, train: str, other: str) -> None:
    for number, name in enumerate((train, other)):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write(tmp_path / name, [{"n": number}])
    with pytest.raises(ValueError, match=rf"\({tmp_path}/{train}\) and files that are held out \({tmp_path}/{other}\); name only those"):
        open_rows(str(tmp_path))
    assert open_rows(f"{tmp_path}/{train}")[0] == {"n": 0}


def test_hidden_folders_and_words_that_only_contain_a_split_are_no_reason_to_refuse(tmp_path: Path) -> None:
    for name in (".cache/test.jsonl", "train/latest.jsonl", "train/devices.jsonl", "unit_tests.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [{"n": name}])
    found = open_rows(str(tmp_path))
    assert {found[i]["n"] for i in range(len(found))} == {"train/latest.jsonl", "train/devices.jsonl", "unit_tests.jsonl"}
    assert len(open_rows(str(tmp_path / ".cache"))) == 1, "a hidden folder that is named is read"


def test_a_parquet_file_has_the_same_conversations_as_its_jsonl(tmp_path: Path) -> None:
    from datasets import Dataset

    calls = [[{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}], None]
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": call}, SAID], "tools": json.dumps([ADD])} for call in calls
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    parquet, jsonl = open_rows(str(tmp_path / "a.parquet")), open_rows(write(tmp_path / "a.jsonl", rows))
    for i in range(2):
        assert read_conversation(parquet[i], fills=True) == read_conversation(jsonl[i])
    assert read_conversation(jsonl[0]).tools == [ADD]


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        ("none.jsonl", "train", "does not exist"),
        ("*.json", "train", "no file matches"),
        ("table.csv", "train", "neither JSONL nor Parquet"),
        ("a.jsonl", "test", "only the split `train`"),
        ("a.jsonl", "train[5:]", "the part train\\[5:\\] has no rows"),
        ("empty.jsonl", "train", "has no rows"),
        ("broken.parquet", "train", "cannot be read as Parquet"),
    ],
)
def test_what_is_no_data_set_is_named(tmp_path: Path, name: str, split: str, reason: str) -> None:
    write(tmp_path / "a.jsonl", [{"n": 1}])
    for other in ("table.csv", "empty.jsonl", "broken.parquet"):
        (tmp_path / other).write_text("x,y" if other != "empty.jsonl" else "")
    with pytest.raises(ValueError, match=reason):
        open_rows(str(tmp_path / name), split=split)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(ValueError, match=r"row 1 of .*a\.jsonl \(line 2\) is not JSON"):
        open_rows(str(tmp_path / "a.jsonl"))[1]


@pytest.mark.parametrize(
    ("row", "messages", "first"),
    [
        ({"messages": [ASKED, SAID]}, [ASKED, SAID], 0),
        ({"messages": json.dumps([ASKED, SAID])}, [ASKED, SAID], 0),
        ({"prompt": "2+3", "completion": "5"}, [ASKED, SAID], 1),
        ({"conversations": [{"from": "human", "value": "2+3"}, {"from": "gpt", "value": "5"}]}, [ASKED, SAID], 0),
        ({"conversations": json.dumps([ASKED, SAID])}, [ASKED, SAID], 0),
        ({"prompt": " " + json.dumps([ASKED]), "completion": json.dumps([SAID], indent=1)}, [ASKED, SAID], 1),
        ({"prompt": [ASKED], "completion": [SAID], "messages": None}, [ASKED, SAID], 1),
        ({"prompt": [ASKED, SAID, ASKED], "completion": SAID}, [ASKED, SAID, ASKED, SAID], 3),
        ({"messages": [{"role": "developer", "content": [{"type": "text", "text": "be"}, " kind"]}]}, None, 0),
    ],
)
def test_the_forms_of_a_row(row: dict[str, Any], messages: list | None, first: int) -> None:
    conversation = read_conversation(row)
    assert conversation.messages == (messages or [{"role": "system", "content": "be\n kind"}])
    assert (conversation.first, conversation.tools) == (first, None)


def test_reasoning_is_read_by_each_of_its_names_and_a_weight_of_1_is_none() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        read = read_conversation({"messages": [ASKED, {**SAID, name: "so", "weight": 1}]})
        assert read.messages[1] == {**SAID, "reasoning_content": "so"}
    read = read_conversation({"prompt": [ASKED, {**SAID, "weight": 0}, ASKED], "completion": [{**SAID, "weight": 1}]})
    assert read.messages == [ASKED, SAID, ASKED, SAID], "what the prompt says is trained by nobody"


def test_tools_and_calls_are_read_in_both_forms() -> None:
    function = ADD["function"]
    flat = {"id": "a", "name": "add", "arguments": {"x": None}}
    nested = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": null}'}}
    for call in (flat, nested, json.dumps(nested)):
        for tools in ({"tools": [ADD]}, {"tool_defs": json.dumps([function])}, {"tools": [json.dumps(ADD)]}):
            read = read_conversation({"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], **tools})
            assert read.tools == [ADD]
            assert read.messages[1] == {"role": "assistant", "content": "", "tool_calls": [nested]}
    padded = read_conversation({"messages": [{"role": "assistant", "tool_calls": [flat]}]}, fills=True)
    assert padded.messages[0]["tool_calls"][0]["function"]["arguments"] == "{}", "Parquet fills in the keys of other rows"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "a turn is `from` 'function_call'; known are human"),
        ({"messages": [ASKED, SAID], "images": ["a.png"]}, "its column `images` has images; only text"),
        ({"text": "a"}, "it needs `messages`, `conversations`, or `prompt` and `completion`; it has text"),
        ({"messages": "hello"}, "`messages` is a text"),
        ({"messages": []}, "it has no messages"),
        ({"messages": [{"role": "human", "content": "a"}]}, "the role 'human'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content of type 'image_url'; only text"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "is of type dict"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "a tool call has no name"),
        ({"messages": [{**ASKED, "tool_calls": [{"name": "add"}]}]}, "of role user has `tool_calls`"),
        ({"messages": [ASKED], "tools": "add(x)"}, "tools is a text that is not JSON"),
        ({"messages": [ASKED, SAID], "functions": [{"name": "add"}]}, "it has `functions`, the older form of tools"),
        ({"messages": [ASKED, {**SAID, "function_call": {"name": "add", "arguments": "{}"}}]}, "has `function_call`, the older form"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, "an answer has `weight` 0, and every answer behind the prompt is trained alike"),
    ],
)
def test_a_row_that_is_no_conversation_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        read_conversation(row)


def test_what_synthesis_writes_is_read_unchanged(tmp_path: Path) -> None:
    from rlx.rollout.sft_export import COLUMNS, to_json

    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": null, "when": "2024-01-01T00:00:00"}'}}
    said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "5"}, SAID]
    other = dict.fromkeys(COLUMNS)
    rows = [
        {"prompt": [ASKED], "completion": said, **other, "tools": json.dumps([ADD]), "reward": 1.0},
        {"prompt": [ASKED], "completion": [{**SAID, "reasoning_content": "add them"}], **other},
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(to_json(row) + "\n" for row in rows))
    found = open_rows(str(path))
    one, two = (read_conversation(found[i], fills=found.fills) for i in range(2))
    assert (one.messages, one.first, one.tools) == ([ASKED, *said], 1, [ADD])
    assert (two.messages, two.tools) == ([ASKED, {**SAID, "reasoning_content": "add them"}], None)


@pytest.mark.parametrize("text", ["[]", '[{"name": "Bob"}]', '[{"role": "engineer"}]', "[1, 2]", '[{"role": ["user"]}]'])
def test_a_text_that_happens_to_be_json_is_text(text: str) -> None:
    read = read_conversation({"prompt": text, "completion": text})
    assert read.messages == [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    assert read.first == 1


def test_nulls_of_tools_and_calls_that_are_json_texts_are_kept() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {"default": None, "enum": [None, 1]}}}}}
    call = {"name": "add", "arguments": {"x": None}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    for tools in (json.dumps([tool]), [json.dumps(tool)]):
        assert read_conversation({"messages": [ASKED, SAID], "tools": tools}, fills=True).tools == [tool]
    for calls in (json.dumps([call]), [json.dumps(call)]):
        (_, read) = read_conversation({"messages": [ASKED, {**said, "tool_calls": calls}]}, fills=True).messages
        assert read["tool_calls"][0]["function"]["arguments"] == '{"x": null}'
    (filled,) = read_conversation({"messages": [ASKED, SAID], "tools": [tool]}, fills=True).tools or ()
    assert filled["function"]["parameters"] == {"properties": {"x": {"enum": [None, 1]}}}, "the file may have filled these in"


def test_a_digest_shows_that_a_data_set_has_changed_and_not_where_it_is(tmp_path: Path) -> None:
    rows = [{"n": number} for number in range(5)]
    name, moved = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows)
    before = digest_of(name, open_rows(name))
    assert before == digest_of(moved, open_rows(moved))
    assert (before["rows"], before["bytes"]) == (5, 45)
    write(tmp_path / "a.jsonl", [*rows[:4], {"n": 9}])
    assert digest_of(name, open_rows(name)) | {"blake2": ""} == before | {"blake2": ""}, "as many rows and bytes"
    assert digest_of(name, open_rows(name)) != before


def test_a_resumed_run_notices_that_its_data_has_changed(tmp_path: Path) -> None:
    from rlx.config.load import compose
    from rlx.config.roots import SFT
    from rlx.paths import RunPaths
    from rlx.policy.source import keep_digests
    from rlx.runs.run import Run

    name, held_out = write(tmp_path / "a.jsonl", [{"n": 1}]), write(tmp_path / "val.jsonl", [{"n": 1}])
    cfg = compose([f"data.name={name}", f"val.name={held_out}", "model=tiny"], {}, SFT).cfg
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    keep_digests(cfg, paths)
    written = paths.data.read_text()
    keep_digests(cfg, paths)
    assert paths.data.read_text() == written
    assert list(Run(paths.root).data or ()) == ["data.name", "val.name"], "`rlx diff` compares them"
    write(tmp_path / "a.jsonl", [{"n": 1}, {"n": 2}])
    with pytest.raises(ValueError, match=r"data\.name=.*'rows': 1, .*→ \{'rows': 2(.|\n)*run\.name=NEW; or begin anew with clean=true"):
        keep_digests(cfg, paths)
    assert paths.data.read_text() == written
