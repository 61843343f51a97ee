"""No secret in an open key, where it would be written in clear."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.config.checks import check
from rlx.config.load import compose
from rlx.config.schema import Config

SECRET = "hidden-12345"
TOKEN = "hf_" + "abcdefgh" * 4 + "xy"


def said(cfg: Config) -> str:
    return "\n".join(problem.text for problem in check(cfg) if "would be written" in problem.text)


def with_arguments(**arguments: Any) -> Config:
    cfg = compose([], {}).cfg
    cfg.envs["reverse_text"].args.update(arguments)
    return cfg


@pytest.mark.parametrize(
    "arguments",
    [
        {"api_key": SECRET},
        {"judge": {"openai_api_key": SECRET}},
        {"aws_secret_access_key": SECRET},
        {"client_secret": SECRET},
        {"db_password": SECRET},
        {"headers": {"Authorization": SECRET}},
        {"token": TOKEN},
        {"anything": [f"Bearer {SECRET}"]},
        {"endpoint": f"http://me:{SECRET}@host"},
    ],
)
def test_a_secret_among_an_environments_arguments_is_refused_and_not_shown(arguments: dict[str, Any]):
    found = said(with_arguments(**arguments))
    assert f"envs.reverse_text.args.{next(iter(arguments))}" in found
    assert SECRET not in found
    assert TOKEN not in found


@pytest.mark.parametrize(
    "arguments",
    [
        {"answer_key": "answer"},
        {"pad_token": "</s>"},
        {"judge_api_key_var": "MY_KEY"},
        {"judge_api_key": "OPENAI_API_KEY"},
        {"api_key": "EMPTY"},
        {"api_key": "sk-no-key-required"},
        {"secret": "apple"},
        {"model": "hf_checkpoint_of_today"},
        {"model": "sk-learns-everything-well"},
        {"system_prompt": "KEY=5 opens http://a:b@c"},
        {"url": "http://host:8000/v1"},
    ],
)
def test_names_that_only_look_like_secrets_are_accepted(arguments: dict[str, Any]):
    assert not said(with_arguments(**arguments))


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        (f"module load x; export HF_TOKEN={SECRET}", "HF_TOKEN in slurm.setup"),
        (f"export HTTPS_PROXY=http://me:{SECRET}@proxy", "slurm.setup"),
        ("export OPENAI_API_KEY=EMPTY", ""),
        ("export HF_TOKEN=$(cat ~/.hf_token)", ""),
        ("export HF_TOKEN_PATH=/home/me/token", ""),
        ("export VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD=1024", ""),
        ("export HF_HUB_DISABLE_IMPLICIT_TOKEN=1 KEY_CACHE_DTYPE=fp8", ""),
        ("export SSH_KEY=~/.ssh/id", ""),
        ("export TOKENIZERS_PARALLELISM=false", ""),
    ],
)
def test_a_secret_in_a_shell_line_is_refused(line: str, refused: str):
    cfg = compose([], {}).cfg
    cfg.slurm.setup = [line]
    assert refused in said(cfg)
    assert bool(said(cfg)) == bool(refused)
    assert SECRET not in said(cfg)


def test_secrets_in_the_options_of_a_job_in_vllms_arguments_and_in_addresses_are_refused():
    cfg = compose([], {}).cfg
    assert not said(cfg)
    cfg.slurm.options = {"export": f"ALL,HF_TOKEN={SECRET}"}
    cfg.inference.vllm = {"hf_token": SECRET}
    cfg.inference.base_url = [f"http://me:{SECRET}@{host}:8000" for host in ("one", "two")]
    found = said(cfg)
    for place in ("HF_TOKEN in slurm.options.export", "inference.vllm.hf_token", "the address of inference.base_url"):
        assert found.count(place) == 1
    assert SECRET not in found
