"""The agent, written with the OpenAI Agents SDK. Nothing in it knows that it is trained."""

from __future__ import annotations

from agents import Agent, function_tool
from calculator import SYSTEM_PROMPT, calculate


def build_agent() -> Agent:
    """What train.yaml names: agentrl runs the agent that it returns on every row."""
    return Agent(name="calculator", instructions=SYSTEM_PROMPT, tools=[function_tool(calculate)])
