"""An agent that keeps a list of words sorted while more of them arrive, over three turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples.alphabet_sort.reward import score_turn

_SYSTEM = (
    "You sort words in alphabetical order. When more words are added, you answer with all words so "
    "far, sorted."
)
#: Shows how the replies grow; nothing here is sampled, so nothing is trained on.
_EXAMPLE = ("sort tree cat", "cat tree", "add bird apple", "apple bird cat tree")


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> dict[str, float]:
    """The reward of each of its turns, by the id of the completion."""
    messages: list[Any] = [{"role": "system", "content": _SYSTEM}]
    for number, text in enumerate(_EXAMPLE):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    words: list[str] = []
    rewards: dict[str, float] = {}
    for added in data["turns"]:
        words += added
        verb = "add" if rewards else "sort"
        messages.append({"role": "user", "content": " ".join([verb, *added])})
        completion = await client.chat.completions.create(model=model, messages=messages)
        reply = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        rewards[completion.id] = score_turn(reply, words)
    return rewards


def build_agent() -> Any:
    """The agent."""
    return solve
