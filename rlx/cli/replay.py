"""`rlx replay RUN --step N loss=gspo`: what another objective would have done with every token of a recorded step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SUMMARY = "one recorded step under another objective: weights of every token"
TOP = 10  # largest differences shown


def help_text() -> str:
    return f"""\
rlx replay: {SUMMARY}.

usage: rlx replay RUN --step N loss=OPTION [loss.KEY=VALUE …] [envs.NAME.loss=OPTION] [ref.KEY=VALUE …]
                  [--out FOLDER] [--top M] [--device cpu|cuda]

  rlx replay outputs/mine --step 12 loss=gspo            the run's objective against gspo
  rlx replay outputs/mine --step 12 loss.eps_high=0.3    against itself with one key changed
  rlx replay outputs/mine --step 12 --config-dir my_conf loss=mine

Both objectives get the recorded batch and the policy of that step, so log-probabilities are equal. The weight of a token is
the factor of ∇log π that an objective gives it. Shown are both gradients, weights by environment and sign of advantage, and the
tokens that differ most. Nothing of the run changes; tokens.csv and summary.json are written to RUN/replays/. docs/resume.md
explains the numbers and both files.

The policy comes from weights/step_N or, if that is gone, from the nearest checkpoint and the recorded steps after it.
One process in float32. --device cuda: on one GPU. To train a whole run again: rlx train replay=RUN"""


def run(argv: list[str]) -> int:
    from rlx.cli.arguments import Parser
    from rlx.config.errors import ConfigError
    from rlx.config.rules import target_name
    from rlx.report.tokens import as_text, checks, names_of, summary, write
    from rlx.runs.replay_setup import changes, label_of, other_objective, policy_of
    from rlx.runs.run import Run

    parser = Parser("replay")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--top", type=int, default=TOP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given, overrides = parser.parse_known_args(argv)
    found, step = Run.open(given.run.expanduser()), given.step
    recorded, other, notes = other_objective(found, overrides)
    policy = policy_of(found, recorded, other, step)
    folder = given.out.expanduser() if given.out is not None else found.paths.replay_of(step, label_of(overrides))

    from rlx.process import set_cpu_threads

    set_cpu_threads(recorded.hardware.cpu_threads)  # before numeric libraries are loaded
    import numpy as np

    from rlx.train.compare import Begin, compare, set_up_torch, texts

    set_up_torch(given.device, recorded.hardware.cpu_threads)
    record = found.history.records["trainer"].get(step)
    begin = Begin(model=policy.model, step=policy.step, checkpoint=policy.checkpoint, reference=policy.initial)
    try:
        compared = compare(
            recorded,
            other,
            found.paths,
            begin,
            step,
            device=given.device,
            beta=record.get("ref/beta") if record is not None else None,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (ValueError, RuntimeError, OSError) as error:
        print(f"rlx: step {step} could not be compared: {error}", file=sys.stderr)
        return 1
    several = recorded.num_updates > 1
    if several:
        took = f"the run took {recorded.num_updates} optimizer steps on this batch"
        notes.append(f"{took}; every mini-batch is compared at the parameters before the first")
    ran = (recorded.model.dtype, recorded.hardware.device)
    if ran != ("float32", given.device):
        here = f"computed in float32 on {given.device}"
        notes.append(f"{here}; the run computed in {ran[0]} on {ran[1]}, so numbers differ by rounding")
    if not any(sample.loss_mask.any() for sample in compared.samples):
        notes.append("the policy sampled no token of this batch, so weights are multiplied by the number of tokens of cross-entropy")
    again = step - policy.step
    where = f"checkpoint {policy.checkpoint.parent.name}" if policy.checkpoint is not None else policy.model
    facts: dict[str, Any] = {
        "run": str(found.root),
        "overrides": overrides,
        "policy": f"policy {step} from {where}" + (f" and {again} step{'s' * (again > 1)} trained again" if again else ""),
        "steps_trained_again": again,
        "changes": {name: list(both) for name, both in changes(recorded, other).items()},
        "notes": notes,
        "checks": checks(compared, record, recorded.trainer.num_iterations),
    }
    words = texts(
        policy.model, np.concatenate([sample.token_ids for sample in compared.samples]), trust_remote_code=recorded.model.trust_remote_code
    )
    content = summary(compared, words, facts, given.top)
    try:
        write(folder, compared, words, content)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}\n  fix: name another folder with --out FOLDER") from error
    asked = [part for part in overrides if "=" in part and not part.startswith("--")]
    print(as_text(content, names_of([target_name(recorded.loss)], asked)))
    print(f"\nwritten: {folder / 'tokens.csv'}, {folder / 'summary.json'}")
    if any(not check["close"] for check in facts["checks"]):
        print("rlx: the run's own objective gives other numbers than the run recorded, so this is not quite its policy", file=sys.stderr)
    return 0
