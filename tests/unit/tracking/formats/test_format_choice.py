"""Which format ``auto`` stands for, and what is said of names that do not exist."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agentrl_cli.errors import UserInputError
from agentrl_cli.tracking.formats.format_choice import (
    REASONING_NAMES,
    TOOL_CALL_NAMES,
    choose_formats,
    describe_fallback,
    find_tool_call_format,
    find_unknown_parsers,
    recognize_tool_calls,
)
from agentrl_cli.tracking.formats.format_table import (
    REASONING_ALIASES,
    REASONING_BY_TOOL_CALLS,
    REASONING_FORMATS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_FORMATS,
)


class FakeTokenizer:
    """What is asked of a tokenizer here."""

    def __init__(self, chat_template: Any, tokens: Any = (), response_template: Any = None) -> None:
        self.chat_template = chat_template
        self.all_special_tokens = list(tokens)
        self.response_template = response_template
        self.name_or_path = "some/model"


QWEN3 = "{%- if '</think>' in content %}{{- '\\n<tool_call>\\n{\"name\": \"' }}"
#: What published chat templates say of calls and reasoning, and the formats that they mean.
TEMPLATES: list[tuple[str, str, str | None]] = [
    ('{{- \'\\n<tool_call>\\n{"name": "\' }}', "hermes", None),
    (QWEN3, "hermes", "qwen3"),
    ("{{- '\\n<tool_call>\\n<function=' + name + '>\\n' }}<parameter=", "qwen3_coder", None),
    ("<tool_call>\\n<function=' + name + '>\\n<parameter='</think>", "qwen3_coder", "qwen3"),
    ("<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>```json'</think>", "deepseek_v3", "qwen3"),
    ("'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'{{'</think>'}}", "deepseek_v31", "qwen3"),
    ("<|tool_calls_section_begin|>", "kimi_k2", None),
    ("<|start|>assistant<|channel|>analysis<|message|>", "openai", None),
    ("{{ '<think></think>' }}<tool_call>{{ tc.name }}<arg_key>", "glm45", "qwen3"),
    ('"parameters": dictionary}<|eot_id|><|python_tag|>', "llama3_json", None),
    ("<|python_start|><|python_end|><|eot|>", "llama4_pythonic", None),
    (
        "'<|python_start|>' + content + '<|python_end|>' {\"parameters\": <|eot|>",
        "llama3_json",
        None,
    ),
    (
        '<|header_start|>assistant {"name": "\' + name + \'", "parameters": <|eot|>',
        "llama3_json",
        None,
    ),
    ("in the format [func_name1(params_name1=params_value1)] <|eot|>", "llama4_pythonic", None),
    ("in the format [func_name1(params_name1=params_value1)] <|eot_id|>", "pythonic", None),
    ("'<function_call> ' + {'name': tc.function.name}|tojson", "granite-20b-fc", None),
    ("<|tool_list_start|>", "lfm2", None),
    ("{{- '[TOOL_CALLS]' }}[THINK]", "mistral", "mistral"),
    ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
    ("<|tool_call|> Here is my thought process:", "granite", "granite"),
    ("<minimax:tool_call><invoke name= </think>", "minimax_m2", "qwen3"),
    ("<seed:tool_call>\\n<function=<seed:think>", "seed_oss", "seed_oss"),
    ("<|tool_call_start|>", "lfm2", None),
    ("{{ messages[0].content }}", "hermes", None),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), TEMPLATES)
def test_auto_tells_the_family_by_its_template(
    template: str, calls: str, reasoning: str | None
) -> None:
    formats = choose_formats(FakeTokenizer(template))
    assert formats.tool_calls is TOOL_CALL_FORMATS[calls]
    assert (formats.reasoning and formats.reasoning.name) == reasoning


def test_auto_reads_templates_under_names_and_special_tokens() -> None:
    named = FakeTokenizer({"default": "{{ x }}", "tool_use": "<|tool_call_start|>"})
    assert choose_formats(named).tool_calls is TOOL_CALL_FORMATS["lfm2"]
    by_token = FakeTokenizer("{{ x }}", ["</s>", "[TOOL_CALLS]"])
    assert choose_formats(by_token).tool_calls is TOOL_CALL_FORMATS["mistral"]


def test_auto_takes_the_tokenizers_own_template_where_the_family_is_unknown() -> None:
    formats = choose_formats(FakeTokenizer("{{ x }}", response_template={"fields": {}}))
    assert formats.tool_calls is not None
    assert formats.tool_calls.name == "hf"
    assert formats.reasoning is None


#: Templates of no family that is known, and the formats in which they write calls.
_WRITTEN = [
    (
        "[{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %})]",
        "pythonic",
    ),
    ('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', "llama3_json"),
    ("<call>{{ c | tojson }}</call>", None),
]


@pytest.mark.parametrize(("written", "name"), _WRITTEN)
def test_auto_takes_the_format_that_reads_what_an_unknown_template_writes(
    chat_tokenizer: Any, written: str, name: str | None
) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        "{% set c = m.tool_calls[0].function %}"
        + written
        + "{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert recognize_tool_calls(tokenizer) == name
    said = describe_fallback(tokenizer, "auto")
    assert (said is None) == (name is not None)
    assert describe_fallback(tokenizer, "hermes") is None
    if said is not None:
        assert "no known format of tool calls, so they are read as 'hermes'" in said
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert describe_fallback(tokenizer, "auto") is None, "nothing to know of calls without tools"


def test_names_choose_whatever_the_template_says() -> None:
    tokenizer = FakeTokenizer(QWEN3)
    formats = choose_formats(tokenizer, "llama3_json", "none")
    assert formats.tool_calls is TOOL_CALL_FORMATS["llama3_json"]
    assert formats.reasoning is None
    assert choose_formats(tokenizer, "none", "deepseek-r1").tool_calls is None
    assert choose_formats(tokenizer, "gpt-oss", "gpt-oss").tool_calls is TOOL_CALL_FORMATS["openai"]


def test_parser_of_another_grammar_is_refused_with_gpt_oss_reasoning() -> None:
    with pytest.raises(UserInputError, match=r"engine\.tool_call_parser=openai"):
        choose_formats(FakeTokenizer("x"), "hermes", "gpt-oss")


def test_own_template_that_is_missing_is_refused() -> None:
    with pytest.raises(UserInputError, match="'some/model' has none"):
        choose_formats(FakeTokenizer("x"), "hf")


@pytest.mark.parametrize(
    ("calls", "reasoning", "message"),
    [
        ("hermess", "auto", "tool_call_parser: 'hermess' is not known; did you mean 'hermes'"),
        ("auto", "qwen", "engine.reasoning_parser: 'qwen' is not known; did you mean 'qwen3'"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(calls: str, reasoning: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        choose_formats(FakeTokenizer("x"), calls, reasoning)


def test_every_name_leads_somewhere() -> None:
    assert find_unknown_parsers("auto", "auto") == []
    for name in {*TOOL_CALL_NAMES} - {"auto", "none", "hf", "response_template"}:
        assert find_tool_call_format(name) is not None
    assert {*REASONING_ALIASES, *REASONING_FORMATS} < {*REASONING_NAMES}
    assert {*REASONING_ALIASES.values()} <= {*REASONING_FORMATS}
    assert not {*REASONING_ALIASES} & {*REASONING_FORMATS}
    assert not {*TOOL_CALL_ALIASES} & {*TOOL_CALL_FORMATS}
    assert {*REASONING_BY_TOOL_CALLS.values()} <= {*TOOL_CALL_FORMATS}
