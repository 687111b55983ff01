"""What the calculator's agent sends to the model: its instructions and its tool.

The built-in model learns from demonstrations with exactly this prompt and knows no
other: a test holds it equal to what the OpenAI Agents SDK sends for
``builders.calculator_agent``.
"""

from __future__ import annotations

from typing import Any

SYSTEM_PROMPT = "Answer with a number."

#: As the OpenAI Agents SDK 0.24 writes it.
CALCULATE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
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
    },
}
