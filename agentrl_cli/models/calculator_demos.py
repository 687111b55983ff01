"""Demonstrations for the built-in calculator model: a curriculum of three parts.

1. Tool calls without instructions and tools before them. Copying the numbers of a
   question into a call is what takes a small model long; the prompt, four fifths of a
   whole conversation, would make every lesson in it five times dearer.
2. Tool calls in whole conversations, as the agent sends them.
3. Whole conversations, most of which answer at once, with a number of the question, which
   is nearly always wrong; the others call the tool. The model that comes out knows how to
   use the tool and seldom does: what is left to reinforcement is to use it more.

The quick answers repeat a number, rather than guess: random digits teach nothing, and
their gradients undo what was learned of copying.
"""

from __future__ import annotations

import random
from typing import Any

from agentrl_cli.models.calculator_prompt import CALCULATE_TOOL, SYSTEM_PROMPT
from agentrl_cli.models.calculator_tasks import Question, draw_question
from agentrl_cli.records import Message


def build_demonstrations(
    *,
    num_bare_rows: int = 7500,
    num_tool_rows: int = 3000,
    num_mixed_rows: int = 1000,
    tool_rate: float = 0.25,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Rows for ``agentrl sft``, to be trained on in this order.

    Args:
        num_bare_rows: rows of the first part.
        num_tool_rows: rows of the second part.
        num_mixed_rows: rows of the third part.
        tool_rate: share of the third part's rows that call the tool.
        seed: the same seed gives the same rows.
    """
    rng = random.Random(seed)
    bare = [{"messages": _draw_messages(rng, 1.0)[1:]} for _ in range(num_bare_rows)]
    rates = [1.0] * num_tool_rows + [tool_rate] * num_mixed_rows
    whole = [{"messages": _draw_messages(rng, rate), "tools": [CALCULATE_TOOL]} for rate in rates]
    return [*bare, *whole]


def _draw_messages(rng: random.Random, tool_rate: float) -> list[Message]:
    question = draw_question(rng, "train")
    asked: list[Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.text},
    ]
    if rng.random() >= tool_rate:
        return [*asked, {"role": "assistant", "content": question.numbers[-1]}]
    return [*asked, *_demonstrate_tool(rng, question)]


def _demonstrate_tool(rng: random.Random, question: Question) -> list[Message]:
    call_id = f"call_{rng.randrange(10**9):09d}"
    function = {"name": "calculate", "arguments": {"expression": question.expression}}
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": str(question.answer)},
        {"role": "assistant", "content": str(question.answer)},
    ]
