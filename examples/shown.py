"""Writes rows for `rlx sft` that teach a model to follow a demonstration: `python examples/shown.py OUT.jsonl`.

They are the demonstrations of reverse_text (`demonstrations.py`). Every second row gets its answer in the prompt and is always right. The
others stay as they are, wrong answers included. So the model copies what it is shown, and errs where it is shown nothing.
The arguments behind the file are those of `rlx train`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlx.config.load import compose
from rlx.envs.demonstrations import demonstrations_of


def main() -> None:
    out = Path(sys.argv[1])
    cfg = compose(["env=reverse_text", *sys.argv[2:]]).cfg
    rows = [said.row for conversations in demonstrations_of(cfg, cfg.envs).values() for said in conversations]
    for row in rows[::2]:
        *_, asked = row["prompt"]
        (answer,) = row["completion"]
        right = asked["content"][::-1]
        asked["content"], answer["content"] = f"{asked['content']} is {right}", right
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: {len(rows)} rows, half of them with the answer")


if __name__ == "__main__":
    main()
