"""The statistic by which weights are verified."""

from __future__ import annotations

import math

import pytest

from agentrl_cli.engine.probes import compute_probe_gap

LIKELY, RARE = math.log(0.5), math.log(1e-4)


@pytest.mark.parametrize(
    ("engine", "mean", "largest"),
    [
        ({1: LIKELY, 2: RARE}, 0.0, 0.0),
        # A rare token moves by rounding; it hardly counts.
        ({1: LIKELY, 2: RARE + 0.3}, 0.3 * 1.175 * 2e-4, 0.3),
        ({1: LIKELY - 0.3, 2: RARE}, 0.3, 0.3),
        # What a foreign model holds likely is not likely to the trainer.
        ({1: LIKELY, 2: math.log(0.4)}, math.log(4000) * 0.2 / 0.7, math.log(4000)),
        # Not among the reported ones, so less likely than those.
        ({3: LIKELY, 2: RARE}, LIKELY - RARE, LIKELY - RARE),
        ({1: LIKELY, 2: math.nan}, math.inf, math.inf),
        ({}, math.inf, math.inf),
    ],
)
def test_the_gap_is_weighted_by_probability(engine, mean, largest):
    gap = compute_probe_gap([engine], [{1: LIKELY, 2: RARE}])
    assert gap.mean == pytest.approx(mean, rel=2e-2, abs=1e-9)
    assert gap.max == pytest.approx(largest)
