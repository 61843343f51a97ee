"""The configuration keys of supervised data: what `rlx sft` trains on, and what it validates on. `schema.py` has the keys of training."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass, replace

from rlx.config.keys import MISSING, key, section


@dataclass
class LossMaskConfig:
    """Whose messages are trained. An assistant's are trained as it would sample them; of others the content alone."""

    system: bool = key(False, "train the content of system messages")
    user: bool = key(False, "train the content of user messages")
    assistant: bool = key(True, "train what the assistant says: reasoning, text, tool calls and the end of its turn")
    tool: bool = key(False, "train the content of tools' results")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are trained."""
        return tuple(role for role in ("system", "user", "assistant", "tool") if getattr(self, role))


@dataclass
class DataSetConfig:
    """One of several data sets."""

    name: str = key(MISSING, "JSONL or Parquet file, a pattern of files (`data/*.jsonl`), a folder, or a name on the Hugging Face hub")
    subset: str | None = key(None, "configuration of a data set on the hub")
    split: str = key("train", "split, or a part of it: `train[:1000]`, `train[90%:]`; files have only `train`")
    weight: float = key(1.0, "share of the rows of a batch, relative to the other data sets", above=0)
    columns: dict[str, str] = key({}, "columns of a row's parts, where they have other names: `{prompt: question, completion: answer}`")


@dataclass
class DataConfig:
    """What is trained on: rows with `messages`, or with `prompt` and `completion`, and tools if wanted (docs/sft.md)."""

    type: str = key("sft", "`sft`: rows of data sets; `fake`: random tokens, for benchmarks", choices=("sft", "fake"))
    name: str | None = key(
        None, "JSONL or Parquet file, a pattern of files, a folder, or a name on the Hugging Face hub; null: `data.sets`"
    )
    subset: str | None = key(None, "configuration of a data set on the hub")
    split: str = key("train", "split, or a part of it: `train[:1000]`, `train[90%:]`; files have only `train`")
    columns: dict[str, str] = key({}, "columns of a row's parts, where they have other names: `{prompt: question, completion: answer}`")
    sets: dict[str, DataSetConfig] = key({}, "several data sets by name, instead of `data.name`, mixed by their weights")
    batch_size: int = key(MISSING, "rows per step", low=1)
    epochs: float | None = key(None, "passes over all rows: `max_steps` follows from it; null: from `max_steps`", above=0)
    shuffle: bool = key(True, "shuffle the rows of a set anew for each pass")
    loss_mask: LossMaskConfig = section(LossMaskConfig)
    on_too_long: str = key(
        "drop", "a sample longer than `seq_len` is left out (`drop`) or cut (`truncate`); both are counted", choices=("drop", "truncate")
    )
    on_bad_row: str = key(
        "stop",
        "a row that cannot be marked exactly ends the run with its place and the reason (`stop`), or is left out and counted (`skip`)",
        choices=("stop", "skip"),
    )
    control_tokens: str = key(
        "refuse",
        "text of a row that spells a mark of the chat template (`<|im_end|>`): the row cannot be marked (`refuse`), or an invisible "
        "character breaks the mark up, as in the prompts of environments (`escape`)",
        choices=("refuse", "escape"),
    )
    length: str = key(
        "fixed",
        "data.type=fake: every sample has `seq_len` tokens (`fixed`), or up to that (`variable`)",
        choices=("fixed", "variable"),
    )

    @property
    def all_sets(self) -> dict[str, DataSetConfig]:
        """The data sets by name. The one of `data.name` is called `data`."""
        one = (
            {} if self.name is None else {"data": DataSetConfig(name=self.name, subset=self.subset, split=self.split, columns=self.columns)}
        )
        return one | self.sets

    def like(self, val: ValConfig) -> DataSetConfig:
        """The data set that is validated on. Its rows have the columns of `data`."""
        return DataSetConfig(name=str(val.name), subset=val.subset, split=val.split, columns=self.columns)

    def with_sets(self, change: object) -> DataConfig:
        """A copy with another name for each data set: `change(name)`."""
        assert callable(change)
        sets = {key: replace(each, name=change(each.name)) for key, each in self.sets.items()}
        return replace(self, name=None if self.name is None else change(self.name), sets=sets)


@dataclass
class ValConfig:
    """What is validated on: the loss of the policy on rows that are not trained on."""

    name: str | None = key(None, "data set, as in `data.name`; null: no validation")
    subset: str | None = key(None, "configuration of a data set on the hub")
    split: str = key("train", "split, or a part of it, as in `data.split`")
    interval: int = key(50, "steps between validations; one more is made at the end", low=1)
    num_examples: int | None = key(512, "how many of the first rows to use; null: all", low=1)
    eval_on_start: bool = key(True, "also validate the initial model")
