"""Agents that solve word problems with the OpenAI Agents SDK: one alone, and a team.

Both are ordinary SDK code: nothing here knows that it is being trained.
"""

from __future__ import annotations

from agents import Agent, function_tool

from builders.calculator_agent import calculate

_SOLVE = (
    "Solve the math problem step by step. Use the calculate tool for arithmetic. "
    "End with the final number on a line of its own, in the form: #### 42"
)


def build_math_agent(instructions: str = _SOLVE) -> Agent:
    """One agent with a calculator."""
    return Agent(name="math agent", instructions=instructions, tools=[function_tool(calculate)])


def build_math_team() -> Agent:
    """A triage agent that hands over to a solver, who hands over to a checker."""
    checker = Agent(
        name="checker",
        handoff_description="Checks a finished solution and gives the final answer",
        instructions=(
            "Check the solution in the conversation: recompute its steps with the calculate "
            "tool and correct what is wrong. End with the final number on a line of its own, in "
            "the form: #### 42"
        ),
        tools=[function_tool(calculate)],
    )
    solver = Agent(
        name="solver",
        handoff_description="Solves a math problem step by step",
        instructions=f"{_SOLVE}. When you are not sure of your solution, hand over to the checker.",
        tools=[function_tool(calculate)],
        handoffs=[checker],
    )
    return Agent(
        name="triage",
        instructions=(
            "You receive a math problem. Hand it over to the solver. Answer directly only what "
            "needs no calculation, and then end with: #### and the number"
        ),
        handoffs=[solver],
    )
