"""The rules for environments in processes of their own."""

from __future__ import annotations

import sys

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose(["env=reverse_text", *overrides])
    return str(raised.value)


def test_another_python_needs_a_worker() -> None:
    said = problems(f"envs.reverse_text.python={sys.executable}", "envs.reverse_text.workers=0")
    assert "has no workers" in said
    assert "Set envs.reverse_text.workers=1" in said


def test_an_evaluation_without_workers_names_the_section_that_chose_the_python() -> None:
    said = problems(f"envs.reverse_text.python={sys.executable}", "eval.interval=5", "eval.envs.reverse_text.workers=0")
    assert f"envs.reverse_text.python={sys.executable} needs a process of its own, but eval.envs.reverse_text has no workers." in said
    assert "Set eval.envs.reverse_text.workers=1 or more, or remove envs.reverse_text.python." in said
    own = problems(f"eval.envs.reverse_text.python={sys.executable}", "eval.interval=5", "eval.envs.reverse_text.workers=0")
    assert "or remove eval.envs.reverse_text.python." in own


def test_another_python_must_be_a_program() -> None:
    assert "is no program that can be run here" in problems("envs.reverse_text.python=/nowhere/bin/python")


def test_an_environment_of_another_python_need_not_be_installed_here_but_for_the_warm_start() -> None:
    elsewhere = [f"envs.reverse_text.python={sys.executable}", "envs.reverse_text.id=not-installed-here"]
    assert "the warm start reads the examples of its environments in the run's own Python" in problems(*elsewhere, "model=tiny")
    assert compose(["env=reverse_text", *elsewhere, "model=smollm2_135m"]).cfg.envs["reverse_text"].python == sys.executable
