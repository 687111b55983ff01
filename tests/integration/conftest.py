"""A tiny Qwen2 model and tokenizer, made here: no download, milliseconds to run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Tokenizer

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "What is 12 plus 34? The answer is 46.",
    "You are a helpful assistant that can use tools.",
    '{"type": "function", "function": {"name": "calculate", "description": "Works out sums.", '
    '"parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}',
    '{"name": "calculate", "arguments": {"expression": "12 + 34"}}',
    "system user assistant tool_call tool_response tools",
    "Schöne Grüße, übermäßig viele Äpfel. Ça va? 日本語のテキスト 🙂🙃",
]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: In hermes models these are single tokens, but not special: they stay in decoded text.
_MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHATML_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- (messages[0].content or '') + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nCall a tool so: <tool_call>\\n{"name": ..., "arguments": ...}\\n' }}
    {{- '</tool_call><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + (messages[0].content or '') + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '\\n' if not message.content and not message.tool_calls }}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A BPE of about 500 tokens with Qwen2's pre-tokenizer and a ChatML + hermes template."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        _SENTENCES, vocab_size=500, new_special_tokens=None, show_progress=False
    )
    tokenizer.add_special_tokens(
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>"],
        }
    )
    tokenizer.add_tokens(_MARKUP)
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def build_tiny_model(
    tiny_tokenizer: PreTrainedTokenizerBase, build_qwen2: Callable[..., PreTrainedModel]
) -> Callable[..., PreTrainedModel]:
    """Makes a random Qwen2 for the tiny tokenizer: ``build_tiny_model(seed, tied=True)``."""
    return functools.partial(build_qwen2, tiny_tokenizer)


@pytest.fixture
def tiny_model(build_tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A fresh tiny model with tied embeddings; the same weights every time."""
    return build_tiny_model()
