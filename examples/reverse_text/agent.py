"""An agent that reverses the words of a line with one call of the OpenAI SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

_SYSTEM = "You reverse the order of words. For the words: one two three, you answer: three two one"


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> str:
    """The model's reply."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": data["text"]},
        ],
    )
    return completion.choices[0].message.content or ""


def build_agent() -> Any:
    """The agent."""
    return solve
