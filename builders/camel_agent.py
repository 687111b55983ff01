"""Agents of CAMEL: one with a tool, a planner with a solver, and two that play roles.

CAMEL's agents keep their conversation in themselves, so each trajectory gets its own: the
builders take ``client``, and their model is a ``TrackedCamelModel``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from camel.agents import ChatAgent, TaskPlannerAgent
from camel.societies import RolePlaying
from camel.toolkits import FunctionTool
from openai import AsyncOpenAI

from agentrl_cli import TrackedCamelModel
from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT
from builders.calculator_agent import calculate


def build_chat_agent(client: AsyncOpenAI, model: str, delivery: str = "whole") -> ChatAgent:
    """A ChatAgent that answers with a number and may call ``calculate``.

    The tool's schema is written out because the built-in model knows no other; for another
    model, ``tools=[calculate]`` is enough.
    """
    return ChatAgent(
        SYSTEM_PROMPT,
        model=TrackedCamelModel(
            client, model, model_config_dict={"stream": True} if delivery == "streamed" else None
        ),
        tools=[FunctionTool(calculate, openai_tool_schema=CALCULATE_TOOL)],
        stream_accumulate=False,
    )


class PlannerTeam:
    """CAMEL's task planner divides the task, and a solver with a tool works on the plan."""

    async def run(self, data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> str:
        """The solver's answer."""
        tracked = TrackedCamelModel(client, model)
        planner = TaskPlannerAgent(model=tracked)
        solver = ChatAgent(
            "You solve math problems with the calculate tool. End with #### and the number.",
            model=tracked,
            tools=[calculate],
        )
        # The planner's run blocks, so it gets a thread.
        plan = await asyncio.to_thread(planner.run, data["question"])
        response = await solver.astep(f"{data['question']}\n\nPlan:\n{plan}")
        return str(response.msgs[0].content) if response.msgs else ""


def build_planner_team() -> PlannerTeam:
    """A planner and a solver."""
    return PlannerTeam()


def build_role_playing(client: AsyncOpenAI, model: str) -> RolePlaying:
    """A student instructs a mathematician until the student says that the task is done."""
    tracked = TrackedCamelModel(client, model)
    return RolePlaying(
        assistant_role_name="Mathematician",
        user_role_name="Student",
        # Specifying the task would take a call of the model while this is being built.
        with_task_specify=False,
        model=tracked,
        assistant_agent_kwargs={"model": tracked, "tools": [FunctionTool(calculate)]},
    )
