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


FAILED = InteractionStatus.FAILED


@pytest.mark.parametrize(
    ("turns", "discount", "returns"),
    [
        pytest.param(
            # c = 1; b = 0 + 0.5 * 1 = 0.5; a = 0 + 0.5 * 0.5 = 0.25
            [turn("a", 1, 2), turn("b", 3, 4, "a"), turn("c", 5, 6, "b", 1.0)],
            0.5,
            {"a": 0.25, "b": 0.5, "c": 1.0},
            id="a chain passes the outcome back with discount",
        ),
        pytest.param(
            # root = 0.25 + 1.0 * (1 + 0) / 2
            [
                turn("root", 1, 2, None, 0.25),
                turn("l", 3, 4, "root", 1.0),
                turn("r", 5, 6, "root", 0.0),
            ],
            1.0,
            {"root": 0.75, "l": 1.0, "r": 0.0},
            id="branches give their mean and nothing to each other",
        ),
        pytest.param(
            # The triage agent's turn is a leaf; the solver's conversation begins afterwards.
            [turn("triage", 1, 2), turn("one", 3, 4), turn("two", 5, 6, "one", 1.0)],
            0.5,
            {"triage": 0.25, "one": 0.5, "two": 1.0},
            id="a handoff's leaf hands over to what started after it",
        ),
        pytest.param(
            # outer2 = 1; inner2 (leaf) -> outer2: 0.5; inner1 = 0.25; outer1 -> outer2: 0.5
            [
                turn("outer1", 1, 2),
                turn("inner1", 3, 4),
                turn("inner2", 5, 6, "inner1"),
                turn("outer2", 7, 8, "outer1", 1.0),
            ],
            0.5,
            {"outer2": 1.0, "inner2": 0.5, "inner1": 0.25, "outer1": 0.5},
            id="a sub-agent hands over to the turn that uses its result",
        ),
        pytest.param(
            [turn("first", 1, 2, None, 0.0), turn("second", 3, 4, None, 1.0)],
            1.0,
            {"first": 0.0, "second": 1.0},
            id="a rewarded leaf keeps its own reward only",
        ),
        pytest.param(
            # Three votes asked for at the same time; the reward is set on the last to end.
            [turn("v1", 1, 5), turn("v2", 2, 4), turn("v3", 3, 6, None, 1.0)],
            1.0,
            {"v1": 1.0, "v2": 1.0, "v3": 1.0},
            id="parallel leaves at the end share the outcome",
        ),
        pytest.param(
            [turn("a", 1, 3, None, 1.0), turn("slow", 2, 4)],
            1.0,
            {"a": 1.0, "slow": 0.0},
            id="a straggler without a successor earns nothing",
        ),
        pytest.param(
            [turn("a", 1, 2), turn("x", 3, 4, "a", status=FAILED), turn("b", 5, 6, "a", 1.0)],
            1.0,
            {"a": 1.0, "b": 1.0},
            id="a failed call in the middle has no place",
        ),
        pytest.param(
            [turn("a", 1, 2, None, 0.5), turn("b", 3, 4, "a", 1.0)],
            1.0,
            {"a": 1.5, "b": 1.0},
            id="a reward on an inner turn adds to what follows",
        ),
        pytest.param([turn("a", 1, 2)], 1.0, {}, id="no reward at all is no return"),
        pytest.param([], 1.0, {}, id="no turns"),
    ],
)
def test_returns(turns: list[Interaction], discount: float, returns: dict[str, float]) -> None:
    assert compute_turn_returns(turns, discount) == returns


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
