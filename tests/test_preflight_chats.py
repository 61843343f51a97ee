"""A model whose chat format loses the tools of an environment is refused before anything starts; a template of one's own is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_templates import HERMES, PLAIN, small_tokenizer
from test_policy_chat import model_config
from transformers import Qwen3Config

from rlx.config.chat_format import with_absolute_files
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.envs.probe_cache import Probed, ProbedItem
from rlx.policy.chat import load_chat
from rlx.policy.probe import problem_of
from rlx.policy.templates import tokenizer_of
from rlx.preflight.chat_template_check import check_chats
from rlx.train import warm_start
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


def test_a_template_that_ships_is_used_by_its_name(folder: Path) -> None:
    model = model_config()
    model.name, model.chat_template = str(folder), "chatml_tools"
    assert problem_of(model, TOOLS) is None
    chat = load_chat(tokenizer_of(str(folder), model), model)
    assert chat.tool_parser == "pythonic"
    tool = {"type": "function", "function": {"name": "calc", "description": "Calculate.\n\nMore.", "parameters": {"properties": {"x": {}}}}}
    call = {"type": "function", "id": "call00000", "function": {"name": "calc", "arguments": '{"x": "7+2"}'}}
    said = [
        {"role": "user", "content": "7+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "9"},
    ]
    shown = chat.show(said, [tool])
    assert "\ncalc(x): Calculate.\nTo call one" in shown
    assert '<|im_start|>assistant\n[calc(x="7+2")]<|im_end|>\n<|im_start|>user\nResult: 9<|im_end|>\n' in shown
    compose(["model=smollm2_135m", "hardware=cpu", "model.chat_template=chatml_tools"], {})
    assert with_absolute_files(model).chat_template == "chatml_tools"
    assert with_absolute_files(replace(model, chat_template="a.jinja")).chat_template == str(Path.cwd() / "a.jinja")
    with pytest.raises(ConfigError, match=r"model.chat_template=chatml_tool .*\n.*a template of rlx by its name: chatml_tools"):
        compose(["model=smollm2_135m", "hardware=cpu", "model.chat_template=chatml_tool"], {})


def test_published_folders_have_the_template(template: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("the model's own")
    files = ModelFiles.read(tmp_path, SimpleNamespace(config=Qwen3Config()), "float32", chat_template=template).files
    assert files["chat_template.jinja"] == HERMES.encode()


def test_a_template_of_ones_own_is_another_warm_start(template: Path) -> None:
    recipes = [warm_start.recipe(compose(["hardware=cpu", *extra], {}).cfg) for extra in ([], [f"model.chat_template={template}"])]
    assert recipes[0] != recipes[1]


@pytest.mark.parametrize(
    ("part", "said"),
    [("chat_template", "has no chat template, as of a base model"), ("eos_token", "has no eos_token, so no answer would end")],
)
def test_a_tokenizer_without_a_needed_part_is_refused_before_a_server_starts(tmp_path: Path, part: str, said: str) -> None:
    tokenizer = small_tokenizer(PLAIN)
    setattr(tokenizer, part, None)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    cfg = compose(["model=smollm2_135m", f"model.name={tmp_path}", "hardware=cpu", "dry_run=true"], {}).cfg
    with pytest.raises(ConfigError, match=said):
        check_chats([cfg], [{}])


@pytest.mark.slow
@pytest.mark.long
def test_a_run_is_refused_before_it_starts_and_its_process_is_asked_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cfg = compose(["model=smollm2_135m", f"model.name={folder}", "hardware=cpu", "dry_run=true"], {}).cfg
    found = {"sums": Probed(kind="classic", examples=4, tools=(ProbedItem(name="add"),)), "plain": Probed(kind="classic", examples=4)}
    with pytest.raises(ConfigError) as caught:
        check_chats([cfg, cfg], [found, found])
    assert len(caught.value.problems) == 1
    assert "envs.sums: it loses the model's own tool call" in caught.value.problems[0]
    check_chats([cfg], [{"plain": found["plain"]}])
