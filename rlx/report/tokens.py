"""What two objectives do with the tokens of one step: a table by environment and sign of advantage, the largest differences, two files.

    replays/step_12--loss=gspo/tokens.csv      one trainable token a line, in the batch's order
    replays/step_12--loss=gspo/summary.json    gradients, metrics, the table; written last

docs/resume.md documents both formats. Needs no torch: the numbers come from `rlx.train.compare`.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlx.paths import atomic
from rlx.plan.explain import table

if TYPE_CHECKING:
    from rlx.train.compare import Comparison, Side

COLUMNS = (
    "mini_batch", "env", "group", "member", "sample", "position", "token_id", "text", "version",
    "advantage", "inference_logp", "logp", "weight_recorded", "weight_other",
)  # fmt: skip
CHECKED = ("optim/grad_norm", "loss/total", "policy/entropy", "mismatch/kl")  # metrics that the run recorded of the same step
LONGEST_NAME = 16  # characters of an objective's name above a column
CLOSE = 1e-3  # relative difference up to which they count as reproduced
SHOWN = ("loss/total", "loss/policy", "loss/kl", "policy/clip_frac_low", "policy/clip_frac_high", "policy/masked_frac", "policy/ess")

Bools = NDArray[np.bool_]


def rows(found: Comparison, texts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """One record for each token that a loss reads, in the batch's order. `texts`: by token id; a missing one is empty."""
    numbers = _numbers(found)
    for token in np.flatnonzero(read_by(found)):
        sample = found.samples[found.sample[token]]
        at = int(found.position[token])
        yield {
            "mini_batch": int(found.mini_batch[token]),
            "env": sample.env,
            "group": sample.group,
            "member": sample.member,
            "sample": numbers[found.sample[token]],
            "position": at,
            "token_id": int(sample.token_ids[at]),
            "text": texts.get(int(sample.token_ids[at]), ""),
            "version": int(sample.versions[at]),
            "advantage": float(sample.advantages[at]),
            "inference_logp": float(sample.inference_logprobs[at]),
            "logp": float(found.logp[token]),
            "weight_recorded": _zero(found.recorded.weights[token]),
            "weight_other": _zero(found.other.weights[token]),
        }


def read_by(found: Comparison) -> Bools:
    """[T] the tokens that a loss reads, under either objective."""
    return ~(np.isnan(found.recorded.weights) & np.isnan(found.other.weights))


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else float(value) + 0.0  # the other objective reads the token; and −0 becomes 0


def _numbers(found: Comparison) -> list[int]:
    """The number of each sample among those of its rollout."""
    count: dict[tuple[int, int], int] = {}
    numbers = []
    for sample in found.samples:
        key = (sample.group, sample.member)
        numbers.append(count.get(key, 0))
        count[key] = numbers[-1] + 1
    return numbers


def shares(found: Comparison) -> list[dict[str, Any]]:
    """The tokens by environment and sign of advantage, and those of all environments if there are several (`env` is then `all`).

    `mean_…` is of |weight|. `none_…` is the share of tokens with weight 0: clipped, dropped, or without advantage.
    """
    read = read_by(found)
    envs = np.array([sample.env for sample in found.samples])[found.sample]
    advantages = np.concatenate([sample.advantages for sample in found.samples])
    names = list(dict.fromkeys(sample.env for sample in found.samples))
    parts: list[tuple[str, Bools]] = [(name, envs == name) for name in names]
    parts += [("all", np.ones(len(envs), dtype=np.bool_))] if len(names) > 1 else []
    result = []
    for name, of_env in parts:
        for sign, of_sign in (("+", advantages > 0), ("-", advantages < 0), ("0", advantages == 0)):
            chosen = read & of_env & of_sign
            if chosen.any():
                one, other = (np.nan_to_num(side.weights[chosen]) for side in (found.recorded, found.other))
                result.append(
                    {
                        "env": name,
                        "sign": sign,
                        "tokens": int(chosen.sum()),
                        "mean_recorded": float(np.abs(one).mean()),
                        "mean_other": float(np.abs(other).mean()),
                        "none_recorded": float((one == 0).mean()),
                        "none_other": float((other == 0).mean()),
                        "mean_difference": float(np.abs(other - one).mean()),
                    }
                )
    return result


def largest(found: Comparison, texts: Mapping[int, str], count: int) -> list[dict[str, Any]]:
    """The records of the tokens whose weights differ most, largest difference first; none of equal weight."""

    def difference(row: Mapping[str, Any]) -> float:
        return abs(row["weight_other"] - row["weight_recorded"])

    return [row for row in heapq.nlargest(count, rows(found, texts), key=difference) if difference(row) > 0]


