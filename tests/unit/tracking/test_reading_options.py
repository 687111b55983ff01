"""The ways to say how replies are read: in the configuration, and to a client."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway, get_gateway

USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("taker", [get_gateway, Gateway, TrackingClient])
def test_options_of_the_configuration_are_those_of_gateway_and_client(taker: Any) -> None:
    parameters = inspect.signature(taker).parameters
    for name, default in EngineConfig().list_reading_options().items():
        assert parameters[name].default == default


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("auto", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"),
        ("pythonic", "[f(x=1)]"),
    ],
)
async def test_client_reads_by_the_parser_it_was_given(
    scripted_engine: Callable[[Any], Any], chat_tokenizer: Any, parser: str, text: str
) -> None:
    client = TrackingClient(
        engine=scripted_engine([text]), tokenizer=chat_tokenizer, tool_call_parser=parser
    )
    completion = await client.chat.completions.create(model="m", messages=[USER], tools=[TOOL])
    message = completion.choices[0].message
    assert not message.content
    assert [c.function.arguments for c in message.tool_calls or ()] == ['{"x": 1}']  # type: ignore[union-attr]
    await client.gateway.close()


async def test_unknown_parser_is_refused_where_the_client_is_made(
    scripted_engine: Callable[[Any], Any], chat_tokenizer: Any
) -> None:
    with pytest.raises(UserInputError, match="did you mean 'hermes'"):
        TrackingClient(
            engine=scripted_engine([]), tokenizer=chat_tokenizer, tool_call_parser="hermess"
        )
