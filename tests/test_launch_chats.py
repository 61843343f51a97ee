"""A model whose chat format loses the tools of an environment is refused before anything starts; a template of one's own is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import HERMES, PLAIN, small_tokenizer
from test_policy_chat import model_config

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.envs.probe import Probed
from rlx.launch.chats import check_chats
from rlx.policy.probe import problem_of
from rlx.policy.templates import tokenizer_of
from rlx.roles import prepare
from rlx.weights.files import ModelFiles

TOOLS = {"sums": ["add", "subtract"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer whose template ignores tools."""
    path = tmp_path_factory.mktemp("model")
    small_tokenizer(PLAIN).save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "hermes.jinja"
    path.write_text(HERMES)
    return path


def test_a_template_of_ones_own_makes_the_model_fit(folder: Path, template: Path) -> None:
    model = model_config()
    model.name = str(folder)
    assert "it ignores tools: the prompt does not name add, subtract" in str(problem_of(model, TOOLS))
    assert problem_of(model, {}) is None
    model.chat_template = str(template)
    assert problem_of(model, TOOLS) is None
    assert tokenizer_of(str(folder), model).chat_template == HERMES
    model.name = "not/here"
    assert problem_of(model, TOOLS) is None, "a tokenizer that is not on this machine is checked later"


def test_published_folders_have_the_template(template: Path) -> None:
    files = ModelFiles({"config.json": b"{}"}).with_chat_template(str(template)).files
    assert files == {"config.json": b"{}", "chat_template.jinja": HERMES.encode()}


def test_a_template_of_ones_own_is_another_warm_start(template: Path) -> None:
    recipes = [prepare.recipe(compose(["hardware=cpu", *extra], {}).cfg) for extra in ([], [f"model.chat_template={template}"])]
    assert recipes[0] != recipes[1]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_is_refused_before_it_starts_and_its_process_is_asked_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cfg = compose(["model=smollm2_135m", f"model.name={folder}", "hardware=cpu", "dry_run=true"], {}).cfg
    found = {"sums": Probed(kind="classic", examples=4, tools=("add",)), "plain": Probed(kind="classic", examples=4)}
    with pytest.raises(ConfigError) as caught:
        check_chats([cfg, cfg], [found, found])
    assert len(caught.value.problems) == 1
    assert "envs.sums: it loses the model's own tool call" in caught.value.problems[0]
    check_chats([cfg], [{"plain": found["plain"]}])
