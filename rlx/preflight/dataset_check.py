"""Asks whether the data sets of a supervised run can be opened and read, before anything starts.

It opens each data set and reads some of its rows, as the trainer will. A data set of the hub is downloaded here, so that compute nodes
need not. What a chat template makes of the rows is the trainer's to say: rendering takes transformers, which this floor does not import.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.schema import SftRoot
from rlx.config.schema_sft import DataSetConfig

LOOKS = 64  # rows of a data set that are read, from its first on, equally far from each other


def resolve(cfg: SftRoot) -> SftRoot:
    """The configuration with absolute paths of data sets. Raises ConfigError if one cannot be read."""
    try:
        val = replace(cfg.val, name=cfg.val.name and absolute(cfg.val.name))
        cfg = replace(cfg, data=cfg.data.with_sets(absolute), val=val)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lines, rows = check_rows(cfg)
    print("".join(f"{line}\n" for line in lines), end="", flush=True)
    if cfg.data.epochs is None:
        return cfg
    if not rows:
        raise ConfigError(f"data.epochs={cfg.data.epochs:g} counts passes over data sets, but there are none\n  fix: set max_steps instead")
    return replace(cfg, max_steps=max(1, math.ceil(cfg.data.epochs * rows / cfg.data.batch_size)))


def absolute(name: str) -> str:
    """A path as an absolute path, so that every process finds it; a name on the hub as it is."""
    from rlx.data.rows import files_of

    return str(Path(name).expanduser().absolute()) if files_of(name) is not None else name


def check_rows(cfg: SftRoot) -> tuple[list[str], int]:
    """What the data sets are, one line each, and how many rows are trained on.

    Raises ConfigError if one cannot be opened, or its first row is no conversation, or, where such rows are not skipped, another of those
    that are looked at.
    """
    sets = {f"data.{'name' if key == 'data' else f'sets.{key}'}": each for key, each in cfg.data.all_sets.items()}
    if cfg.val.name is not None:
        sets["val.name"] = cfg.data.like(cfg.val)
    from rlx.data.conversations import RowError, read_conversation
    from rlx.data.rows import HubNotReached, open_rows

    lines, problems, trained = [], [], 0
    for key, each in sets.items():
        try:
            rows = open_rows(each.name, subset=each.subset, split=each.split)
            trained += len(rows) if key != "val.name" else 0
            looked_at = {0} if cfg.data.on_bad_row == "skip" else {number * len(rows) // LOOKS for number in range(LOOKS)}
            for number in sorted(looked_at, reverse=True):
                where = rows.where(number)
                first = read_conversation(rows[number], fills=rows.fills, columns=each.columns)
        except RowError as error:
            problems.append(f"{key}: {where} cannot be trained on: {error}\n  fix: correct the data set (docs/sft.md), or name another")
        except HubNotReached as error:
            problems.append(
                f"{key}: {error}.\n  fix: rlx fetch sft, with the same arguments, where there is internet; or name a file or folder"
            )
        except ValueError as error:
            problems.append(f"{key}: {error}\n  fix: correct the name, or its subset and split")
        else:
            form = f"prompt of {first.first} messages, completion" if first.first else f"{len(first.messages)} messages"
            form += ", tools" if first.tools else ""
            lines.append(f"{key}: {len(rows):,} rows of {each.name}; the first: {form}")
            twins = [twin for twin in sets if key == "val.name" and twin != key and _overlap(sets[twin], each)]
            lines += [f"warning: {twin} has the rows of {key}, too, so val/loss does not measure held-out rows" for twin in twins]
    if problems:
        raise ConfigError(problems)
    return lines, trained


def _overlap(trained: DataSetConfig, held_out: DataSetConfig) -> bool:
    """Whether the two have rows in common, as far as their names say. Two different parts of one split may be apart."""
    from rlx.data.rows import files_of

    one, other = files_of(trained.name), files_of(held_out.name)
    if one is not None and other is not None:
        same = bool({file.resolve() for file in one} & {file.resolve() for file in other})
    else:
        same = (trained.name, trained.subset) == (held_out.name, held_out.subset)
    splits = [trained.split, held_out.split]
    apart = splits[0] != splits[1] and all("[" in split for split in splits)
    return same and not apart and len({split.partition("[")[0] for split in splits}) == 1
