"""Means with intervals, and pass@k: pure functions on small inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

Interval = tuple[float, float]


def compute_mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def compute_clustered_interval(clusters: Sequence[Sequence[float]]) -> Interval | None:
    """The 95 % interval of the mean over all values, which are alike within a cluster.

    Attempts at the same task are no independent observations: with tasks as clusters t
    of values y_ti, N values in G clusters and the mean m over all values,

        variance = G / (G - 1) x sum over t of (sum over i of (y_ti - m))^2 / N^2
        interval = m +- t(0.975, G - 1) x sqrt(variance)

    the cluster-robust variance of a mean with the usual correction for few clusters
    (Cameron and Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference",
    section II.C). With one value a cluster it is the ordinary t interval. None with
    fewer than two clusters, which say nothing about the spread.
    """
    filled = [values for values in clusters if values]
    num_clusters = len(filled)
    if num_clusters < 2:
        return None
    num_values = sum(len(values) for values in filled)
    mean = math.fsum(v for values in filled for v in values) / num_values
    squares = math.fsum(math.fsum(v - mean for v in values) ** 2 for values in filled)
    variance = num_clusters / (num_clusters - 1) * squares / num_values**2
    margin = compute_t_quantile(0.975, num_clusters - 1) * math.sqrt(variance)
    return mean - margin, mean + margin


def compute_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, for probabilities above one half.

    Exact for 1 and 2 degrees of freedom; beyond, the expansion of Abramowitz and Stegun,
    "Handbook of Mathematical Functions", 26.7.5 (off by 0.2 % at 3 degrees for 0.975, less
    above).
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def compute_pass_at_k(outcomes: Mapping[str, Sequence[bool]], k: int) -> float | None:
    """The chance that at least one of ``k`` attempts at a task passes, averaged over tasks.

    Unbiased for each task with n >= k attempts, c of them passed: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, equation 1). Tasks with fewer attempts are left
    out; None when that leaves none.
    """
    values = []
    for passed in outcomes.values():
        num_attempts, num_failed = len(passed), len(passed) - sum(passed)
        if num_attempts >= k:
            values.append(1.0 - math.comb(num_failed, k) / math.comb(num_attempts, k))
    return compute_mean(values)
