"""No secret in an open key, where it would be written in clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlx.config.checks import check
from rlx.config.load import compose
from rlx.config.schema import Config

SECRET = "hidden-1"
PLACES: dict[str, Callable[[Config], Any]] = {
    "inference.vllm.hf_token": lambda cfg: cfg.inference.vllm.update(hf_token=SECRET),
    "envs.reverse_text.args.judge.api_key": lambda cfg: cfg.envs["reverse_text"].args.update(judge={"api_key": SECRET}),
    "HF_TOKEN in slurm.setup": lambda cfg: cfg.slurm.setup.append(f"module load x; export HF_TOKEN={SECRET}"),
    "the address of inference.base_url": lambda cfg: cfg.inference.base_url.append(f"http://me:{SECRET}@host:8000"),
}


def said(cfg: Config) -> str:
    return "\n".join(problem.text for problem in check(cfg) if "would be written" in problem.text)


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_in_an_open_key_is_refused_and_not_shown(place: str):
    cfg = compose([], {}).cfg
    assert not said(cfg)
    PLACES[place](cfg)
    assert place in said(cfg)
    assert SECRET not in said(cfg)


def test_names_that_only_look_like_secrets_and_references_to_secrets_are_accepted():
    cfg = compose([], {}).cfg
    names = {"answer_key": "answer", "pad_token": "</s>", "api_key_var": "A_KEY", "api_key": "EMPTY", "system_prompt": "KEY=5 opens it"}
    cfg.envs["reverse_text"].args.update(names)
    cfg.slurm.setup = ["export HF_TOKEN=$(cat ~/.hf_token)", "export TOKENIZERS_PARALLELISM=false"]
    assert not said(cfg)
