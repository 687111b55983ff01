"""An agent with one tool, a calculator: the agent of the quickstart."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl_cli.models.calculator_tasks import SYSTEM_PROMPT

if TYPE_CHECKING:
    from agents import Agent

Number = int | float

#: No expression of a question comes near these; they keep a wild one from eating the machine.
_MAX_EXPRESSION_CHARACTERS = 200
_MAX_EXPONENT = 64
_MAX_MAGNITUDE = 10**30

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def build_calculator_agent(model: str | None = None) -> Agent:
    """An OpenAI Agents SDK agent that answers with a number and may call ``calculate``."""
    from agents import Agent, function_tool

    return Agent(
        name="calculator",
        instructions=SYSTEM_PROMPT,
        tools=[function_tool(calculate)],
        model=model,
    )


def calculate(expression: str) -> str:
    """Does arithmetic."""
    try:
        return _format_number(_evaluate(_parse(expression)))
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"


def _parse(expression: str) -> ast.expr:
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"at most {_MAX_EXPRESSION_CHARACTERS} characters")
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not arithmetic") from error


def _evaluate(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > _MAX_EXPONENT or left < 0 > right):
            raise ValueError(f"exponents go up to {_MAX_EXPONENT}")
        return _check_size(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets are allowed")


def _check_size(number: Any) -> Number:
    if not isinstance(number, int | float) or not abs(number) <= _MAX_MAGNITUDE:
        raise ValueError("the result is too large, or no real number")
    return number


def _format_number(number: Number) -> str:
    """Without a decimal point where the number is whole."""
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return str(number) if isinstance(number, int) else f"{number:.10g}"
