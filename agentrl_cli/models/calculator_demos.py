"""Demonstrations for the built-in calculator model.

Most questions are answered directly, and wrongly; in the rest the tool is called
and its result is the answer. A model that imitates them knows both ways well and
prefers the wrong one: what is left to reinforcement is to raise the use of the tool.
"""

from __future__ import annotations

import random
from typing import Any

from agentrl_cli.models.calculator_prompt import CALCULATE_TOOL, SYSTEM_PROMPT
from agentrl_cli.models.calculator_tasks import Question, draw_question
from agentrl_cli.records import Message


def build_demonstrations(
    *, num_rows: int, questions_per_row: int, tool_rate: float, seed: int
) -> list[dict[str, Any]]:
    """Conversations of several questions each; ``tool_rate`` of the answers use the tool.

    Several questions share one system prompt, which is most of a short conversation:
    more is learned from the same number of tokens.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        messages: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
        for _ in range(rng.randint(1, questions_per_row)):
            messages += _demonstrate(rng, draw_question(rng, "train"), rng.random() < tool_rate)
        rows.append({"messages": messages, "tools": [CALCULATE_TOOL]})
    return rows


def _demonstrate(rng: random.Random, question: Question, uses_tool: bool) -> list[Message]:
    asked: Message = {"role": "user", "content": question.text}
    if not uses_tool:
        return [asked, {"role": "assistant", "content": str(_guess(rng, question))}]
    call_id = f"call_{rng.randrange(10**9):09d}"
    function = {"name": "calculate", "arguments": {"expression": question.expression}}
    return [
        asked,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": str(question.answer)},
        {"role": "assistant", "content": str(question.answer)},
    ]


def _guess(rng: random.Random, question: Question) -> int:
    """A guess in the right region, right about once in twenty times."""
    return max(1, question.answer + rng.randint(-10, 10))
