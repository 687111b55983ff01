"""An agent that keeps a list of words sorted while more of them arrive, over three turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples.alphabet_sort.reward import score_turn

_SYSTEM = (
    "You sort all words so far in alphabetical order. "
    "For the words: tree cat, you answer: cat tree. After: add bird, you answer: bird cat tree"
)


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> dict[str, float]:
    """The reward of each of its turns, by the id of the completion."""
    messages: list[Any] = [{"role": "system", "content": _SYSTEM}]
    words: list[str] = []
    rewards: dict[str, float] = {}
    for added in data["turns"]:
        words += added
        prefix = "add " if rewards else ""
        messages.append({"role": "user", "content": prefix + " ".join(added)})
        completion = await client.chat.completions.create(model=model, messages=messages)
        reply = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        rewards[completion.id] = score_turn(reply, words)
    return rewards


def build_agent() -> Any:
    """The agent."""
    return solve
