"""What happened to the engine's servers during a step, for its line of metrics."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl_cli.engine.protocol import InferenceEngine, ServerFaultCounter


class EngineFaults:
    """Turns an engine's running counts into those of each step.

    Args:
        engine: any; one without servers has nothing to count.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._counter = engine if isinstance(engine, ServerFaultCounter) else None
        self._counted: Mapping[str, int] = {}

    def take(self) -> dict[str, float]:
        """What was counted since the last time; empty where there are no servers."""
        if self._counter is None:
            return {}
        counts = dict(self._counter.fault_counts)
        new = {name: float(n - self._counted.get(name, 0)) for name, n in counts.items()}
        self._counted = counts
        return {**new, "num_servers_out": float(self._counter.num_servers_out)}
