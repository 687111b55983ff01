"""Agents that solve word problems with the OpenAI Agents SDK: one alone, and a team.

Both are ordinary SDK code: nothing here knows that it is being trained.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from agents import Agent, function_tool

_SOLVE = (
    "Solve the math problem step by step. Use the calculate tool for arithmetic. "
    "End with the final number on a line of its own, in the form: #### 42"
)
_OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_MAX_EXPRESSION_CHARS = 200


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression as text, or what is wrong with it.

    Errors are text, not exceptions, so that the model can read them and try again.
    """
    text = expression.replace(",", "").replace("$", "").replace("×", "*").replace("÷", "/")
    if len(text) > _MAX_EXPRESSION_CHARS:
        return f"error: longer than {_MAX_EXPRESSION_CHARS} characters"
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "error: only numbers, + - * / // % and parentheses are understood"
    if value.denominator == 1:
        return str(value.numerator)
    return format(float(value), ".10g")


def _evaluate(node: ast.AST) -> Fraction:
    """Exact, and without calls, names or powers: nothing in it can run code or take long."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not arithmetic")


@function_tool
def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, for example (3 + 4) * 12.
    """
    return evaluate(expression)


def build_math_agent(instructions: str = _SOLVE) -> Agent:
    """One agent with a calculator."""
    return Agent(name="math agent", instructions=instructions, tools=[calculate])


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
        tools=[calculate],
    )
    solver = Agent(
        name="solver",
        handoff_description="Solves a math problem step by step",
        instructions=f"{_SOLVE}. When you are not sure of your solution, hand over to the checker.",
        tools=[calculate],
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
