"""The agent's tool, and what the model is told of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# The built-in model of train.yaml was taught with exactly this prompt, tool and schema, and
# understands no others. With a real model, change whatever you like.
SYSTEM_PROMPT = "Answer with a number."

SCHEMA: dict[str, Any] = {
    "name": "calculate",
    "description": "Does arithmetic.",
    "parameters": {
        "properties": {"expression": {"title": "Expression", "type": "string"}},
        "required": ["expression"],
        "title": "calculate_args",
        "type": "object",
        "additionalProperties": False,
    },
    "strict": True,
}

_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", re.ASCII)


def calculate(expression: str) -> str:
    """Does arithmetic."""
    # A model may write anything: what is wrong is told to it, so that it can try again.
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "error: write two whole numbers with +, - or * between them, as in 12*7"
    left, operator, right = int(match[1]), match[2], int(match[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


def call_tool(name: str, arguments: Any) -> str:
    """What the tool answers to a model's call, for agents without a framework that calls tools."""
    expression = arguments.get("expression") if isinstance(arguments, Mapping) else None
    if name != "calculate" or not isinstance(expression, str):
        return "error: the only tool is calculate, and it takes an expression"
    return calculate(expression)
