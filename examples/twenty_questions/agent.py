"""Two agents play twenty questions: the one that is trained asks, and a scripted one answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples.twenty_questions.answerer import Answerer

_SYSTEM = (
    "Find my secret animal with few questions. It is one of: {animals}. Ask one short question "
    "each time, like: Can it fly? or: Is it a pet? or name the animal, like: Is it a {example}?"
)


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str, max_turns: int) -> float:
    """Plays one game; the reward is higher the fewer questions it took."""
    answerer = Answerer(data["secret"])
    system = _SYSTEM.format(animals=", ".join(data["animals"]), example=data["animals"][0])
    messages: list[Any] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Ask."},
    ]
    for number in range(max_turns):
        completion = await client.chat.completions.create(model=model, messages=messages)
        question = completion.choices[0].message.content or ""
        answer = answerer.answer(question)
        if answerer.is_found:
            return 1.0 - number / (2 * max_turns)
        messages += [
            {"role": "assistant", "content": question},
            {"role": "user", "content": answer},
        ]
    return 0.0


def build_agent() -> Any:
    """The agent that asks."""
    return solve
