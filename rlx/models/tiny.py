"""The project's own tiny model: a Qwen3 architecture of under a million parameters, and its character tokenizer.

This module builds both and saves them as a Hugging Face folder that `AutoTokenizer`, `AutoModelForCausalLM` and vLLM load.
`rlx.roles.prepare` has `rlx sft` train the model, and caches it.

The vocabulary is fixed: four marks, four role names, newline, tab and printable ASCII; everything else is `<|unk|>`.
A role name is one token only at the head of a ChatML message. Elsewhere it is spelled in characters, so that a model that works on
letters sees letters.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlx.config.schema import WarmStartConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = ("\n", "\t", *(chr(code) for code in range(32, 127)))
VOCABULARY = (PAD, START, END, UNKNOWN, *ROLES, *CHARACTERS)
"""The token of each id."""

# Turns are rendered word for word, so that a later prompt extends an earlier one. Tools get one short line: each character is a token.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {{- 'tools:' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {{- ' ' + function.name + '(' + (function.parameters.properties | default({}) | list | join(', ')) + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content if part.text is defined %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
CALLS    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CALLS = {
    "hermes": """\
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
""",
    "pythonic": """\
        {{- '[' }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function is defined else call %}
            {{- function.name + '(' }}
            {%- for name, value in function.arguments.items() %}
                {{- name + '=' + (value | tojson if value is string else value | string) }}
                {{- ', ' if not loop.last else '' }}
            {%- endfor %}
            {{- ')' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']' }}
""",
}
"""The part of the template that writes an answer's calls, by its name in vLLM's parsers. `pythonic` takes arguments as a mapping."""


def build_tokenizer(context_length: int, tool_calls: str = "hermes") -> PreTrainedTokenizerFast:
    """The character tokenizer with the ChatML template; `eos` is `<|im_end|>`, `pad` is `<|endoftext|>`. `tool_calls`: a name of `CALLS`.

    `decode(encode(text)) == text` for every `str` of `CHARACTERS` and marks.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    # Marks split the text first, so `\A` is the position after `<|im_start|>`.
    pieces = rf"\A(?:{'|'.join(ROLES)})(?=\n)|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (PAD, START, END, UNKNOWN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE.replace("CALLS", CALLS[tool_calls]),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def build_model(config: WarmStartConfig, context_length: int) -> Qwen3ForCausalLM:
    """A float32 model with weights drawn from `config.seed`. Leaves the global random state unchanged."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    architecture = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        use_sliding_window=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Qwen3ForCausalLM(architecture).float()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face folder: safetensors, both configurations, tokenizer and chat template."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
