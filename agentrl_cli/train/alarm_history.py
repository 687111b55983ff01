"""The metrics of a run as alarms see them: the last lines, and what is to be kept of all others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

#: Steps whose entropy is the level that later ones are compared with.
NUM_FIRST_STEPS = 5
#: Share of the way from the lowest mean reward to the best reward that counts as arrived.
_SOLVED_SHARE = 0.9


class History:
    """Lines of ``metrics.jsonl`` in order; a function of what is stored of them.

    Args:
        lines: of the steps so far.
    """

    def __init__(self, lines: Iterable[Mapping[str, float]] = ()) -> None:
        self._current: Mapping[str, float] = {}
        self._previous: Mapping[str, float] = {}
        self._best_reward = -math.inf
        self._lowest_mean = math.inf
        self._first_entropies: list[float] = []
        self._first_gap: float | None = None
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, float]) -> None:
        """The line of the next step."""
        self._previous, self._current = self._current, line
        self._best_reward = max(self._best_reward, self.read_or("reward_max", -math.inf))
        self._lowest_mean = min(self._lowest_mean, self.read_or("reward_mean", math.inf))
        entropy = self.read_trained("entropy")
        if entropy is not None and len(self._first_entropies) < NUM_FIRST_STEPS:
            self._first_entropies.append(entropy)
        if self._first_gap is None:
            self._first_gap = self.read_trained("logprob_gap_mean")

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.read_or("step", 0.0))

    def read(self, name: str) -> float | None:
        """A metric of the last step; None where it has none that is finite."""
        return _read_finite(self._current, name)

    def read_or(self, name: str, default: float) -> float:
        """The same, ``default`` for None."""
        value = self.read(name)
        return default if value is None else value

    def read_previous(self, name: str) -> float | None:
        """A metric of the step before the last."""
        return _read_finite(self._previous, name)

    def read_trained(self, name: str) -> float | None:
        """A mean over trained tokens; None where the step trained on none: it is 0 then."""
        return self.read(name) if self.read_or("train_tokens", 0.0) > 0 else None

    def count_groups(self) -> tuple[int, int]:
        """The groups that the last step learned from, and those of them without signal.

        Groups that were replaced are none of them: ``rollout.filter`` has done its work.
        """
        num_replaced = self.read_or("num_replaced_groups", 0.0)
        num_groups = self.read_or("num_groups", 0.0) - num_replaced
        without = self.read_or("num_groups_without_signal", 0.0) - num_replaced
        return int(num_groups), int(without)

    @property
    def best_reward(self) -> float:
        """The highest reward that any trajectory had; -inf where none is known."""
        return self._best_reward

    @property
    def first_entropy(self) -> float | None:
        """The level of the run's first steps, nats; None until there are enough of them."""
        if len(self._first_entropies) < NUM_FIRST_STEPS:
            return None
        return statistics.median(self._first_entropies)

    @property
    def first_gap(self) -> float | None:
        """``logprob_gap_mean`` of the first step that trained."""
        return self._first_gap

    def is_solved(self) -> bool:
        """True where the last step's rewards are nearly the best there were, and once were not.

        What then stands still has been learned; that is no failure.
        """
        mean = self.read("reward_mean")
        if mean is None or not self._lowest_mean < self._best_reward:
            return False
        way = self._best_reward - self._lowest_mean
        return mean >= self._lowest_mean + _SOLVED_SHARE * way


def _read_finite(line: Mapping[str, float], name: str) -> float | None:
    # What is not finite is stored as null: both are nothing, so that a run which is started
    # again sees what one that never stopped did.
    value = line.get(name)
    return value if value is not None and math.isfinite(value) else None
