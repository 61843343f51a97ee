"""A model's tokenizer for processes without transformers, whose import takes seconds and hundreds of megabytes.

`described` writes down what the tokenizer of transformers does: the fast tokenizer itself, its template and the names of its tokens.
`WrittenTokenizer` does the same with `tokenizers` and jinja alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec

log = logging.getLogger(__name__)

PROBES = ("Hello , world !  It 's <x>\n\n\tÄ 日本 🙂", "", " a", "def f(x):\n    return x  # ok .")
DIALOGUE = [{"role": "user", "content": "A question ."}, {"role": "assistant", "content": "An answer !"}, {"role": "user", "content": "b"}]


class Written(msgspec.Struct):
    """What a tokenizer does."""

    source: str  # folder or hub name
    trusted: bool  # `model.trust_remote_code`
    fast: str | None  # as `tokenizers` writes it; None: it is a program of its own, which transformers loads from `source`
    template: str | None
    names: dict[str, str] = {}  # what templates know: bos_token, eos_token, …
    special: list[str] = []
    eos: int | None = None
    unk: int | None = None


class WrittenTokenizer:
    """The part of a tokenizer of transformers that chat formats use."""

    def __init__(self, written: Written) -> None:
        from tokenizers import Tokenizer

        assert written.fast is not None
        self._fast = Tokenizer.from_str(written.fast)
        self._fast.no_truncation()
        self._fast.no_padding()
        self.name_or_path, self.chat_template = written.source, written.template
        self.all_special_tokens, self.eos_token_id, self.unk_token_id = written.special, written.eos, written.unk
        self.special_tokens_map = written.names

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Ids of the text, and where in it each comes from. The package `renderers` asks so."""
        found = self._fast.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": list(found.ids), "offset_mapping": list(found.offsets)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids [n] of the text."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids."""
        plain = [ids] if isinstance(ids, int) else ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return str(self._fast.decode(plain, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or those of several; of one that it does not have that of the unknown token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._fast.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, tokenize: bool = True, **given: Any
    ) -> Any:
        """The conversation as text, or as its ids. `given`: what the template gets besides. Raises what the template raises, and ValueError
        without a template."""
        if self.chat_template is None:
            raise ValueError(f"the tokenizer of {self.name_or_path} has no chat template; name one with model.chat_template=FILE")
        text = self._template.render(messages=messages, tools=tools, documents=None, **self.special_tokens_map, **given)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens besides the vocabulary's, by id; `special` tells those that steer."""
        return dict(self._fast.get_added_tokens_decoder())

    @cached_property
    def _template(self) -> Any:
        return compiled(str(self.chat_template))


def compiled(template: str) -> Any:
    """A chat template with what transformers gives to templates."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said; here it only shows it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

        def _shown(self, caller: Any) -> str:
            return str(caller())

    def raise_exception(text: str) -> None:
        raise jinja2.exceptions.TemplateError(text)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)


def described(tokenizer: Any, trusted: bool = False) -> Written:
    """What a tokenizer of transformers does. One that a `WrittenTokenizer` does not equal is named by its source: a program of its own, or
    one that tidies spaces or reads special tokens as text."""
    source = str(tokenizer.name_or_path)
    named = Written(source, trusted, None, tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or not isinstance(tokenizer.chat_template, str | None):
        return named
    written = Written(
        source,
        trusted,
        fast.to_str(),
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        [str(token) for token in tokenizer.all_special_tokens],
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    )
    if _equal(tokenizer, WrittenTokenizer(written)):
        return written
    log.warning("the tokenizer of %s does more than its fast tokenizer; environments load it with transformers", source)
    return named


def _equal(one: Any, other: WrittenTokenizer) -> bool:
    """Whether two tokenizers do the same with the texts and the conversation above."""

    def shown(tokenizer: Any) -> Any:
        ids = [tokenizer.encode(text, add_special_tokens=whole) for text in (*PROBES, *one.all_special_tokens) for whole in (True, False)]
        texts = [tokenizer.decode(each, skip_special_tokens=skips) for each in ids for skips in (True, False)]
        try:
            chat = tokenizer.apply_chat_template(DIALOGUE, tokenize=False, add_generation_prompt=True) if one.chat_template else ""
        except Exception as error:  # a template may refuse this conversation
            chat = type(error).__name__
        return [list(each) for each in ids], texts, chat

    return bool(shown(one) == shown(other))


def loaded(written: Written) -> Any:
    """The tokenizer. Raises RuntimeError if it needs transformers, which this Python does not have."""
    if written.fast is not None:
        return WrittenTokenizer(written)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RuntimeError(
            f"the tokenizer of {written.source} is a program of its own, which needs transformers: install it in this Python, too"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(written.source, trust_remote_code=written.trusted)
    if written.template is not None:
        tokenizer.chat_template = written.template
    return tokenizer
