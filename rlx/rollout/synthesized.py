"""The files of `rlx synthesize`: training data in the form that `rlx sft` reads, and where it came from.

    data/train.parquet    (or train.jsonl) one row for each transcript of each kept rollout
    data/metadata.json    what was played, kept and dropped; written last

A row has `prompt`, `completion` and `tools`, and the provenance of its rollout. The assistant's messages in `completion` are those to
train on; everything in `prompt` is context. A conversation's `prompt` and `completion` are lists of messages in OpenAI's form; those of a
raw text prompt are `str`. `tools` is JSON, because the schemas of tools differ by row. Call the writer in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.paths import atomic
from rlx.rollout.selection import Candidate

METADATA = "metadata.json"
FORMATS = ("parquet", "jsonl")
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # JSON may hold them, but some readers end a line there
COLUMNS = {  # besides `prompt` and `completion`; Parquet's types by their Arrow names
    "tools": "string",
    "env": "string",  # name in the configuration
    "env_id": "string",
    "env_version": "string",  # of its package
    "example_id": "int64",
    "index": "int64",  # place of the example in the environment's data
    "member": "int64",  # number of the rollout among those of the example
    "part": "int64",  # number of the transcript in the rollout: above 0 only where the history was rewritten, or with several agents
    "reward": "float64",
    "rewards": "string",  # JSON: reward functions by name, unweighted
    "stop": "string",
    "num_tokens": "int64",  # sampled, over the whole rollout
    "model": "string",
    "policy_version": "int64",  # 0: the model itself; otherwise the step of its weights
    "endpoint": "string",  # of another's server
    "seed": "int64",  # of the run
    "sampling": "string",  # JSON
    "run": "string",
    "commit": "string",  # of rlx's code
}


def rows_of(kept: Iterable[Candidate], facts: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of the rollouts, in their order. `facts`: for each environment, values of further columns."""
    for candidate in kept:
        for part, one in enumerate(candidate.transcripts):
            known = {
                **facts[candidate.env],
                **candidate.about,
                "env": candidate.env,
                "index": candidate.index,
                "member": candidate.member,
                "part": part,
                "reward": candidate.reward,
                "tools": to_json(list(one.tools)) if one.tools else None,
            }
            assert known.keys() <= COLUMNS.keys(), known.keys() - COLUMNS.keys()
            yield {"prompt": one.prompt, "completion": one.completion} | {name: known.get(name) for name in COLUMNS}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Write the rows atomically, as `kind`: one of FORMATS.

    Raises ValueError if a Parquet file would have conversations and raw text prompts in one column.
    """
    if kind == "jsonl":
        with atomic(path) as temporary:
            temporary.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = [isinstance(row["prompt"], str) for row in rows]
    if any(raw) and not all(raw):
        envs = [", ".join(sorted({row["env"] for row, is_raw in zip(rows, raw, strict=True) if is_raw is one})) for one in (True, False)]
        raise ValueError(
            f"the prompts of {envs[0]} are raw text, those of {envs[1]} conversations, and a Parquet column has one type: write JSONL "
            "(format=jsonl), or synthesize the environments separately"
        )
    said = pa.string() if all(raw) else pa.list_(_message_type(pa))
    schema = pa.schema([("prompt", said), ("completion", said), *((name, getattr(pa, kind)()) for name, kind in COLUMNS.items())])
    with atomic(path) as temporary:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), temporary, compression="zstd")


def write_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write `metadata.json` atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(metadata, indent=1, ensure_ascii=False, default=repr) + "\n", encoding="utf-8")


def to_json(value: Any) -> str:
    """One line of JSON. Values that JSON cannot hold (an environment's own objects) are written as their `repr`."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text.translate(LINE_ENDS)


def _message_type(pa: Any) -> Any:
    """A message in OpenAI's form, as an Arrow type. Keys that a message lacks are null."""
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("type", pa.string()), ("id", pa.string()), ("function", function)])
    texts = ("role", "content", "reasoning_content", "tool_call_id", "name")
    return pa.struct([*((name, pa.string()) for name in texts), ("tool_calls", pa.list_(call))])
