from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.credit import compute_turn_returns, find_successors, parse_reward


def turn(
    name: str,
    started: int,
    ended: int,
    parent: str | None = None,
    reward: float | None = None,
    status: InteractionStatus = InteractionStatus.COMPLETED,
) -> Interaction:
    return Interaction(
        id=name, started=started, ended=ended, parent_id=parent, reward=reward, status=status
    )


def test_chain_passes_the_outcome_back_with_discount() -> None:
    chain = [turn("a", 1, 2), turn("b", 3, 4, "a"), turn("c", 5, 6, "b", reward=1.0)]
    # c = 1; b = 0 + 0.5 * 1 = 0.5; a = 0 + 0.5 * 0.5 = 0.25
    assert compute_turn_returns(chain, 0.5) == {"a": 0.25, "b": 0.5, "c": 1.0}
    assert set(compute_turn_returns(chain, 1.0).values()) == {1.0}


def test_branches_give_their_mean() -> None:
    tree = [
        turn("root", 1, 2, reward=0.25),
        turn("left", 3, 4, "root", reward=1.0),
        turn("right", 5, 6, "root", reward=0.0),
    ]
    # root = 0.25 + 1.0 * (1 + 0) / 2
    assert compute_turn_returns(tree, 1.0)["root"] == 0.75


def test_siblings_do_not_leak_into_each_other() -> None:
    tree = [
        turn("root", 1, 2),
        turn("left", 3, 4, "root", reward=1.0),
        turn("right", 5, 6, "root", reward=-1.0),
    ]
    returns = compute_turn_returns(tree, 1.0)
    assert (returns["left"], returns["right"], returns["root"]) == (1.0, -1.0, 0.0)


def test_handoff_leaf_hands_over_to_what_started_after_it() -> None:
    # The triage agent's turn is a leaf; the solver's conversation begins afterwards.
    turns = [turn("triage", 1, 2), turn("solve1", 3, 4), turn("solve2", 5, 6, "solve1", 1.0)]
    # solve2 = 1, solve1 = 0.5, triage = 0.25
    assert compute_turn_returns(turns, 0.5) == {"triage": 0.25, "solve1": 0.5, "solve2": 1.0}


def test_sub_agent_hands_over_to_the_turn_that_uses_its_result() -> None:
    turns = [
        turn("outer1", 1, 2),
        turn("inner1", 3, 4),
        turn("inner2", 5, 6, "inner1"),
        turn("outer2", 7, 8, "outer1", 1.0),
    ]
    # outer2 = 1; inner2 (leaf) -> outer2: 0.5; inner1 = 0.25; outer1 -> outer2: 0.5
    assert compute_turn_returns(turns, 0.5) == {
        "outer2": 1.0, "inner2": 0.5, "inner1": 0.25, "outer1": 0.5,
    }  # fmt: skip


def test_rewarded_leaf_keeps_its_own_reward_only() -> None:
    turns = [turn("first", 1, 2, reward=0.0), turn("second", 3, 4, reward=1.0)]
    assert compute_turn_returns(turns, 1.0) == {"first": 0.0, "second": 1.0}


def test_parallel_leaves_at_the_end_share_the_outcome() -> None:
    # Three votes asked at the same time; the final reward is set on the last to end.
    votes = [turn("v1", 1, 5), turn("v2", 2, 4), turn("v3", 3, 6, reward=1.0)]
    assert compute_turn_returns(votes, 1.0) == {"v1": 1.0, "v2": 1.0, "v3": 1.0}


def test_straggler_without_successor_earns_nothing() -> None:
    turns = [turn("a", 1, 3, reward=1.0), turn("slow", 2, 4)]
    assert compute_turn_returns(turns, 1.0) == {"a": 1.0, "slow": 0.0}


def test_failed_call_in_the_middle_has_no_place() -> None:
    turns = [
        turn("a", 1, 2),
        turn("x", 3, 4, "a", status=InteractionStatus.FAILED),
        turn("b", 5, 6, "a", reward=1.0),
    ]
    assert compute_turn_returns(turns, 1.0) == {"a": 1.0, "b": 1.0}


def test_reward_on_an_inner_turn_adds_to_what_follows() -> None:
    turns = [turn("a", 1, 2, reward=0.5), turn("b", 3, 4, "a", reward=1.0)]
    assert compute_turn_returns(turns, 1.0) == {"a": 1.5, "b": 1.0}


def test_no_reward_at_all_is_no_return() -> None:
    assert compute_turn_returns([turn("a", 1, 2)], 1.0) == {}
    assert compute_turn_returns([], 1.0) == {}


def test_successors_come_before_those_who_share_in_their_credit() -> None:
    turns = [
        turn("outer1", 1, 2),
        turn("inner1", 3, 4),
        turn("broken", 4, 5, "inner1", status=InteractionStatus.FAILED),
        turn("inner2", 5, 6, "inner1"),
        turn("outer2", 7, 8, "outer1", 1.0),
        turn("outer3", 9, 10, "outer1", 0.0),
    ]
    found = find_successors(turns)
    assert found == {
        "outer3": (), "outer2": (), "inner2": ("outer2",), "inner1": ("inner2",),
        "outer1": ("outer2", "outer3"),
    }  # fmt: skip
    order = list(found)
    assert all(order.index(s) < order.index(name) for name in found for s in found[name])
    assert find_successors([]) == {}


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.75), 0.75),
        (None, None),
        (math.nan, None),
        (np.float64("nan"), None),
    ],
)
def test_rewards_of_any_library_are_read(value: Any, reward: float | None) -> None:
    parsed = parse_reward(value)
    assert parsed == reward
    assert parsed is None or type(parsed) is float


@pytest.mark.parametrize("value", ["1", [1.0], {"reward": 1}, object(), Decimal("1"), 1j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a reward must be a number"):
        parse_reward(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float32("inf"), 10**400])
def test_reward_that_is_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="finite"):
        parse_reward(value)
