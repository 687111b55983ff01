"""An agent that solves a word problem in one reply that ends in the number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

_SYSTEM = "Solve the problem in one short line, then end with the number."
_EXAMPLE = (
    {"role": "user", "content": "Sara has 14 hats and buys 3 more. How many hats are these?"},
    {"role": "assistant", "content": "14 + 3 = 17\n#### 17"},
)


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> str:
    """The model's reply."""
    question = {"role": "user", "content": data["question"]}
    messages: list[Any] = [{"role": "system", "content": _SYSTEM}, *_EXAMPLE, question]
    completion = await client.chat.completions.create(model=model, messages=messages)
    return completion.choices[0].message.content or ""


def build_agent() -> Any:
    """The agent."""
    return solve
