"""The rules for supervised training: its data sets, what is trained of them, and what makes sense without a sampling policy."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from rlx.config.rules import Show, declared, rule, target_name
from rlx.config.schema import SftRoot

FILES = (".jsonl", ".ndjson", ".parquet")


@rule("data")
def data_sets(cfg: SftRoot, of: Show) -> Iterator[str]:
    data = cfg.data
    if data.type == "fake":
        for key in ("name", "sets"):
            if getattr(data, key):
                yield f"random tokens come from no data set: {of('data.type')} with {of(f'data.{key}')}.\nRemove one of the two."
        return
    if not data.all_sets:
        yield (
            "there is nothing to train on. Name a data set: data.name=FILE (JSONL or Parquet), a folder, or a name on the hub; "
            "or data=fake for random tokens."
        )
    if data.name is not None and "data" in data.sets:
        yield f"data.sets.data and {of('data.name')} would have one name, `data`. Rename the first: data.sets.NAME."
    if data.name is not None:
        yield from _missing("data.name", data.name, of)
    for key, each in data.sets.items():
        yield from _missing(f"data.sets.{key}.name", each.name, of)


@rule("val.name")
def validation_set(cfg: SftRoot, of: Show) -> Iterator[str]:
    if cfg.val.name is not None:
        yield from _missing("val.name", cfg.val.name, of)


def is_file_or_folder(name: str) -> bool:
    """Whether the name of a data set can only be a path, or a pattern of paths."""
    return glob.has_magic(name) or name.startswith(("/", "./", "../", "~")) or Path(name).suffix in FILES or name.count("/") > 1


def _missing(key: str, name: str, of: Show) -> Iterator[str]:
    """A problem if `name` can only be a path, and nothing is there."""
    path = Path(name).expanduser()
    if glob.has_magic(name):
        if not glob.glob(str(path), recursive=True):
            yield f"no file matches {of(key)}; the current directory is {Path.cwd()}. Correct the pattern."
    elif is_file_or_folder(name) and not path.exists():
        yield f"the data set does not exist: {of(key)}; the current directory is {Path.cwd()}. Correct the path."


@rule("data.loss_mask")
def something_is_trained(cfg: SftRoot, of: Show) -> Iterator[str]:
    if not cfg.data.loss_mask.roles:
        yield f"no message would be trained: {of('data.loss_mask.assistant')}, and no other role is on. Set data.loss_mask.assistant=true."


@rule("data", "loss")
def no_sampling_policy(cfg: SftRoot, of: Show) -> Iterator[str]:
    if declared(cfg.loss).uses_ratio:
        yield (
            f"the objective {target_name(cfg.loss)} weighs tokens by a ratio against the policy that sampled them, but no policy sampled "
            "these rows. Use loss=sft."
        )


@rule("data", "bench", "val.name")
def bench_on_random_tokens(cfg: SftRoot, of: Show) -> Iterator[str]:
    if cfg.bench and cfg.data.type != "fake":
        yield f"a benchmark trains on random tokens: {of('bench')} with {of('data.type')}. Use data=fake, and data.length for the lengths."
    if cfg.bench and cfg.val.name is not None:
        yield f"a benchmark measures the trainer alone: {of('bench')} with {of('val.name')}. Remove one of the two."
