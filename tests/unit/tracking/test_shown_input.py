"""What a chat template leaves out is refused on the first request of its kind, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentrl_cli.errors import ModelError
from agentrl_cli.models.chat_templates import DEFAULT_TEMPLATE, read_chat_template
from agentrl_cli.models.model_files import load_tokenizer
from agentrl_cli.tracking.template import (
    ChatTemplate,
    TemplateError,
    TemplateInputs,
    UnshownInputError,
)

TURNS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CALLS = """\
{%- for m in messages %}{%- if m.role in SHOWN %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ROLES = "['system', 'user', 'assistant', 'tool']"
TOOLS = "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
WHOLE = TOOLS + CALLS.replace("SHOWN", ROLES)
PARTS = """\
{%- for m in messages %}{{ m.role | capitalize }}:
{%- for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "2"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def check(tokenizer: Any, *messages: Any, tools: tuple[Any, ...] = ()) -> str:
    template, inputs = ChatTemplate(tokenizer), TemplateInputs(tools=tools)
    template.check_shown(messages, inputs)
    return template.render(messages, inputs)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        (TURNS, [USER], [TOOL], "the tools"),
        # Before the model has called anything.
        (TOOLS + TURNS, [USER], [TOOL], "calls of tools"),
        (WHOLE.replace(", 'tool'", ""), [USER], [TOOL], "what tools return"),
        (WHOLE.replace("tools or []", "(tools or [])[:1]"), [USER], [TOOL, TOOL], "the tools"),
        (WHOLE.replace("t | tojson", "t.function.name"), [USER], [TOOL], "the parameters of tools"),
        (WHOLE.replace("'system', ", ""), [SYSTEM, USER], [], "the system prompt"),
        # Only where there are tools as well.
        (
            WHOLE.replace("m.role in", "(not tools or m.role != 'system') and m.role in"),
            [SYSTEM, USER], [TOOL], "the system prompt",
        ),
        ("{{ tools }}Go!", [USER], [], "what the user says"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
         + WHOLE, [SYSTEM, USER], [], "no system"),
        ("{% for", [USER], [], "cannot render"),
    ],
)  # fmt: skip
def test_what_is_lost_is_named_with_the_remedy(make_tokenizer, template, messages, tools, lost):
    with pytest.raises(UnshownInputError, match=re.escape(lost)) as caught:
        check(make_tokenizer(template), *messages, tools=tuple(tools))
    assert f"Type model.chat_template={DEFAULT_TEMPLATE}" in str(caught.value)
    assert "model.chat_template=FILE" in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_is_shown_passes_and_what_the_model_brought_about_ends_nothing(make_tokenizer):
    """A template may drop text beside calls, and refuse what only the model leads to."""
    check(make_tokenizer(WHOLE), SYSTEM, USER, CALLED, RESULT, USER, tools=(TOOL, TOOL))
    once = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one at a time') }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(make_tokenizer(once + WHOLE))
    twice = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "e"}]}
    messages = [USER, twice, RESULT, {**RESULT, "tool_call_id": "e"}]
    template.check_shown(messages, TemplateInputs(tools=(TOOL,)))
    with pytest.raises(TemplateError, match="one at a time"):
        template.render(messages, TemplateInputs(tools=(TOOL,)))


def test_content_is_given_as_parts_to_templates_that_read_parts_alone(make_tokenizer):
    said = {"role": "assistant", "content": "Yes"}
    text = check(make_tokenizer(PARTS), SYSTEM, USER, said, USER)
    turns = ("System:Be brief.", "User:Hi", "Assistant:Yes", "User:Hi", "Assistant:")
    assert text == "<|im_end|>\n".join(turns)


async def test_turns_of_a_template_of_parts_are_spliced(open_client, make_tokenizer):
    client = open_client("Hello", "Bye", tokenizer=make_tokenizer(PARTS))
    ask = client.chat.completions.create
    first = await ask(model="m", messages=[USER])
    reply = first.choices[0].message.model_dump(exclude_none=True)
    await ask(model="m", messages=[USER, reply, USER])
    one, two = client.interactions
    assert (two.extends_parent, two.mismatch_cause) == (True, None)
    assert two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids


async def test_the_agent_is_told_and_the_session_keeps_it_for_the_run(open_client, make_tokenizer):
    client = open_client("Hello", tokenizer=make_tokenizer(TURNS))
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match=DEFAULT_TEMPLATE):
        await ask(model="m", messages=[USER], tools=[TOOL])
    assert isinstance(client.session.user_error, UnshownInputError)
    await ask(model="m", messages=[USER])


@pytest.fixture
def default_tokenizer(make_tokenizer: Callable[[str], Any]) -> Any:
    return make_tokenizer(read_chat_template(DEFAULT_TEMPLATE))


def test_the_default_template_shows_everything(default_tokenizer):
    template = ChatTemplate(default_tokenizer)
    assert template.formats.tool_calls is not None
    assert template.formats.tool_calls.name == "hermes"
    text = check(default_tokenizer, SYSTEM, USER, CALLED, RESULT, tools=(TOOL,))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (
        check(default_tokenizer, USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("begin", ["<|endoftext|>", None])
def test_the_default_template_ends_turns_where_the_engine_stops(default_tokenizer, begin):
    """Whatever the tokenizer's own tokens are."""
    default_tokenizer.eos_token, default_tokenizer.bos_token = "<|endoftext|>", begin
    said = {"role": "assistant", "content": "Yes"}
    turns = ("<|im_start|>user\nHi", "<|im_start|>assistant\nYes", "<|im_start|>user\nHi")
    text = (begin or "") + "<|endoftext|>\n".join((*turns, "<|im_start|>assistant\n"))
    assert check(default_tokenizer, USER, said, USER) == text


async def test_calls_and_results_of_the_default_template_are_spliced(
    open_client, default_tokenizer
):
    sampled = 'I add.\n<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'
    client = open_client(sampled, "2", "You are welcome.", tokenizer=default_tokenizer)
    messages: list[Any] = [SYSTEM, USER]
    for further in (RESULT, USER, None):
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        message = reply.choices[0].message.model_dump(exclude_none=True)
        calls = message.get("tool_calls", [{}])
        further = further and {**further, "tool_call_id": calls[0].get("id")}
        messages += [message, further]
    assert [i.mismatch_cause for i in client.interactions] == [None] * 3
    assert len(client.export_interactions()) == 1
    text = default_tokenizer.decode(client.interactions[2].prompt_ids)
    assert text.endswith(
        f"{sampled}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_is_neither_named_nor_a_file(tmp_path):
    (tmp_path / "own.jinja").write_text("own")
    assert read_chat_template(str(tmp_path / "own.jinja")) == "own"
    with pytest.raises(ModelError, match=r"did you mean 'hermes-chatml'.*no file that can be read"):
        read_chat_template("hermes-chatl")


def test_a_real_models_own_template_is_refused_and_the_default_one_is_not(real_model):
    """SmolLM2's shows no tools."""
    with pytest.raises(UnshownInputError, match=re.escape(f"{str(real_model)!r} does not show")):
        check(load_tokenizer(str(real_model)), USER, tools=(TOOL,))
    text = check(load_tokenizer(str(real_model), DEFAULT_TEMPLATE), USER, tools=(TOOL,))
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
