"""Writes what the environments' own teachers say as rows for `rlx sft`: `python examples/demonstrations.py OUT.jsonl env=reverse_text`.

The arguments behind the file are those of `rlx train`. Number, seed and errors of the teacher are keys of `model.warm_start`. They are the
demonstrations from which `rlx train model=tiny` makes its initial model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlx.config.load import compose
from rlx.envs.demonstrations import demonstrations_of


def main() -> None:
    out = Path(sys.argv[1])
    cfg = compose(sys.argv[2:]).cfg
    if cfg.model.warm_start is None:
        sys.exit("the keys of the teacher are in model.warm_start, which only model=tiny has: leave model, or the experiment with one, out")
    found = demonstrations_of(cfg, cfg.envs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for conversations in found.values():
            for said in conversations:
                file.write(json.dumps(said.row) + "\n")
    print(f"{out}: {sum(map(len, found.values()))} rows of {', '.join(found)}")


if __name__ == "__main__":
    main()
