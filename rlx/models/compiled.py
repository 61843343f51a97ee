"""What torch.compile has made of the layers in this process, by dynamo's own counts."""

from __future__ import annotations

from rlx.models.policy import PolicyModel

LIMIT = "recompile limit exceeded"  # in the reason for which dynamo leaves a function alone


def num_graphs() -> int:
    """Graphs that were compiled so far. A layer is compiled again for rows of another structure, and backward is no graph of its own."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def eager_again() -> bool:
    """Whether this process computes rows of further structures without compilation, because torch has compiled its most."""
    from torch._dynamo.utils import counters

    return any(LIMIT in reason for reason in counters["unimplemented"])


def about_eager_rows(model: PolicyModel) -> str:
    """What the user should know when `eager_again` holds on some rank."""
    from torch._dynamo import config

    fix = "trainer.compile=false" if model.padded else "model.attention=rows (padded rows have one structure), or trainer.compile=false"
    return (
        f"trainer.compile=true: rows of more than {config.recompile_limit} structures came, and torch compiles a layer for no more, so "
        f"others are computed without compilation. Set {fix}; TORCH_LOGS=recompiles shows each reason"
    )
