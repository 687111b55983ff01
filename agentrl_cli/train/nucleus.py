"""The nucleus of top_p sampling, found without sorting whole rows where few tokens hold it."""

from __future__ import annotations

from torch import Tensor

#: Most nuclei are smaller: these are sorted first, and a whole row only where they do not do.
_NUM_LIKELIEST = 512


def find_outside_nucleus(probabilities: Tensor, top_ps: Tensor, target_ids: Tensor) -> Tensor:
    """True for the tokens that top_p sampling removes: bool [tokens, vocabulary].

    The nucleus is the smallest set of the most probable tokens whose probabilities reach
    top_p (arXiv 1904.09751, equation 2), the first of equal ones going before; the target is
    always in it. Where ``top_ps`` is 1, nothing is removed.

    Args:
        probabilities: float [tokens, vocabulary].
        top_ps: [tokens].
        target_ids: int64 [tokens].
    """
    num_likeliest = min(_NUM_LIKELIEST, probabilities.shape[-1])
    ordered = probabilities.topk(num_likeliest, dim=-1).values
    sizes = _count_nucleus(ordered, top_ps)
    lowest = _take(ordered, sizes - 1)
    if num_likeliest < probabilities.shape[-1]:
        is_larger = (sizes >= num_likeliest) & (top_ps < 1)
        if is_larger.any():
            whole = probabilities[is_larger].sort(dim=-1, descending=True).values
            larger_sizes = _count_nucleus(whole, top_ps[is_larger])
            sizes[is_larger] = larger_sizes
            lowest[is_larger] = _take(whole, larger_sizes - 1)
    removed = probabilities < lowest[:, None]
    _remove_last_of_equals(removed, probabilities, lowest, sizes)
    removed &= (top_ps < 1)[:, None]
    return removed.scatter_(1, target_ids[:, None], False)


def _count_nucleus(ordered: Tensor, top_ps: Tensor) -> Tensor:
    """Tokens of each nucleus, of probabilities in falling order; at least 1."""
    mass_before = ordered.cumsum(-1) - ordered
    return (mass_before < top_ps[:, None]).sum(-1).clamp_(min=1)


def _take(ordered: Tensor, places: Tensor) -> Tensor:
    return ordered.gather(1, places[:, None])[:, 0]


def _remove_last_of_equals(
    removed: Tensor, probabilities: Tensor, lowest: Tensor, sizes: Tensor
) -> None:
    """Where more tokens are as probable as the nucleus's last than it has room for."""
    num_too_many = removed.shape[-1] - removed.sum(-1) - sizes
    rows = (num_too_many > 0).nonzero()[:, 0]
    if not len(rows):
        return
    is_equal = probabilities[rows] == lowest[rows, None]
    num_kept = is_equal.sum(-1) - num_too_many[rows]
    removed[rows] |= is_equal & (is_equal.cumsum(-1) > num_kept[:, None])
