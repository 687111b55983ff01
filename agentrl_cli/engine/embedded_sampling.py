"""Logits to tokens: one draw per row, each row with its own temperature, top_p and chance."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sample_tokens(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row (int64, shape [rows]) and its logprob (float32, nats, shape [rows]).

    The logprob is that of the distribution drawn from: after temperature and top_p.
    Rows with temperature 0 take the likeliest token, with logprob 0. A row is a function
    of its own arguments alone, so a seed gives the same tokens whatever else is batched.

    Args:
        logits: float32, shape [rows, vocabulary].
        temperatures: 0 or more; 0 is greedy.
        top_ps: in (0, 1]: the smallest set of likeliest tokens with at least this mass is kept.
        uniforms: in [0, 1): what inverts the row's cumulative distribution.
    """
    temperature = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / temperature.masked_fill(greedy, 1.0), dim=-1)
    if min(top_ps) < 1.0:
        logprobs = _keep_nucleus(logprobs, torch.tensor(top_ps, device=logits.device))
    # float64: in float32 the sum over a large vocabulary loses what is rarer than 1e-7.
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    if cumulative.is_cuda:
        # A parallel sum may step down by one ulp, and a search needs it never to.
        cumulative = cumulative.cummax(dim=-1).values
    total = cumulative[:, -1:]
    chance = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1)
    # Below the total, always: else rounding could point past the last token of any mass.
    target = torch.minimum(chance * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    tokens = tokens.clamp(max=logits.shape[1] - 1)
    if min(temperatures) == 0:
        tokens = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), tokens)
    chosen = logprobs.gather(1, tokens)
    return tokens.squeeze(1), chosen.masked_fill(greedy & chosen.isfinite(), 0.0).squeeze(1)


def _keep_nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logprobs renormalized over each row's nucleus, -inf outside of it."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.exp()
    mass_before = mass.cumsum(dim=-1) - mass
    # A row with top_p 1 keeps all of it, whatever the sum rounds to.
    dropped = (mass_before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1)
    dropped[:, 0] = False
    kept = logprobs.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    return torch.log_softmax(kept, dim=-1)
