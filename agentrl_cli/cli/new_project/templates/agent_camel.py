"""The agent, written with CAMEL. Only its model comes from agentrl."""

from __future__ import annotations

from calculator import SCHEMA, SYSTEM_PROMPT, calculate
from camel.agents import ChatAgent
from camel.toolkits import FunctionTool
from openai import AsyncOpenAI

from agentrl_cli import TrackedCamelModel


def build_agent(client: AsyncOpenAI, model: str) -> ChatAgent:
    """What train.yaml names: agentrl runs the agent that it returns on one row.

    The tool's schema is given as it is because the built-in model knows no other; with a real
    model, ``tools=[calculate]`` is enough.
    """
    schema = {"type": "function", "function": SCHEMA}
    return ChatAgent(
        SYSTEM_PROMPT,
        model=TrackedCamelModel(client, model),
        tools=[FunctionTool(calculate, openai_tool_schema=schema)],
    )
