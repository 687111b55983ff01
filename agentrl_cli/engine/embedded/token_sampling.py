"""Logits to tokens, and stop texts in them.

Each row of a step's logits has its own mask, temperature, top_p and random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from agentrl_cli.engine.grammar import TokenMatcher

_WORD_BITS = 32


class Drawn(NamedTuple):
    """One token per row."""

    tokens: torch.Tensor
    """int64, shape [rows]."""
    logprobs: torch.Tensor
    """float32, nats, shape [rows]; 0 in greedy rows."""
    distribution: torch.Tensor
    """float32 logprobs of every token, shape [rows, vocabulary], -inf where it could not be
    drawn; of greedy rows, at temperature 1."""


def unpack_masks(masks: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """Bits as xgrammar packs them (int32, shape [rows, words]) to bools [rows, vocabulary]."""
    # Byte by byte: this takes a quarter of the memory of the logits.
    places = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = (masks.contiguous().view(torch.uint8).unsqueeze(-1) >> places).bitwise_and_(1)
    return bits.flatten(1)[:, :vocabulary_size].bool()


def mask_logits(logits: torch.Tensor, matchers: Sequence[TokenMatcher | None]) -> torch.Tensor:
    """Logits [rows, vocabulary] that are -inf where the row's matcher forbids the token.

    A row of which nothing is allowed stays as it is: its matcher will refuse what is drawn.
    """
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return logits
    num_words = -(-logits.shape[1] // _WORD_BITS)
    masks = np.empty((len(rows), num_words), np.int32)
    for place, row in enumerate(rows):
        matcher = matchers[row]
        assert matcher is not None
        if not matcher.fill(masks, place):
            masks[place] = -1
    allowed = unpack_masks(torch.from_numpy(masks).to(logits.device), logits.shape[1])
    masked = logits.clone()
    masked[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return masked


def sample_tokens(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
) -> Drawn:
    """One token per row and its logprob.

    The logprob is that of the distribution drawn from: after temperature and top_p.
    Rows with temperature 0 take the likeliest token, with logprob 0. A row is a function
    of its own arguments alone, so a seed gives the same tokens whatever else is batched.

    Args:
        logits: float32, shape [rows, vocabulary]; -inf where a mask forbids a token.
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
    chosen = chosen.masked_fill(greedy & chosen.isfinite(), 0.0)
    return Drawn(tokens.squeeze(1), chosen.squeeze(1), logprobs)


def list_likeliest(distribution: torch.Tensor, num: int) -> tuple[tuple[int, float], ...]:
    """The ``num`` likeliest tokens of one row [vocabulary] with their logprobs, best first.

    Fewer where fewer could be drawn.
    """
    logprobs, tokens = distribution.topk(min(num, distribution.numel()))
    pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return tuple((token, min(logprob, 0.0)) for token, logprob in pairs if logprob > -torch.inf)


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


class StopTextFinder:
    """Finds the first of some texts in tokens that arrive one by one, across their borders."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._reach = max(len(text) for text in stop) - 1
        self._tail = ""
        self._context: list[int] = []
        self._pending: list[int] = []

    def find(self, token: int) -> str | None:
        """The stop text that ``token`` completes, the earliest in the text; None: none yet."""
        self._pending.append(token)
        # Decoded behind the tokens before it: some tokenizers spell a first token differently.
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        fresh = after[len(before) :]
        text = self._tail + fresh
        places = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if places:
            return min(places, key=lambda place: (place[0], -len(place[1])))[1]
        if not fresh.endswith("\ufffd"):  # else a character is still incomplete
            self._tail = text[-self._reach :] if self._reach else ""
            self._context, self._pending = self._pending, []
        return None

    def _decode(self, ids: list[int]) -> str:
        # Special tokens are text here: "<|im_end|>" can be a stop text too.
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""
