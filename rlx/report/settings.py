"""Groups the runs of a sweep by what was varied. Runs of one setting differ only in their seed, so they are draws of one distribution.

What differs is read from the configurations, not from folder names, so it works on any folder of runs. Knows no HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.report.gather import Facts
from rlx.report.statistics import Interval, iqm_interval, mean_interval

SEED = "seed"
NOT_A_SETTING = ("run.", "dry_run", "clean", "resume", "logger.", "launcher.", "slurm.", SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The runs with one configuration apart from the seed."""

    label: str  # the varied overrides: `loss=gspo, optim.lr=1e-4`
    choices: Mapping[str, str]  # varied override -> its value here; without the seed
    leaves: Mapping[str, Any]  # the configuration's leaves that differ between settings
    runs: Sequence[Facts]

    @property
    def with_seeds(self) -> list[tuple[Any, Facts]]:
        """Every run with its seed; one whose configuration cannot be read is a draw of its own."""
        return [(facts.config[SEED] if facts.config is not None else f"run {place}", facts) for place, facts in enumerate(self.runs)]

    @property
    def by_seed(self) -> dict[Any, float]:
        """Final scores of the completed runs by seed: runs of one seed and one code are one draw, of which this is the mean."""
        found: dict[Any, list[float]] = {}
        for seed, facts in self.with_seeds:
            if facts.ended_well and facts.score is not None:
                found.setdefault(seed, []).append(facts.score)
        return {seed: sum(scores) / len(scores) for seed, scores in found.items()}

    @property
    def scored(self) -> list[float]:
        """The scores of `by_seed`."""
        return list(self.by_seed.values())

    def minus(self, other: Setting) -> Interval | None:
        """The mean difference of the scores of common seeds, this setting minus the other; `None` without a common seed."""
        mine, theirs = self.by_seed, other.by_seed
        common = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        return mean_interval(common) if common else None

    @property
    def iqm(self) -> Interval | None:
        """Of the completed runs; `None` without one."""
        return iqm_interval(self.scored) if self.scored else None

    @property
    def repeated_seeds(self) -> list[Any]:
        """Seeds of more than one run: such runs are not independent."""
        seeds = Counter(facts.config[SEED] for facts in self.runs if facts.config is not None)
        return [seed for seed, count in seeds.items() if count > 1]


@dataclass(kw_only=True)
class SweepRuns:
    """Runs by setting, best first; settings without a score last."""

    settings: list[Setting] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # varied overrides, without the seed
    leaves: list[str] = field(default_factory=list)  # leaves of the configuration that differ, without the seed


def arrange(found: Sequence[Facts]) -> SweepRuns:
    """The settings of a sweep."""
    configs = [facts.config for facts in found if facts.config is not None]
    names = dict.fromkeys(name for config in configs for name in config if not name.startswith(NOT_A_SETTING))
    differ = [name for name in names if len({repr(config.get(name, "absent")) for config in configs}) > 1]
    overrides = [overrides_of(facts) for facts in found]
    asked = dict.fromkeys(key for each in overrides for key in each if not key.startswith(NOT_A_SETTING))
    keys = [key for key in asked if len({each.get(key) for each in overrides}) > 1]

    together: dict[Any, list[int]] = {}
    for place, facts in enumerate(found):
        mark: tuple[Any, ...]
        if facts.config is not None:
            mark = tuple(repr(facts.config.get(name, "absent")) for name in differ)
        else:  # an unreadable configuration equals another one only if the overrides do
            varied = tuple(sorted(item for item in overrides[place].items() if not item[0].startswith(NOT_A_SETTING)))
            mark = ("unreadable", varied or facts.name)
        together.setdefault(mark, []).append(place)
    settings = []
    for places in together.values():
        first = found[places[0]]
        choices = {key: overrides[places[0]].get(key, "(default)") for key in keys}
        leaves = {name: first.config.get(name, "absent") for name in differ} if first.config is not None else {}
        label = ", ".join(f"{key}={value}" for key, value in choices.items() if value != "(default)")
        if first.config is None:
            label = f"{label or first.name} (configuration not readable)"
        label = label or ("default" if keys else "all runs")
        settings.append(Setting(label=label, choices=choices, leaves=leaves, runs=[found[place] for place in places]))
    settings = _distinct(settings)
    settings.sort(key=lambda setting: -(iqm.value if (iqm := setting.iqm) is not None else float("-inf")))
    return SweepRuns(settings=settings, keys=keys, leaves=differ)


def overrides_of(facts: Facts) -> dict[str, str]:
    """The overrides of a run's command line by key; the last one wins."""
    parts = (line.lstrip("+~").partition("=") for line in facts.overrides)
    return {key: value for key, _, value in parts}


def _distinct(settings: Sequence[Setting]) -> list[Setting]:
    """Add differing leaves to the labels of settings with equal overrides (other files, another version)."""
    count = Counter(setting.label for setting in settings)
    found = []
    for setting in settings:
        if count[setting.label] > 1 and setting.leaves:
            alike = [other for other in settings if other.label == setting.label]
            telling = [name for name in setting.leaves if len({repr(other.leaves.get(name)) for other in alike}) > 1]
            more = ", ".join(f"{name}={setting.leaves[name]}" for name in telling[:3])
            label = more if setting.label in ("all runs", "default") else f"{setting.label}, {more}"
            setting = Setting(label=label, choices=setting.choices, leaves=setting.leaves, runs=setting.runs)
        found.append(setting)
    return found
