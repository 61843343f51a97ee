"""Asks whether the data sets of a supervised run can be opened and read, before anything starts.

It opens each data set and reads its first row, as the trainer will. A data set of the hub is downloaded here, so that compute nodes
need not. What a chat template makes of the rows is the trainer's to say: rendering takes transformers, which this floor does not import.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.schema import SftRoot
from rlx.config.schema_sft import DataSetConfig


def resolve(cfg: SftRoot) -> SftRoot:
    """The configuration with absolute paths of data sets. Raises ConfigError if one cannot be read."""
    try:
        val = replace(cfg.val, name=cfg.val.name and absolute(cfg.val.name))
        cfg = replace(cfg, data=cfg.data.with_sets(absolute), val=val)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print("".join(f"{line}\n" for line in check_rows(cfg)), end="", flush=True)
    return cfg


def absolute(name: str) -> str:
    """A path as an absolute path, so that every process finds it; a name on the hub as it is."""
    from rlx.data.rows import files_of

    return str(Path(name).expanduser().absolute()) if files_of(name) is not None else name


def check_rows(cfg: SftRoot) -> list[str]:
    """What the data sets are, one line each. Raises ConfigError if one cannot be opened, or its first row is no conversation."""
    sets = {f"data.{'name' if key == 'data' else f'sets.{key}'}": each for key, each in cfg.data.all_sets.items()}
    if cfg.val.name is not None:
        sets["val.name"] = DataSetConfig(name=cfg.val.name, subset=cfg.val.subset, split=cfg.val.split)
    from rlx.data.conversations import RowError, read_conversation
    from rlx.data.rows import HubNotReached, open_rows

    lines, problems = [], []
    for key, each in sets.items():
        try:
            rows = open_rows(each.name, subset=each.subset, split=each.split)
            where = rows.where(0)
            first = read_conversation(rows[0], fills=rows.fills)
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
    return lines


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
