"""What the files of a model hold beside what is trained. Servers begin with these files, and later versions have only what is trained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlx.inference.server.policy_files import Shapes, check_layers, check_shapes, tensor_shapes


def untrained(folder: Path, hf: Any, published: Iterable[str]) -> tuple[str, ...]:
    """The names of stored tensors that transformers leaves out on purpose: layers that predict further tokens, old tables of positions.

    vLLM leaves them out, too, so servers do without new ones. `hf`: the model that was read from the folder.
    """
    try:
        beside = tensor_shapes(folder).keys() - set(published)
    except ValueError:  # no safetensors: no server of rlx begins with this folder
        return ()
    report = SimpleNamespace(missing_keys=set(), unexpected_keys=set(beside))  # of loading, as transformers would make it
    hf._adjust_missing_and_unexpected_keys(report)
    return tuple(sorted(beside - report.unexpected_keys))


def check_begun(source: str, folder: Path, hf: Any, published: Shapes, left_out: Iterable[str], rank: int | None = None) -> None:
    """Raise ValueError if servers that begin with the files in `folder`, of `source`, would refuse the versions that are trained from it.

    They compare names and shapes at their first update, which is a whole step later. `left_out`: `untrained`. `rank`: that of the adapters,
    if these are trained.
    """
    tied = any(getattr(config, "tie_word_embeddings", False) for config in (hf.config, hf.config.get_text_config()))
    try:
        if rank:
            check_layers("a version", published, tensor_shapes(folder), rank)
        else:
            check_shapes("what is trained", published, tensor_shapes(folder), tied, left_out)
    except ValueError as error:
        raise ValueError(
            f"servers that begin with {source} would refuse every version that is trained: {error}. Convert the model once, "
            f'`AutoModelForCausalLM.from_pretrained("{source}", dtype="auto").save_pretrained(FOLDER)`, save its tokenizer there too, and '
            "set model.name=FOLDER"
        ) from error
