"""An agent that keeps a list of words sorted while more of them arrive, over three turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.alphabet_sort.reward import score_turn

SYSTEM = (
    "You sort words in alphabetical order. When more words are added, you answer with all words so "
    "far, sorted."
)


def format_request(added: Sequence[str], *, is_first: bool) -> str:
    """What the user says in a turn."""
    return " ".join(["sort" if is_first else "add", *added])


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> dict[str, float]:
    """The reward of each of its turns, by the id of the completion."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    words: list[str] = []
    rewards: dict[str, float] = {}
    for added in data["turns"]:
        request = format_request(added, is_first=not words)
        words += added
        messages.append({"role": "user", "content": request})
        completion = await client.chat.completions.create(model=model, messages=messages)
        reply = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        rewards[completion.id] = score_turn(reply, words)
    return rewards


def build_agent() -> Any:
    """The agent."""
    return solve