def checks(found: Comparison, record: Mapping[str, Any] | None, iterations: int) -> list[dict[str, Any]]:
    """The metrics that the run recorded of this step, beside those of its objective here. They show whether the policy is the same.

    Empty if the run's record is gone, or its step had several optimizer steps (their mean cannot be compared with the first).
    """
    if record is None or iterations * len(found.recorded.metrics) != 1:
        return []
    here = found.recorded.metrics[0] | {"optim/grad_norm": found.recorded.gradient_norms[0]}
    both = [(name, record[name], here[name]) for name in CHECKED if name in record and name in here]
    return [{"metric": n, "recorded": a, "here": b, "close": math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-6)} for n, a, b in both]


def summary(found: Comparison, texts: Mapping[int, str], facts: Mapping[str, Any], top: int) -> dict[str, Any]:
    """The content of `summary.json`. `facts`: what was compared (run, overrides, policy, notes, checks, …)."""
    mini_batches = []
    for number, angle in enumerate(found.cosines):
        one, other = (_side(side, number) for side in (found.recorded, found.other))
        mini_batches.append({"cosine": None if math.isnan(angle) else angle, "recorded": one, "other": other})
    return {
        "schema": "rlx.replay/1",
        "step": found.step,
        **facts,
        "rollouts": len({(sample.group, sample.member) for sample in found.samples}),
        "tokens": int(read_by(found).sum()),
        "mini_batches": mini_batches,
        "by_env": shares(found),
        "largest_differences": largest(found, texts, top),
    }


def _side(side: Side, number: int) -> dict[str, Any]:
    return {"gradient_norm": side.gradient_norms[number], "num_tokens": side.num_tokens[number], "metrics": side.metrics[number]}


def write(folder: Path, found: Comparison, texts: Mapping[int, str], content: Mapping[str, Any]) -> None:
    """Write both files; each replaces an earlier one atomically."""
    with atomic(folder / "tokens.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**row, "text": json.dumps(row["text"], ensure_ascii=False)} for row in rows(found, texts))
    with atomic(folder / "summary.json") as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def as_text(content: Mapping[str, Any], names: tuple[str, str]) -> str:
    """A summary for a terminal. `names`: of the run's objective and of the other."""
    lines = [
        f"step {content['step']} of {content['run']}: {content['rollouts']:,} rollouts, {content['tokens']:,} tokens; {content['policy']}"
    ]
    lines += [f"  changed   {name}: {' → '.join(_value(each) for each in both)}" for name, both in content["changes"].items()]
    lines += [f"  note      {note}" for note in content["notes"]]
    if content["checks"]:
        good = all(check["close"] for check in content["checks"])
        said = ", ".join(f"{c['metric']} {c['here']:.6g} ({c['recorded']:.6g})" for c in content["checks"])
        lines.append(f"  check     {'as the run recorded' if good else 'NOT as the run recorded'}: {said}")
    for number, part in enumerate(content["mini_batches"]):
        one, other = part["recorded"], part["other"]
        head = [f"mini-batch {number}" if len(content["mini_batches"]) > 1 else "", *names]
        body = [["gradient norm", _short(one["gradient_norm"]), _short(other["gradient_norm"])]]
        kept = [name for name in SHOWN if name in one["metrics"] or name in other["metrics"]]
        body += [[name, _short(one["metrics"].get(name)), _short(other["metrics"].get(name))] for name in kept]
        lines += ["", *table(head, body), f"cosine of the two gradients: {_short(part['cosine'])}"]
    body = []
    for s in content["by_env"]:
        numbers = (_short(s[name]) for name in ("mean_recorded", "mean_other", "mean_difference"))
        body.append([s["env"], s["sign"], f"{s['tokens']:,}", *numbers, f"{s['none_recorded']:.1%}", f"{s['none_other']:.1%}"])
    head = ["environment", "advantage", "tokens", f"mean |w| {names[0]}", f"mean |w| {names[1]}", "mean |difference|"]
    lines += ["", *table([*head, f"w = 0 {names[0]}", f"w = 0 {names[1]}"], body)]
    body = []
    for r in content["largest_differences"]:
        weights = (f"{r['weight_recorded']:+.4f}", f"{r['weight_other']:+.4f}")
        token = (repr(r["text"]), r["env"], f"{r['group']}/{r['member']}", str(r["position"]))
        body.append([*token, f"{r['advantage']:+.3f}", f"{r['logp']:.3f}", *weights])
    if body:
        head = ["token", "environment", "group/member", "position", "advantage", "log-prob", f"w {names[0]}", f"w {names[1]}"]
        lines += ["", "largest differences", *table(head, body)]
    return "\n".join(lines)


def _value(value: Any) -> str:
    return "(not set)" if value is None else str(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def names_of(recorded: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Short names of both objectives, which differ."""
    one, two = " ".join(recorded), " ".join(other)
    return (one, two) if one != two and max(len(one), len(two)) <= LONGEST_NAME else ("the run's", "the other")
