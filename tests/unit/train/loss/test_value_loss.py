"""The value loss by hand, with gradients, and the explained variance."""

from __future__ import annotations

import pytest
import torch

from agentrl_cli.train.loss.value_loss import compute_explained_variance, compute_value_loss


def test_without_a_clip_it_is_half_the_mean_square():
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    found = compute_value_loss(
        values, torch.zeros(2), torch.tensor([3.0, 1.0]), clip_range=None, num_targets=2
    )
    # (4 + 1) / 2 / 2; gradient (V - R) / 2
    assert found.loss.item() == pytest.approx(1.25)
    found.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.0, -0.5])
    assert found.num_clipped == 0


def test_a_value_that_moved_far_enough_has_no_gradient():
    # Old 0, return 1, clip 0.2. 0.5 is beyond the clip: (0.2 - 1)² = 0.64 instead of 0.25.
    # 0.1 is within. -0.5 moved the wrong way: the larger (-0.5 - 1)² = 2.25 keeps its gradient.
    values = torch.tensor([0.5, 0.1, -0.5], requires_grad=True)
    found = compute_value_loss(values, torch.zeros(3), torch.ones(3), clip_range=0.2, num_targets=3)
    assert found.loss.item() == pytest.approx((0.64 + 0.81 + 2.25) / 6)
    assert found.num_clipped == 1
    found.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9 / 3, -1.5 / 3])


def test_the_clip_is_around_the_old_value_on_either_side():
    # Old 1, return 0, clip 0.2: the mirror image. 0.5 is held at 0.8, 0.9 is within, 1.5 the
    # wrong way.
    values = torch.tensor([0.5, 0.9, 1.5], requires_grad=True)
    found = compute_value_loss(values, torch.ones(3), torch.zeros(3), clip_range=0.2, num_targets=3)
    assert found.loss.item() == pytest.approx((0.64 + 0.81 + 2.25) / 6)
    assert found.num_clipped == 1
    found.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.9 / 3, 1.5 / 3])


def test_a_value_beyond_its_return_by_more_than_the_clip_comes_back():
    # Old 0, return 0.1, value 1: (1 - 0.1)² is larger than (0.2 - 0.1)².
    values = torch.tensor([1.0], requires_grad=True)
    found = compute_value_loss(
        values, torch.zeros(1), torch.tensor([0.1]), clip_range=0.2, num_targets=1
    )
    found.loss.backward()
    assert found.loss.item() == pytest.approx(0.81 / 2)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(0.9)


def test_parts_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    new, old, returns = (torch.randn(10, generator=generator) for _ in range(3))
    whole = compute_value_loss(new, old, returns, clip_range=0.3, num_targets=10)
    parts = [
        compute_value_loss(new[cut], old[cut], returns[cut], clip_range=0.3, num_targets=10)
        for cut in (slice(0, 3), slice(3, 3), slice(3, 10))
    ]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item())
    assert sum(p.num_clipped.item() for p in parts) == whole.num_clipped


def test_explained_variance():
    returns = torch.tensor([0.0, 2.0])
    assert compute_explained_variance(returns, returns) == 1.0
    # A constant explains nothing, however far off it is.
    assert compute_explained_variance(torch.tensor([5.0, 5.0]), returns) == 0.0
    # Residuals 1.5 and 0.5: variance 0.25 of 1.
    assert compute_explained_variance(torch.tensor([-1.5, 1.5]), returns) == pytest.approx(0.75)
    # Residuals -2 and 2: variance 4 of 1.
    assert compute_explained_variance(torch.tensor([2.0, 0.0]), returns) == pytest.approx(-3.0)
    # Residuals -1 and 1: variance 1 of 4.
    wide = torch.tensor([0.0, 4.0])
    assert compute_explained_variance(torch.tensor([1.0, 3.0]), wide) == pytest.approx(0.75)
    # Small is not equal.
    assert compute_explained_variance(returns * 1e-7, returns * 1e-7) == 1.0


@pytest.mark.parametrize("returns", [[], [1.0], [0.0, 0.0], [0.3, 0.3, 0.3]])
def test_nothing_is_explained_where_returns_are_equal(returns: list[float]):
    assert compute_explained_variance(torch.zeros(len(returns)), torch.tensor(returns)) is None
