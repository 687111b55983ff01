"""Estimates of the KL divergence, their values, gradients and means, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl_cli.train.divergence import KlEstimator, compute_kl

LOG_2 = math.log(2.0)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # d = new - ref = -ln 2, ln 2, 0.
        ("k1", [-LOG_2, LOG_2, 0.0], [1.0, 1.0, 1.0]),
        ("k2", [LOG_2**2 / 2, LOG_2**2 / 2, 0.0], [-LOG_2, LOG_2, 0.0]),
        # exp(-d) + d - 1 = 2 - ln 2 - 1 and 1/2 + ln 2 - 1; gradient 1 - exp(-d).
        ("k3", [1 - LOG_2, LOG_2 - 0.5, 0.0], [-1.0, 0.5, 0.0]),
    ],
)
def test_by_hand(estimator: KlEstimator, values: list[float], gradients: list[float]):
    new = tensor([-1.0, -1.0, -1.0]).requires_grad_()
    kl = compute_kl(estimator, new, tensor([-1.0 + LOG_2, -1.0 - LOG_2, -1.0]))
    kl.sum().backward()
    assert kl.tolist() == pytest.approx(values)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(gradients)


def test_k3_is_finite_far_away():
    far = compute_kl("k3", tensor([-600.0]), tensor([0.0]))
    assert far.item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_k3_is_exact_nearby():
    # d = 2^-13: d² / 2 - d³ / 6 = 7.45e-9, less than the last digit of a float32 near 1.
    near = compute_kl("k3", torch.tensor([-1.0]), torch.tensor([-1.0 - 2.0**-13]))
    assert near.item() == pytest.approx(2.0**-27, rel=2e-3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_what_the_policy_samples_is_the_divergence(estimator: KlEstimator):
    # Policy (0.5, 0.3, 0.2) against (0.2, 0.3, 0.5): 0.5 ln 2.5 + 0 + 0.2 ln 0.4.
    policy, reference = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.3, 0.5])
    mean = (policy * compute_kl(estimator, policy.log(), reference.log())).sum()
    assert mean.item() == pytest.approx(0.5 * math.log(2.5) + 0.2 * math.log(0.4))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_which_estimator_has_the_divergences_gradient(estimator: KlEstimator):
    # As a loss over what the policy samples, k2 has the gradient of the divergence, k1 none.
    logits = tensor([0.4, -0.2, 0.1]).requires_grad_()
    reference = tensor([0.2, 0.3, 0.5]).log()

    def gradient_of(loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, logits)
        return gradient

    logprobs = logits.log_softmax(-1)
    exact = gradient_of((logprobs.exp() * (logprobs - reference)).sum())
    logprobs = logits.log_softmax(-1)
    sampled = (logprobs.exp().detach() * compute_kl(estimator, logprobs, reference)).sum()
    expected = exact if estimator == "k2" else torch.zeros(3, dtype=torch.float64)
    assert gradient_of(sampled).tolist() == pytest.approx(expected.tolist(), abs=1e-12)
