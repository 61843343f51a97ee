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
tokens that differ most. Nothing of the run changes; tokens.csv and summary.json are written to RUN/replays/. docs/replay.md
explains the numbers and both files.

The policy comes from weights/step_N or, if that is gone, from the nearest checkpoint and the recorded steps after it.
One process in float32. --device cuda: on one GPU. To train a whole run again: rlx train replay=RUN"""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError
    from rlx.runs.run import Run

    options, places, overrides = _read(argv)
    if len(places) != 1 or "--step" not in options or not options["--step"].isdecimal() or not options["--top"].isdecimal():
        print("usage: rlx replay RUN --step N loss=OPTION [key=value …]. See rlx replay --help.", file=sys.stderr)
        return 2
    from rlx.config.rules import target_name
    from rlx.report.tokens import as_text, checks, names_of, summary, write
    from rlx.runs.one_step import changes, label_of, other_objective, policy_of

    found, step = Run.open(Path(places[0]).expanduser()), int(options["--step"])
    recorded, other, notes = other_objective(found, overrides)
    policy = policy_of(found, recorded, other, step)
    folder = Path(options["--out"]).expanduser() if "--out" in options else found.paths.replay_of(step, label_of(overrides))
    if options["--device"] not in ("cpu", "cuda"):
        raise ConfigError(f"--device={options['--device']} must be cpu or cuda.")

    from rlx.process import set_cpu_threads

    set_cpu_threads(recorded.hardware.cpu_threads)  # before numeric libraries are loaded
    from rlx.train.compare import Begin, compare, set_up_torch, texts

    set_up_torch(options["--device"], recorded.hardware.cpu_threads)
    record = _record(found, step)
    begin = Begin(model=policy.model, step=policy.step, checkpoint=policy.checkpoint, reference=policy.initial)
    try:
        compared = compare(
            recorded,
            other,
            found.paths,
            begin,
            step,
            device=options["--device"],
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
    if ran != ("float32", options["--device"]):
        here = f"computed in float32 on {options['--device']}"
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
    words = texts(policy.model, _ids(compared), trust_remote_code=recorded.model.trust_remote_code)
    content = summary(compared, words, facts, int(options["--top"]))
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


def _read(argv: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Options, places and overrides."""
    options, waiting = {"--top": str(TOP), "--device": "cpu"}, list(argv)
    places: list[str] = []
    overrides: list[str] = []
    folders = [part for part in argv if "=" in part and Path(part).expanduser().is_dir()]  # of a sweep: `loss=grpo,seed=1`
    while waiting:
        part = waiting.pop(0)
        name, equals, value = part.partition("=")
        if name in ("--step", "--out", "--top", "--device"):
            options[name] = value if equals else waiting.pop(0) if waiting else ""
        elif part in ("--config-dir", "--config-path"):
            overrides += [part, *waiting[:1]]
            waiting = waiting[1:]
        elif part.startswith("--") or (equals and (places or part not in folders)):
            overrides.append(part)
        else:
            places.append(part)
    return options, places, overrides


def _record(found: Any, step: int) -> dict[str, Any] | None:
    """What the trainer recorded of the step."""
    return found.history.records["trainer"].get(step)


def _ids(compared: Any) -> Any:
    import numpy as np

    return np.concatenate([sample.token_ids for sample in compared.samples])
