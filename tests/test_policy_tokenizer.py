"""Tokenizers and chat templates in another process, with the arguments and the day that a run has."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import renderers
from chat_templates import HERMES, STRIPPING, real_template, small_tokenizer
from policy_stand_in import CONTEXT
from test_data_masks import random_conversation
from test_policy_chat import ADD, converse, model_config, turn_of
from test_policy_real_templates import OWN, REFUSED, RENDERERS, SERVED, known
from traces import plain, tokens_of
from transformers import PreTrainedTokenizerFast

from rlx.config.chat_format import arguments_of
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.schema import ModelConfig
from rlx.models.tiny import build_tokenizer
from rlx.policy.chat import Chat, load_chat
from rlx.policy.probe import problem_of
from rlx.policy.spec import chat_of, spec_of
from rlx.policy.templates import CALLING, RETURNED, TOOL
from rlx.policy.tokenizer import WrittenTokenizer, compiled, described, loaded
from rlx.train import warm_start

TEXTS = ("abc", "a , b ! 12", "<|im_start|>user\nabc<|im_end|>", " x\n", "ü🙂")
TALK = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}, {"role": "user", "content": "d"}]


def behaviour(tokenizer: Any) -> Any:
    """What chat formats ask of it."""
    ids = [tokenizer.encode(text, add_special_tokens=whole) for text in TEXTS for whole in (True, False)]
    texts = [tokenizer.decode(each, skip_special_tokens=skips) for each in ids for skips in (True, False)]
    shown = [tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=asks) for asks in (True, False)]
    marks = tokenizer.all_special_tokens
    return ids, texts, shown, marks, tokenizer.convert_tokens_to_ids(marks), tokenizer.eos_token_id, tokenizer.unk_token_id


def test_it_encodes_decodes_and_renders_as_the_tokenizer_that_it_was_written_from() -> None:
    own = build_tokenizer(CONTEXT)
    written = described(own)
    assert written.fast is not None
    assert behaviour(loaded(written)) == behaviour(own)


def test_a_chat_format_made_from_its_description_writes_and_reads_alike() -> None:
    chat = load_chat(build_tokenizer(CONTEXT), ModelConfig(name="tiny"))
    other = chat_of(spec_of(chat))
    assert other.render(TALK) == chat.render(TALK)
    assert (other.stop_token_ids, other.tool_parser, other.reasoning_parser) == (
        chat.stop_token_ids,
        chat.tool_parser,
        chat.reasoning_parser,
    )
    messages = [*TALK, CALLING, RETURNED]
    assert other.transcript(messages, [TOOL]) == chat.transcript(messages, [TOOL])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_known_templates_and_tokenizers_are_written_as_they_are(name: str) -> None:
    tokenizer = known(name) if name in OWN else small_tokenizer(real_template(name))
    written = described(tokenizer)
    assert written.fast is not None
    other = loaded(written)
    one, two = Chat(tokenizer), Chat(other)
    for seed in range(20):
        messages, tools, _ = random_conversation(random.Random(seed), name not in REFUSED, True)
        assert two.render(messages, tools) == (ids := one.render(messages, tools))
        assert two.text(ids) == one.text(ids)
        assert other.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERERS)
def test_renderers_write_and_read_on_a_written_tokenizer_as_on_its_own(name: str) -> None:
    chat = load_chat(known(name), model_config(renderer=RENDERERS[name]))
    other = chat_of(spec_of(chat))
    assert isinstance(other.tokenizer, WrittenTokenizer)
    says = "llama3_json" if name == "llama3_1" else "hermes"
    talks = [converse(each, random.Random(7), says, thinks=name == "qwen3") for each in (chat, other)]
    assert plain([reply.turn for reply in talks[1][1]]) == plain([reply.turn for reply in talks[0][1]])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{%- for m in messages %}\n  {{- m.content | upper }}\n{% endfor %}{{ tools is none }}{{ documents is none }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_templates_have_what_transformers_gives_them(template: str) -> None:
    own = build_tokenizer(CONTEXT)
    own.chat_template = template
    other = loaded(described(own))

    def shown(tokenizer: Any) -> str:
        try:
            return str(tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    assert isinstance(other, WrittenTokenizer)
    assert shown(other) == shown(own)


def test_a_templates_date_is_todays() -> None:
    assert len(compiled("{{ strftime_now('%Y') }}").render()) == 4


class Backwards(PreTrainedTokenizerFast):
    """A tokenizer that is a program of its own."""

    def encode(self, text: str, *args: Any, **keys: Any) -> list[int]:  # type: ignore[override]
        return list(super().encode(text[::-1], *args, **keys))


def test_a_tokenizer_that_is_a_program_of_its_own_is_named_and_not_replaced() -> None:
    plain = build_tokenizer(CONTEXT)
    own = Backwards(tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token, name_or_path="somebody/backwards")
    written = described(own, trusted=True)
    assert (written.fast, written.source, written.trusted) == (None, "somebody/backwards", True)


def test_without_a_template_a_conversation_is_refused_as_by_the_tokenizer_itself() -> None:
    own = build_tokenizer(CONTEXT)
    own.chat_template = None
    for tokenizer in (own, loaded(described(own))):
        with pytest.raises(ValueError, match=r"chat.template"):
            tokenizer.apply_chat_template(TALK, tokenize=False)


@pytest.mark.parametrize("own", [False, True], ids=["transformers", "written"])
def test_a_template_sees_the_day_on_which_the_run_began(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.2's template begins every prompt with the date: two days would be two data sets."""
    monkeypatch.setenv("RLX_TODAY", "2024-02-29")
    tokenizer: Any = build_tokenizer(64)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} " + str(tokenizer.chat_template)
    if own:
        tokenizer = WrittenTokenizer(described(tokenizer))
    assert load_chat(tokenizer, model_config()).show([{"role": "user", "content": "hello"}]).startswith("29 Feb 2024")


def test_a_renderer_sees_the_day_on_which_the_run_began_or_the_one_that_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of gpt-oss puts the day on which it was made into every prompt, unless its configuration has one."""
    made: list[Any] = []
    monkeypatch.setenv("RLX_TODAY", "2024-02-29")
    monkeypatch.setattr(
        "renderers.create_renderer", lambda tokenizer, config: made.append(config) or SimpleNamespace(get_stop_token_ids=list)
    )
    for given in ({}, {"conversation_start_date": "2025-01-02"}):
        load_chat(build_tokenizer(64), ModelConfig(name="gpt-oss", renderer="gpt-oss", chat_template_kwargs=given), keeps_tokens=False)
    assert [config.conversation_start_date for config in made] == ["2024-02-29", "2025-01-02"]


def test_no_renderer_asks_the_clock_for_what_its_configuration_does_not_name() -> None:
    """A new version of the package may read the clock elsewhere: then `load_chat` must pin that, too."""
    folder = Path(renderers.__file__).parent
    clock = [
        (file.name, line.strip())
        for file in folder.glob("*.py")
        for line in file.read_text().splitlines()
        if re.search(r"\b(now|today|strftime|localtime)\(", line)
    ]
    assert clock == [("gpt_oss.py", 'self.config.conversation_start_date or datetime.now().strftime("%Y-%m-%d")')]


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
