"""Writes the finished rollouts of `rlx synthesize` as training data that `rlx sft` reads, and where it came from.

    rollouts/finished.jsonl  →  rejection_sampling.select  →  data/train.jsonl, data/metadata.json

    data/train.jsonl      one row for each transcript of each kept rollout
    data/metadata.json    what was played, kept and dropped; written last

A row has `prompt`, `completion` and `tools`, and the provenance of its rollout. The assistant's messages in `completion` are those to
train on; everything in `prompt` is context. A conversation's `prompt` and `completion` are lists of messages in OpenAI's form; those of a
raw text prompt are `str`. `tools` is JSON, because the schemas of tools differ by row.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import rlx
from rlx.config.pythons import python_of, version_in
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.envs.base import sampling_of
from rlx.envs.kinds import version_of
from rlx.paths import RunPaths, atomic
from rlx.rollout.rejection_sampling import CAUSES, Candidate, select
from rlx.rollout.rollout_set import of_weights, read_finished

METADATA = "metadata.json"
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # JSON may hold them, but some readers end a line there
COLUMNS = (  # besides `prompt` and `completion`
    "tools",
    "env",  # name in the configuration
    "env_id",
    "env_version",  # of its package
    "example_id",
    "index",  # place of the example in the environment's data
    "member",  # number of the rollout among those of the example
    "part",  # number of the transcript in the rollout: above 0 only where the history was rewritten, or with several agents
    "reward",
    "rewards",  # JSON: reward functions by name, unweighted
    "stop",
    "num_tokens",  # sampled, over the whole rollout
    "model",
    "policy_version",  # 0: the model itself; otherwise the step of its weights
    "endpoint",  # of another's server
    "seed",  # of the run
    "sampling",  # JSON
    "run",
    "commit",  # of rlx's code
)


class NothingKept(ValueError):
    """No rollout is left to train on. The message says why, and what to change."""


def wanted_of(config: SynthesizeRoot) -> dict[str, tuple[int | None, int]]:
    """(number of examples, None: all; rollouts of each) of each environment."""
    return {
        name: (env.num_examples or config.num_examples, env.rollouts_per_example or config.rollouts_per_example)
        for name, env in config.envs.items()
    }


def export(config: SynthesizeRoot, paths: RunPaths) -> dict[str, Any]:
    """Choose among the finished rollouts, write the data and its metadata, and return the metadata.

    Raises NothingKept if no rollout is left; the metadata then says why, and there is no data.
    """
    finished, wanted = read_finished(paths.finished), wanted_of(config)
    if finished:  # only what the latest weights have sampled
        finished = [one for one in of_weights(finished, finished[-1].weights) if one.version == finished[-1].version]
    finished.sort(key=lambda one: one.is_completed)  # of two records of a rollout the later one counts, but none that failed
    later = {one.key: one for one in finished if one.env in wanted}
    outcomes = [one for one in later.values() if one.place < (wanted[one.env][0] or math.inf) and one.rollout < wanted[one.env][1]]
    kept, dropped = select(map(Candidate.of, outcomes), config, config.seed)
    facts = _facts(config, paths)
    rows = list(rows_of(kept, facts))
    path = paths.synthesized
    path.unlink(missing_ok=True)  # of an earlier choice
    if rows:
        with atomic(path) as temporary:
            temporary.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
    rewards = [one.reward for one in outcomes if one.is_completed]
    metadata = {
        "file": str(path) if rows else None,
        "rows": len(rows),
        "raw_text_rows": sum(isinstance(row["prompt"], str) for row in rows),
        "rollouts": {
            "played": len(outcomes),
            "kept": len(kept),
            "dropped": {cause: dropped[cause] for cause in CAUSES if dropped[cause]},
        },
        "examples": {"played": len({one.key[:2] for one in outcomes}), "kept": len({one.rollout.key[:2] for one in kept})},
        "reward": {"played": mean(rewards), "kept": mean([one.rollout.reward for one in kept])},
        "asked": config.output_options,  # for `rlx.runs.run.has_done`
        "environments": {
            name: {
                "id": env.id,
                "version": facts[name]["env_version"],
                "args": env.args,
                "split": env.split,
                "sampling": sampling_of(config, env),
                "kept": Counter(one.rollout.env for one in kept)[name],
            }
            for name, env in config.envs.items()
        },
        "model": {
            "name": config.model.name,
            "endpoint": config.client.base_url or (list(config.inference.base_url) or None),
            "weights_dir": config.weights_dir,
            "step": config.step,
        },
        "seed": config.seed,
        "run": config.run.name,
        "commit": facts[next(iter(facts))]["commit"],
        "rlx": rlx.__version__,
        "date": _provenance(paths).get("time"),
    }
    with atomic(path.with_name(METADATA)) as temporary:
        temporary.write_text(json.dumps(metadata, indent=1, ensure_ascii=False, default=repr) + "\n", encoding="utf-8")
    if not rows:
        causes = ", ".join(f"{count} {cause}" for cause, count in dropped.most_common())
        found = f"; their rewards are {min(rewards):g} to {max(rewards):g}" if rewards else ""
        raise NothingKept(
            f"no rollout is kept: of {len(outcomes)}, {causes}{found}.\n"
            f"  fix: choose again with other keys, such as min_reward={max(rewards, default=0):g}, and resume=latest play=false"
        )
    return metadata


def rows_of(kept: Iterable[Candidate], facts: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of the rollouts, in their order. `facts`: for each environment, values of further columns."""
    for candidate in kept:
        rollout = candidate.rollout
        version = rollout.versions[0] if len(rollout.versions) == 1 else None
        for part, one in enumerate(candidate.transcripts):
            known = {
                **facts[rollout.env],
                "env": rollout.env,
                "example_id": rollout.example_id,
                "index": rollout.place,
                "member": rollout.rollout,
                "part": part,
                "reward": rollout.reward,
                "rewards": to_json(rollout.rewards),
                "stop": rollout.stop_condition,
                "num_tokens": rollout.token_usage.output_tokens,
                "policy_version": version,
                "tools": to_json(list(one.tools)) if one.tools else None,
            }
            assert known.keys() <= set(COLUMNS), known.keys() - set(COLUMNS)
            yield {"prompt": one.prompt, "completion": one.completion} | {name: known.get(name) for name in COLUMNS}


def to_json(value: Any) -> str:
    """One line of JSON. Values that JSON cannot hold (an environment's own objects) are written as their `repr`."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text.translate(LINE_ENDS)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values, because JSON has no NaN."""
    return float(np.mean(values)) if values else None


def _facts(config: SynthesizeRoot, paths: RunPaths) -> dict[str, dict[str, Any]]:
    """The columns that are the same for all rows of an environment."""
    source = _provenance(paths).get("source") or {}
    same = {
        "model": config.model.name,
        "endpoint": config.client.base_url,
        "seed": config.seed,
        "run": config.run.name,
        "commit": f"{source['commit']}{'-dirty' if source.get('diff') else ''}" if source.get("commit") else None,
    }
    found = {}
    for name, env in config.envs.items():
        own = python_of(env.id, env.python)
        version = version_of(env.id) if own is None else version_in(own, env.id)
        found[name] = {**same, "env_id": env.id, "env_version": version, "sampling": to_json(sampling_of(config, env))}
    return found


def _provenance(paths: RunPaths) -> dict[str, Any]:
    """The run's provenance record; empty without one."""
    return json.loads(paths.provenance.read_text()) if paths.provenance.is_file() else {}
