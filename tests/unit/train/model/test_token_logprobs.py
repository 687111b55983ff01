"""Logprobs of sampled tokens: by hand, against the engine's formula, and in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from agentrl_cli.engine.embedded.token_sampling import sample_tokens
from agentrl_cli.train.model.output_head import compute_logprobs


def identity(logits: Tensor) -> Tensor:
    """A head for tests that give the logits themselves."""
    return logits


def score(
    logits: list[list[float]], targets: list[int], temperature: float = 1.0, top_p: float = 1.0
) -> tuple[list[float], list[float]]:
    count = len(targets)
    found = compute_logprobs(
        torch.tensor(logits), identity, torch.tensor(targets),
        torch.full((count,), temperature), torch.full((count,), top_p),
    )  # fmt: skip
    return found.logprobs.tolist(), found.entropies.tolist()


LOG_2 = math.log(2.0)
#: Probabilities 1/2, 1/4, 1/4.
LOGITS = [LOG_2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("targets", "settings", "logprobs", "entropies"),
    [
        # Entropy: 1/2 ln 2 + 2 x 1/4 ln 4 = 1.5 ln 2.
        ([0, 2], {}, [1 / 2, 1 / 4], [1.5 * LOG_2] * 2),
        # Temperature 1/2 squares the odds: 4 : 1 : 1.
        ([0, 1], {"temperature": 0.5}, [4 / 6, 1 / 6], None),
        # top_p 0.7: 1/2 is not enough, 1/2 + 1/4 is; the nucleus is tokens 0 and 1, 2/3 and 1/3.
        ([0, 1], {"top_p": 0.7}, [2 / 3, 1 / 3], [math.log(3) - 2 / 3 * LOG_2] * 2),
        # Nucleus of 0.4: token 0. A sampled token outside is added: 1/2 to 1/4, so 2/3 and 1/3.
        ([0, 2], {"top_p": 0.4}, [1.0, 1 / 3], [0.0, math.log(3) - 2 / 3 * LOG_2]),
    ],
)
def test_by_hand(
    targets: list[int],
    settings: dict[str, float],
    logprobs: list[float],
    entropies: list[float] | None,
):
    found = score([LOGITS, LOGITS], targets, **settings)
    assert found[0] == pytest.approx([math.log(one) for one in logprobs], abs=1e-6)
    if entropies is not None:
        assert found[1] == pytest.approx(entropies, abs=1e-6)


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 0.05])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_equal_to_what_the_engine_says_of_the_tokens_it_samples(temperature: float, top_p: float):
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(200, 50, generator=generator)
    uniforms = torch.rand(200, generator=generator).tolist()
    tokens, expected, _ = sample_tokens(logits, [temperature] * 200, [top_p] * 200, uniforms)
    found = compute_logprobs(
        logits, identity, tokens, torch.full((200,), temperature), torch.full((200,), top_p)
    )
    torch.testing.assert_close(found.logprobs, expected, atol=1e-5, rtol=0.0)


def test_no_tokens_still_have_a_path_for_gradients():
    hidden = torch.zeros(0, 4, requires_grad=True)
    nothing = torch.zeros(0)
    found = compute_logprobs(hidden, nn.Linear(4, 9), nothing.long(), nothing, nothing)
    assert found.logprobs.shape == (0,)
    found.logprobs.sum().backward()
    assert hidden.grad is not None
