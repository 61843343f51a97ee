"""A small byte-level tokenizer, and chat templates in the manner of known ones, written for the tests.

The known ones themselves are read where packages ship them: `real_templates`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlx.paths import cache_root

MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|head|>", "<|/head|>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # tokens, but not special, as in Qwen3
TEXT = "the tool adds numbers and the answer is five because two and three are five; please call add with x and y " * 4

# As SmolLM2's: tools, calls and results' names are not known.
PLAIN = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

# As SmolLM2's own: a conversation without a system message gets one.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\\n' }}{% endif %}" + PLAIN
)

_HEAD = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools><|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
"""
_TAIL = """\
{{- (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_THINK = "{{ '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}"

# As Qwen2.5's and Hermes': calls are JSON between tags, in the template's own spelling.
HERMES = _HEAD + _TAIL
# As Phi-3's: a conversation that asks for no answer ends with a token of its own, behind that of the last turn.
CLOSING = HERMES.removesuffix("{% endif %}\n") + "{% else %}{{ eos_token }}{% endif %}\n"
# As Qwen3's: the reasoning of turns before the last user message is dropped.
STRIPPING = _HEAD + "{%- if message.reasoning_content and loop.index0 > ns.last %}" + _THINK + "{% endif %}\n" + _TAIL
# As TRL's training templates: all reasoning stays.
RETAINING = _HEAD + "{%- if message.reasoning_content %}" + _THINK + "{% endif %}\n" + _TAIL
# As DeepSeek-R1-Distill's: the prompt opens the reasoning, and no later prompt has it.
OPENING = HERMES.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}\n", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}\n{#- </think> #}"
)
# As Llama 3's: bare JSON, one call at most.
LLAMA = """\
{%- if tools %}{{ '<|head|>system<|/head|>\\n\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{{- '<|head|>' + message.role + '<|/head|>\\n\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{ message.content | trim }}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}
"""


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer.to_str()


def small_tokenizer(template: str | None, eos: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer of about 400 tokens: the same text has many spellings in tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), eos_token=eos, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    return tokenizer


def spelled(tokenizer: Any, text: str, state: random.Random) -> list[int]:
    """The text in tokens that the tokenizer itself would not choose: a policy samples such."""
    ids: list[int] = []
    while text:
        length = state.choice([1, 3, 8, 40])
        ids += tokenizer.encode(text[:length], add_special_tokens=False)
        text = text[length:]
    return ids


def real_templates() -> dict[str, str]:
    """Known templates by name, from the TRL package, whose files are read and which is never imported: of the folder `RLX_CHAT_TEMPLATES`,
    the installed package (the extra `dev`), or the benchmark's own environment."""
    folders = [Path(folder) for folder in [os.environ.get("RLX_CHAT_TEMPLATES")] if folder]
    package = importlib.util.find_spec("trl")
    folders += [Path(folder) / "chat_templates" for folder in (package and package.submodule_search_locations) or ()]
    folders += (cache_root() / "benchmarks" / "trl").glob("lib/python*/site-packages/trl/chat_templates")
    return {path.stem: path.read_text() for folder in folders[:1] for path in sorted(folder.glob("*.jinja"))}


def real_tokenizers() -> dict[str, Path]:
    """Folders of known tokenizers by name, below `RLX_TOKENIZERS`: a folder for each, with `tokenizer.json` and `tokenizer_config.json`."""
    folder = os.environ.get("RLX_TOKENIZERS")
    return {path.parent.name: path.parent for path in sorted(Path(folder).glob("*/tokenizer.json"))} if folder else {}


def real_template(name: str) -> str:
    """One of `real_templates`. The extra `dev` installs TRL, so a template that is not there fails the test."""
    found = real_templates()
    assert name in found, f"TRL has no chat template {name!r}; it has {', '.join(found) or 'none: is it installed (the extra `dev`)?'}"
    return found[name]
