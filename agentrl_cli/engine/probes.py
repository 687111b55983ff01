"""Whether an engine holds the trainer's weights, from what it says of a few next tokens.

Rounding in bfloat16 moves a token of probability 1e-4 by tenths of a nat on a sound engine, as
much as a stale layer moves a likely one. So no single token is judged, but the mean over the likely
tokens after each prompt, weighted by probability, in which rare ones hardly count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_cli.engine.protocol import MAX_TOP_LOGPROBS, Generation, Probe, Sampling

#: One step of the engine gives the logprobs of as many tokens as it reports: a probe of several
#: sampled tokens would wait for several steps, each as long as all calls in flight make it. And it
#: goes before the calls that wait, for which a run waits less than for its weights.
PROBE_SAMPLING = Sampling(max_tokens=1, num_top_logprobs=MAX_TOP_LOGPROBS, seed=0, priority=-1)

Logprobs = Mapping[int, float]
"""Of tokens that may follow a prompt, in nats."""


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """How far two sides are apart on the same prompts."""

    mean: float
    """|difference| in nats, weighted by the mean of both sides' probabilities; NaN is infinite."""
    max: float
    """Of any token."""
    worst: str
    """The token that adds most to the mean, with both numbers."""

    def describe(self, tolerance: float) -> str:
        """For the message of a failure."""
        return (
            f"Over {MAX_TOP_LOGPROBS} likely tokens after each probe prompt, weighted by "
            f"probability, their logprobs are {self.mean:.2e} nats apart; allowed "
            f"{tolerance:.2e}. Most at {self.worst}"
        )


def read_likely(generations: Sequence[Generation]) -> list[Logprobs]:
    """What an engine said of the next token after each prompt."""
    return [dict(g.top_logprobs[0]) if g.top_logprobs else {} for g in generations]


def compute_probe_gap(engine: Sequence[Logprobs], trainer: Sequence[Logprobs]) -> ProbeGap:
    """The gap over the tokens of both sides, of which there is at least one.

    A token that one side did not report is less likely to it than all that it did report.
    """
    total, weights, largest, worst = 0.0, 0.0, 0.0, (-1.0, "")
    for index, (said, expected) in enumerate(zip(engine, trainer, strict=True)):
        lowest_said = min(said.values(), default=-math.inf)
        lowest_expected = min(expected.values(), default=-math.inf)
        for token in {**said, **expected}:
            found = said[token] if token in said else min(lowest_said, expected[token])
            truth = expected[token] if token in expected else min(lowest_expected, found)
            gap = abs(found - truth)
            gap = math.inf if math.isnan(gap) else gap
            weight = (_chance(found) + _chance(truth)) / 2
            # Infinite also where the weight is 0.
            part = gap * weight if gap < math.inf else gap
            total, weights, largest = total + part, weights + weight, max(largest, gap)
            numbers = f"engine logprob {found:.6f}, trainer {truth:.6f}"
            worst = max(worst, (part, f"prompt {index}, token {token}: {numbers}"))
    return ProbeGap(total / weights if weights else math.inf, largest, worst[1])


def compare_with_probes(generations: Sequence[Generation], probes: Sequence[Probe]) -> ProbeGap:
    """The gap of an engine to probes of the trainer's."""
    return compute_probe_gap(read_likely(generations), [dict(probe.logprobs) for probe in probes])


def _chance(logprob: float) -> float:
    return 0.0 if math.isnan(logprob) else math.exp(min(logprob, 0.0))
