"""`model.chat_template_kwargs` and `model.chat_template`: what a template gets besides the conversation, and what is refused beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import HERMES, STRIPPING, small_tokenizer
from test_policy_chat import ADD, model_config, turn_of
from traces import tokens_of

from rlx.config.chat_format import arguments_of
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.policy.chat import Chat, load_chat
from rlx.policy.probe import problem_of
from rlx.train import warm_start

# As Qwen3's: with enable_thinking=false the prompt ends with an empty reasoning.
SWITCHED = STRIPPING.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}\n",
    "'<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}\n",
)
USER = {"role": "user", "content": "add two and three"}


def composed(tmp_path: Path, template: str, *argv: str) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    compose(["model=qwen3_0_6b", "hardware=cpu", f"model.chat_template={file}", *argv], {})


def test_every_prompt_gets_the_arguments_and_the_answer_is_read_as_they_say() -> None:
    model = model_config()
    model.chat_template_kwargs = {"enable_thinking": False}
    tokenizer = small_tokenizer(SWITCHED)
    without, thinks = load_chat(tokenizer, model), Chat(tokenizer)
    empty = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(without.render([USER])).endswith(empty)
    assert empty not in tokenizer.decode(thinks.render([USER]))
    assert tokenizer.decode(without.render([USER], [ADD])).endswith(empty)
    assert without.transcript([USER]) == thinks.transcript([USER])
    prompt = without.render([USER])
    said = without.parse(turn_of(prompt, tokenizer.encode("it is five<|im_end|>")))
    assert (said.content, said.reasoning) == ("it is five", None)
    later = without.extend(
        *tokens_of(turn_of(prompt, tokenizer.encode("five<|im_end|>"))), [USER, {"role": "assistant", "content": "five"}], [USER]
    )
    assert tokenizer.decode(later).endswith(empty), "also in the next turn"


def test_an_argument_that_nothing_reads_is_refused_where_the_template_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names enable_thinkng, but the chat template does not read it: .* It reads enable_thinking"):
        Chat(small_tokenizer(SWITCHED), arguments={"enable_thinkng": False})
    small_tokenizer(SWITCHED).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = model_config()
    model.name, model.chat_template_kwargs = str(tmp_path), {"enable_thinkng": False}
    assert "does not read it" in str(problem_of(model, {})), "before the run starts, if the tokenizer is on this machine"


@pytest.mark.parametrize(
    ("template", "argv", "says"),
    [
        (HERMES + "{% if x %}", "", r"the chat template cannot be read \(line \d+: .*\): model.chat_template=.*mine.jinja"),
        (SWITCHED, "+model.chat_template_kwargs.enable_thinkng=false", r"does not read enable_thinkng, .*\n.*it reads enable_thinking"),
        (HERMES, "+model.chat_template_kwargs.enable_thinking=false", r"does not read enable_thinking, .*\n.*it reads none"),
        (SWITCHED, "+model.chat_template_kwargs.tools=null", r"does not read tools"),
    ],
)
def test_a_template_that_does_not_fit_is_a_config_error(tmp_path: Path, template: str, argv: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        composed(tmp_path, template, *argv.split())


def test_what_transformers_adds_to_jinja_is_valid(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if deep %}{% break %}{% endif %}{% endfor %}"
    composed(tmp_path, template, "+model.chat_template_kwargs.deep=true")
    assert arguments_of(template) == {"deep"}


@pytest.mark.slow
def test_a_renderer_takes_the_arguments_that_its_family_has() -> None:
    compose(["model=qwen3_0_6b", "hardware=cpu", "+model.chat_template_kwargs.enable_thinking=false"], {})
    with pytest.raises(ConfigError, match=r"does not read date_string, .*\n.*it reads enable_thinking"):
        compose(["model=qwen3_0_6b", "hardware=cpu", "+model.chat_template_kwargs.date_string=x"], {})


def test_the_tiny_models_template_takes_none_and_other_arguments_are_another_warm_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not read enable_thinking"):
        compose(["hardware=cpu", "+model.chat_template_kwargs.enable_thinking=false"], {})
    file = tmp_path / "mine.jinja"
    file.write_text(SWITCHED)
    argv = ["hardware=cpu", f"model.chat_template={file}"]
    recipes = [warm_start.recipe(compose([*argv, *more], {}).cfg) for more in ([], ["+model.chat_template_kwargs.enable_thinking=false"])]
    assert recipes[0] != recipes[1]
