"""How many trajectories run at a time: as many as keep the engine busy, and few more.

A trajectory that waits for a seat at the engine gains nothing and costs much: its prompt's cache is
evicted before its next call, and with ``max_staleness`` its tokens age. One too few leaves a seat
empty. How many agents fill the seats depends on how long they spend in tools, which nobody knows
before; so the limit follows what the engine says of itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl_cli.engine.protocol import EngineLoad

#: Calls for each seat: a few wait, so that a seat which becomes free is taken at once.
_CALLS_PER_SEAT = 1.1
#: A limit that is far off is approached in steps, since what is measured lags behind.
_MAX_FALL, _MAX_RISE = 0.7, 1.5
#: Of what was measured before, in the share of its time that a trajectory spends at the engine.
_MEMORY = 0.8
#: By so much, from one update to the next, more calls are tried than memory was seen for.
_MEMORY_GROWTH = 1.02
#: A running batch that is smaller than this share of the seats while calls wait lacks memory.
_FULL = 0.9


@dataclass(slots=True)
class ConcurrencyLimit:
    """A limit between ``floor`` and ``ceiling`` that follows the engine's load."""

    floor: int
    ceiling: int
    value: int
    """Trajectories that may run at a time."""
    _share: float = math.nan
    """Of its time, how much a trajectory spends in calls, waiting included."""
    _capacity: float = math.inf
    """Calls that the engine was seen to have memory for."""

    @classmethod
    def for_seats(cls, num_seats: int, *, floor: int, ceiling: int) -> ConcurrencyLimit:
        """As if agents did nothing but call the model: more are let in as their pauses show."""
        value = math.ceil(num_seats * _CALLS_PER_SEAT)
        return cls(floor=floor, ceiling=ceiling, value=min(max(value, floor), ceiling))

    def update(self, num_running: int, load: EngineLoad, num_preempted: int) -> int:
        """The limit from now on.

        Args:
            num_running: trajectories in progress.
            load: of all servers together.
            num_preempted: calls that lost their memory to others since the last update.
        """
        num_calls = load.num_running + load.num_waiting
        # After a fall, more run than may until they end: what is measured is not yet its effect.
        if not num_calls or not load.num_seats or num_running > self.value:
            return self.value
        share = min(1.0, num_calls / num_running)
        known = share if math.isnan(self._share) else self._share
        self._share = _MEMORY * known + (1 - _MEMORY) * share
        if num_preempted or (load.num_waiting and load.num_running < _FULL * load.num_seats):
            # The memory for keys and values holds no more: those that were preempted wait now.
            self._capacity = max(1, load.num_running - num_preempted)
        else:
            # How long contexts are changes.
            self._capacity *= _MEMORY_GROWTH
        wanted = min(load.num_seats, self._capacity) * _CALLS_PER_SEAT
        change = min(max(wanted / self._share / self.value, _MAX_FALL), _MAX_RISE)
        # Whether more would be used is unknown while even the present limit is not reached.
        if change < 1 or num_running == self.value:
            changed = self.value * change
            rounded = math.ceil(changed) if change > 1 else math.floor(changed)
            self.value = min(max(rounded, self.floor), self.ceiling)
        return self.value
