"""What each alarm looks for: pure functions of the metrics so far.

A condition answers for the last step of a history: True, False, or None where the step does not say
(nothing was scored, nothing was trained). How long it must last is decided in ``alarms.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl_cli.train import alarm_messages as messages
from agentrl_cli.train.alarm_history import History
from agentrl_cli.train.alarm_messages import Seen

#: Trajectories below which equal rewards or cut replies may be chance: a step of one small group
#: is no evidence, several of them together are.
_MIN_TRAJECTORIES = 32
#: Nats per token: a policy that begins with less decides nothing by chance in a thousand tokens,
#: and what is left to fall are digits of float32.
_MIN_FIRST_ENTROPY = 1e-3

Condition = Callable[[History, float], bool | None]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm."""

    name: str
    """As in ``train.alarms``."""
    holds: Condition
    """Whether the last step of the history is one of those it rings about, at this threshold."""
    describe: Callable[[Seen], str]
    """What was seen, what it usually means, and what to type."""
    min_trajectories: int = 0
    """It must have lasted over at least so many, whatever the number of steps."""
    implied_by: str | None = None
    """While that alarm rings, which says the same and more, this one is not looked at."""


def is_reward_constant(history: History, threshold: float) -> bool | None:
    """All rewards of the step are the same, that of the step before if its were, and nothing can be
    learned from them (interactions may still have rewards of their own)."""
    low, high = history.read("reward_min"), history.read("reward_max")
    if low is None or high is None:
        return None
    # Sums of the same rewards in another order differ in the last digits.
    tolerance = threshold + 1e-9 * max(abs(low), abs(high))
    is_same = high - low <= tolerance
    low_before, high_before = (
        history.read_previous("reward_min"),
        history.read_previous("reward_max"),
    )
    if low_before is not None and high_before is not None:
        was_same = high_before - low_before <= tolerance
        moved = max(high, high_before) - min(low, low_before) > tolerance
        is_same = is_same and not (was_same and moved)
    return is_same and _share_without_signal(history) == 1.0 and not history.is_solved()


def are_groups_equal(history: History, threshold: float) -> bool | None:
    """So many of the step's groups give no signal."""
    share = _share_without_signal(history)
    return None if share is None else share >= threshold and not history.is_solved()


def is_gap_high(history: History, threshold: float) -> bool | None:
    """Engine and trainer differ by more than ``threshold`` nats per token."""
    gap = history.read_trained("logprob_gap_mean")
    return None if gap is None else gap > threshold


def is_entropy_collapsed(history: History, threshold: float) -> bool | None:
    """The entropy is below this share of its first level, and the rewards are not the best yet."""
    entropy, first = history.read_trained("entropy"), history.first_entropy
    if entropy is None or first is None or first < _MIN_FIRST_ENTROPY:
        return None
    return entropy < threshold * first and not history.is_solved()


def are_replies_truncated(history: History, threshold: float) -> bool | None:
    """More than this share of the trajectories has a reply that was cut off."""
    share = history.read("truncated_fraction")
    return None if share is None else share > threshold


def is_reference_far(history: History, threshold: float) -> bool | None:
    """The KL estimate to the reference is above ``threshold``; without a reference it is 0."""
    kl = history.read_trained("kl")
    return None if kl is None else kl > threshold


def is_update_large(history: History, threshold: float) -> bool | None:
    """The KL estimate between the policy in the step's updates and before them is above it."""
    kl = history.read_trained("approx_kl")
    return None if kl is None else kl > threshold


def are_turns_broken(history: History, threshold: float) -> bool | None:
    """So many of the turns that go back to an earlier one are broken."""
    share = history.read("broken_turns_fraction")
    return None if share is None else share > 0.0 and share >= threshold


def were_updates_skipped(history: History, threshold: float) -> bool | None:
    """More than ``threshold`` optimizer updates were left out for not being finite."""
    skipped = history.read("num_skipped_updates")
    return None if skipped is None else skipped > threshold


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "reward_constant", is_reward_constant, messages.describe_reward_constant, _MIN_TRAJECTORIES
    ),
    Alarm(
        "groups_equal",
        are_groups_equal,
        messages.describe_groups_equal,
        _MIN_TRAJECTORIES,
        implied_by="reward_constant",
    ),
    Alarm("logprob_gap", is_gap_high, messages.describe_logprob_gap),
    Alarm("entropy_collapse", is_entropy_collapsed, messages.describe_entropy_collapse),
    Alarm("truncated", are_replies_truncated, messages.describe_truncated, _MIN_TRAJECTORIES),
    Alarm("kl_from_reference", is_reference_far, messages.describe_kl_from_reference),
    Alarm("kl_of_update", is_update_large, messages.describe_kl_of_update),
    Alarm("broken_turns", are_turns_broken, messages.describe_broken_turns),
    Alarm("not_finite", were_updates_skipped, messages.describe_not_finite),
)


def _share_without_signal(history: History) -> float | None:
    num_groups, without = history.count_groups()
    return without / num_groups if num_groups else None
