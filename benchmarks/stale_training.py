"""``python -m benchmarks.stale_training``: the ``agentrl`` command, with tokens as old as may be.

On a small machine the trainer waits for rollouts, and what it gets is hardly ever older than two
weight updates, whatever ``rollout.max_staleness`` is. Here a step is made only when every
trajectory that has been admitted has ended; so from step ``max_staleness + 1`` on, each one learns
from tokens that are exactly ``max_staleness`` weight updates old.
"""

from __future__ import annotations

from agentrl_cli.cli.app import main
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.step_planner import StepPlanner

_take_step = StepPlanner.take_step


def _take_step_when_all_have_ended(planner: StepPlanner) -> list[Trajectory] | None:
    if any(place.num_left for place in planner._places.values()):
        return None
    return _take_step(planner)


if __name__ == "__main__":
    StepPlanner.take_step = _take_step_when_all_have_ended  # type: ignore[method-assign]
    main()
