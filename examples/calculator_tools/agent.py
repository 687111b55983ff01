"""An agent of the OpenAI Agents SDK that does its arithmetic with a tool."""

from __future__ import annotations

from agents import Agent, function_tool

_INSTRUCTIONS = """\
Call calculate once, then answer with the number. For example, for "What is 31 plus 5?" call:
<tool_call>
{"name": "calculate", "arguments": {"expression": "31 + 5"}}
</tool_call>"""


def calculate(expression: str) -> str:
    """Does arithmetic on two whole numbers.

    Args:
        expression: for example 12 * 7
    """
    operators = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    try:
        left, sign, right = expression.split()
        return str(operators[sign](int(left), int(right)))
    except (ValueError, KeyError):
        return "error: write two whole numbers with +, - or * between them, as in 12 * 7"


def build_agent() -> Agent:
    """The agent."""
    return Agent(name="calculator", instructions=_INSTRUCTIONS, tools=[function_tool(calculate)])
