"""An agent that guesses a number from hints, on Anthropic's SDK, and the game that it plays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

_SYSTEM = (
    "Guess my number from 1 to {highest}. After each guess I say higher or lower. "
    "Answer with one number only, for example: {middle}"
)


class Game:
    """Knows a number and answers guesses until it is found or no guess is left."""

    def __init__(self, secret: int, max_guesses: int) -> None:
        self._secret = secret
        self._max_guesses = max_guesses
        self.num_guesses = 0
        self.is_found = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to guess any more."""
        return self.is_found or self.num_guesses == self._max_guesses

    def answer(self, reply: str) -> str:
        """What the game says to a reply; one without a number costs a guess, too."""
        self.num_guesses += 1
        found = re.search(r"\d+", reply)
        if found is None:
            return "Say a number."
        guess = int(found[0])
        self.is_found = guess == self._secret
        return "higher" if guess < self._secret else "lower"

    def score(self) -> float:
        """1.0 for the first guess, a little less for each further one, 0.0 for none."""
        return 1.0 - (self.num_guesses - 1) / (2 * self._max_guesses) if self.is_found else 0.0


async def solve(data: Mapping[str, Any], anthropic_client: AsyncAnthropic, model: str) -> float:
    """Plays one game; its score is the reward."""
    game = Game(data["secret"], data["max_guesses"])
    system = _SYSTEM.format(highest=data["highest"], middle=data["highest"] // 2)
    messages: list[Any] = [{"role": "user", "content": "Guess."}]
    while not game.is_over:
        reply = await anthropic_client.messages.create(
            model=model, max_tokens=8, system=system, messages=messages
        )
        text = "".join(block.text for block in reply.content if block.type == "text")
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": game.answer(text)},
        ]
    return game.score()


def build_agent() -> Any:
    """The agent."""
    return solve
