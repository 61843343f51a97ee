"""What `rlx env check` shows: the phases while it plays, then the facts and the verdict."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.cli.playing import PlayDisplay
from rlx.started import program

if TYPE_CHECKING:
    from rlx.rollout.worth import Assessment, Verdict

OF_A_CHECK = ("num_examples", "rollouts_per_example", "orchestrator.max_retries", "orchestrator.max_error_rate", "run.name", "run.dir")


class CheckDisplay(PlayDisplay):
    """See `PlayDisplay`. After `close`, `facts` and `verdict` hold the result, if there is one."""

    def __init__(self, run_dir: Path | str, cfg: Any, env: str, given: Sequence[str]) -> None:
        """`env`: the environment's name in the configuration. `given`: what the user set."""
        super().__init__(run_dir, cfg, given)
        self.env = env
        self.facts: Assessment | None = None
        self.verdict: Verdict | None = None
        self.file: Path | None = None  # with the rollouts

    def summary(self, exit_code: int) -> str:
        """The facts and the verdict; without results, that there are none."""
        from rlx.rollout.results import RESULTS, read_results
        from rlx.rollout.worth import assess, judge

        file = self.paths.evaluation_of(self.env, self.cfg.model.name, 0) / RESULTS
        if exit_code != 0 or not file.is_file():
            return f"\n{self.cfg.envs[self.env].id} was not played to the end; logs: {self.paths.latest_logs}"
        self.file = file
        self.facts = assess(read_results(file))
        own = self.cfg.envs[self.env]
        self.verdict = judge(self.facts, own.sampling.max_tokens or self.cfg.sampling.max_tokens)
        head = f"\n{own.id} with {self.cfg.model.name}: {self.facts.examples} examples × {self.facts.per_example} rollouts"
        lines = [head, *facts_in_words(self.facts), "", *verdict_in_words(self.verdict)]
        if self.verdict.worth:
            lines.append(f"  next       {train_command(self.env, self.cfg.envs[self.env].id, self.argv)}")
        return "\n".join([*lines, f"  rollouts   {file}"])


def facts_in_words(facts: Assessment) -> list[str]:
    """One line for each kind of fact."""
    lines = []
    if facts.baseline is not None:
        base = facts.baseline
        lines.append(f"  baseline   {base.mean:.3f}, 95 % interval {base.low:.3f} to {base.high:.3f}")
        hidden = ("reward_error", "requests_beside", "num_turns")
        named = [f"{name} {value:.3g}" for name, value in facts.by_function.items() if name not in hidden]
        lines += [f"  functions  {' · '.join(named)}"] if named else []
        low, high = facts.scale
        ends = f"{facts.equal_low:.0%} all {low:g}" + (f", {facts.equal_high:.0%} all {high:g}" if low < high else "")
        lines.append(f"  groups     rewards differ in {facts.differing:.0%} of {facts.groups} (mean deviation {facts.spread:.3f}); {ends}")
    lines.append(f"  failed     {facts.failed:.0%}" + "".join(f" · {one.cause} {one.count}" for one in facts.failures))
    lines += [f"             {one.cause}: {one.first}" for one in facts.failures]
    if facts.baseline is None:
        return lines
    if facts.reward_errors:
        lines.append(f"  rewards    a function raised in {facts.reward_errors:.0%}: {facts.first_reward_error}")
    lines.append(f"  truncated  {facts.truncated:.0%}")
    for one in facts.turns:
        label = "tokens" if one.turn == 1 else ""
        share = "" if one.rollouts == facts.scored else f"   in {one.rollouts / facts.scored:.0%} of the rollouts"
        lines.append(f"  {label:9}  turn {one.turn}: {one.prompt:.0f} of prompt, {one.sampled:.1f} sampled{share}")
    total = sum(facts.seconds.values())
    if total:
        parts = " · ".join(f"{'rewards' if part == 'scoring' else part} {seconds / total:.0%}" for part, seconds in facts.seconds.items())
        lines.append(f"  time       {total:.3g} s a rollout: {parts}")
    return lines


def verdict_in_words(verdict: Verdict) -> list[str]:
    """The verdict, its reasons and the notes."""
    head = "worth training on" if verdict.worth else "not worth training on as it is" if verdict.playable else "not playable"
    return [f"  {head}:", *(f"    {reason}" for reason in verdict.reasons), *(f"    note: {note}" for note in verdict.notes)]


def train_command(env: str, env_id: str, given: Sequence[str]) -> str:
    """The command that trains on the environment, with those settings of the check that `rlx train` has, too."""
    from rlx.config.roots import TRAIN, has_key
    from rlx.config.shipped import LANGUAGE_MODEL, shipped_groups

    groups = {*shipped_groups(), "env"}
    of_an_endpoint = any(word.startswith("client.") for word in given)  # its model is not one that can be trained here
    kept = [
        word
        for word in given
        if (key := word.partition("=")[0].lstrip("+")) not in OF_A_CHECK
        and (key in groups or key.startswith(("env.", "envs.")) or has_key(TRAIN.schema, key))
        and not key.endswith((".split", ".num_examples"))
        and not (of_an_endpoint and key.partition(".")[0] == "model")
    ]
    if of_an_endpoint and not any(word.startswith("model=") for word in kept):
        kept.append(LANGUAGE_MODEL)  # an endpoint's model is seldom one that the default could replace
    chosen = [f"env={env}", *([f"envs.custom.id={env_id}"] if env == "custom" else [])]
    return f"{program()} {shlex.join([*chosen, *kept])}"
