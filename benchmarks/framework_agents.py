"""The same agent of three turns in several frameworks: on any client, and on a tracking client.

Each is written as the framework's own documentation does it. ``build_alone`` gives an agent on
the framework's own model classes, made once and used for every trajectory; ``build_tracked`` one
that is made anew for each trajectory, as a builder that takes ``client`` is.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
import openai

from agentrl_cli.tracking.client import TrackingClient

MODEL = "null"
QUESTION = "What is 17 + 4, and what is 4 more than that? Use the tool, then answer."
SYSTEM = "You add numbers with the tool and answer in one sentence."
ANSWER = "The answer is 25."
#: The calls that the engine's first two replies make.
CALLS = ({"a": 17, "b": 4}, {"a": 21, "b": 4})
_BASE_URL = "http://null.invalid/v1"
_DESCRIPTION = "Adds two numbers."
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}

#: Runs one trajectory; its final answer.
Agent = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Framework:
    """How an agent of one framework is made."""

    name: str
    package: str
    """What must be importable."""
    build_alone: Callable[[httpx2.AsyncClient], Agent]
    build_tracked: Callable[[TrackingClient], Agent]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def _build_client(http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=_BASE_URL, api_key="none", http_client=http, max_retries=0)


# -- OpenAI's SDK, a loop of one's own ------------------------------------------------------


def _build_openai_loop(client: openai.AsyncOpenAI) -> Agent:
    tool: Any = {
        "type": "function",
        "function": {"name": "add", "description": _DESCRIPTION, "parameters": _PARAMETERS},
    }

    async def run() -> str:
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
        ]
        while True:
            completion = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=[tool]
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert call.type == "function"
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

    return run


# -- Anthropic's SDK, a loop of one's own ---------------------------------------------------


def _build_anthropic_alone(http: httpx2.AsyncClient) -> Agent:
    import anthropic

    client = anthropic.AsyncAnthropic(
        base_url=_BASE_URL.removesuffix("/v1"), api_key="none", http_client=http, max_retries=0
    )
    return _build_anthropic_loop(client)


def _build_anthropic_tracked(client: TrackingClient) -> Agent:
    from agentrl_cli.agents.anthropic_sdk import build_anthropic_client

    return _build_anthropic_loop(build_anthropic_client(client))


def _build_anthropic_loop(client: Any) -> Agent:
    tool: Any = {"name": "add", "description": _DESCRIPTION, "input_schema": _PARAMETERS}

    async def run() -> str:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            reply = await client.messages.create(
                model=MODEL, max_tokens=64, system=SYSTEM, messages=messages, tools=[tool]
            )
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": b.id, "content": str(add(**b.input))}
                for b in reply.content
                if b.type == "tool_use"
            ]
            if not results:
                return "".join(b.text for b in reply.content if b.type == "text")
            messages.append({"role": "user", "content": results})

    return run


# -- OpenAI Agents SDK ----------------------------------------------------------------------


def _build_agents_run(run_config: Any) -> Agent:
    import agents

    agent = agents.Agent(name="adder", instructions=SYSTEM, tools=[agents.function_tool(add)])

    async def run() -> str:
        return (await agents.Runner.run(agent, QUESTION, run_config=run_config)).final_output

    return run


def _build_agents_alone(http: httpx2.AsyncClient) -> Agent:
    import agents

    provider = agents.OpenAIProvider(openai_client=_build_client(http), use_responses=False)
    return _build_agents_run(
        agents.RunConfig(model=MODEL, model_provider=provider, tracing_disabled=True)
    )


class _SharedAgent:
    """An ``agents.Agent`` is a description: trajectories share it, as under agentrl."""

    def __init__(self) -> None:
        self._agent: Any = None

    def build_tracked(self, client: TrackingClient) -> Agent:
        import agents

        from agentrl_cli.agents.openai_agents import build_run_config

        if self._agent is None:
            self._agent = agents.Agent(
                name="adder", instructions=SYSTEM, tools=[agents.function_tool(add)]
            )

        async def run() -> str:
            config = build_run_config(client, MODEL)
            result = await agents.Runner.run(self._agent, QUESTION, run_config=config)
            return result.final_output

        return run


# -- CAMEL ----------------------------------------------------------------------------------


def _build_camel_agent(backend: Any) -> Agent:
    from camel.agents import ChatAgent
    from camel.toolkits import FunctionTool

    tool = FunctionTool(add)

    async def run() -> str:
        # A ChatAgent remembers: each trajectory has one of its own.
        response = await ChatAgent(SYSTEM, model=backend, tools=[tool]).astep(QUESTION)
        return response.msgs[0].content

    return run


def _build_camel_alone(http: httpx2.AsyncClient) -> Agent:
    from camel.models import OpenAICompatibleModel

    from agentrl_cli.agents.camel_model import CharacterCounter

    return _build_camel_agent(
        OpenAICompatibleModel(
            MODEL,
            {},
            api_key="none",
            url=_BASE_URL,
            # CAMEL's own counter downloads a file.
            token_counter=CharacterCounter(),
            async_client=_build_client(http),
        )
    )


def _build_camel_tracked(client: TrackingClient) -> Agent:
    from agentrl_cli.agents.camel_model import TrackedCamelModel

    return _build_camel_agent(TrackedCamelModel(client, MODEL))


# -- LangGraph ------------------------------------------------------------------------------


@cache
def _make_once(tool: Callable[[Any], Any]) -> Any:
    """The tool as ``@tool`` at the head of a module makes it."""
    return tool(add)


def _build_graph(chat_model: Any) -> Agent:
    import warnings

    from langchain_core.tools import tool

    with warnings.catch_warnings():
        # It is announced to move to another package.
        warnings.simplefilter("ignore")
        from langgraph.prebuilt import create_react_agent

        graph: Any = create_react_agent(chat_model, [_make_once(tool)], prompt=SYSTEM)

    async def run() -> str:
        state = await graph.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
        return state["messages"][-1].content

    return run


def _build_graph_alone(http: httpx2.AsyncClient) -> Agent:
    from langchain_openai import ChatOpenAI

    client = _build_client(http)
    return _build_graph(
        ChatOpenAI(
            model=MODEL,
            api_key="none",  # type: ignore[arg-type]
            root_async_client=client,
            async_client=client.chat.completions,
            root_client=object(),
            client=object(),
        )
    )


def _build_graph_tracked(client: TrackingClient) -> Agent:
    from agentrl_cli.agents.langgraph import build_chat_model

    return _build_graph(build_chat_model(client, MODEL))


FRAMEWORKS = (
    Framework(
        "OpenAI SDK, own loop",
        "openai",
        lambda http: _build_openai_loop(_build_client(http)),
        _build_openai_loop,
    ),
    Framework(
        "Anthropic SDK, own loop",
        "anthropic",
        _build_anthropic_alone,
        _build_anthropic_tracked,
    ),
    Framework("OpenAI Agents SDK", "agents", _build_agents_alone, _SharedAgent().build_tracked),
    Framework("CAMEL", "camel", _build_camel_alone, _build_camel_tracked),
    Framework("LangGraph", "langgraph", _build_graph_alone, _build_graph_tracked),
)
