from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.credit import compute_turn_returns, find_successors, parse_reward


def read(text: str) -> list[Interaction]:
    """Turns by name, ticks of begin and end, parent and reward: ``a 1-2, b 3-4 <a =0.5``.

    With ``!`` the call failed.
    """
    turns = []
    for one in filter(None, text.split(", ")):
        name, ticks, *rest = one.split()
        started, ended = map(int, ticks.split("-"))
        fields: dict[str, Any] = {}
        for part in rest:
            if part.startswith("<"):
                fields["parent_id"] = part[1:]
            elif part.startswith("="):
                fields["reward"] = float(part[1:])
            else:
                fields["status"] = InteractionStatus.FAILED
        turns.append(Interaction(id=name, started=started, ended=ended, **fields))
    return turns


@pytest.mark.parametrize(
    ("turns", "discount", "returns"),
    [
        # c = 1; b = 0 + 0.5 * 1; a = 0 + 0.5 * 0.5: a chain passes the outcome back.
        ("a 1-2, b 3-4 <a, c 5-6 <b =1", 0.5, {"a": 0.25, "b": 0.5, "c": 1.0}),
        # root = 0.25 + 1.0 * (1 + 0) / 2: branches give their mean, and nothing to each other.
        ("root 1-2 =0.25, l 3-4 <root =1, r 5-6 <root =0", 1.0, {"root": 0.75, "l": 1.0, "r": 0.0}),
        # A handoff: the triage agent's turn is a leaf; the solver's conversation begins after it.
        ("triage 1-2, one 3-4, two 5-6 <one =1", 0.5, {"triage": 0.25, "one": 0.5, "two": 1.0}),
        # A sub-agent's leaf hands over to the turn that uses its result:
        # outer2 = 1; inner2 -> outer2: 0.5; inner1 = 0.25; outer1 -> outer2: 0.5.
        (
            "outer1 1-2, inner1 3-4, inner2 5-6 <inner1, outer2 7-8 <outer1 =1",
            0.5,
            {"outer2": 1.0, "inner2": 0.5, "inner1": 0.25, "outer1": 0.5},
        ),
        # A rewarded leaf keeps its own reward only.
        ("first 1-2 =0, second 3-4 =1", 1.0, {"first": 0.0, "second": 1.0}),
        # Three votes asked for at the same time; the reward is set on the last to end.
        ("v1 1-5, v2 2-4, v3 3-6 =1", 1.0, {"v1": 1.0, "v2": 1.0, "v3": 1.0}),
        # A straggler without a successor earns nothing.
        ("a 1-3 =1, slow 2-4", 1.0, {"a": 1.0, "slow": 0.0}),
        # A failed call in the middle has no place.
        ("a 1-2, x 3-4 <a !, b 5-6 <a =1", 1.0, {"a": 1.0, "b": 1.0}),
        # A reward on an inner turn adds to what follows.
        ("a 1-2 =0.5, b 3-4 <a =1", 1.0, {"a": 1.5, "b": 1.0}),
        # No reward at all is no return.
        ("a 1-2", 1.0, {}),
        ("", 1.0, {}),
    ],
)
def test_returns(turns: str, discount: float, returns: dict[str, float]) -> None:
    assert compute_turn_returns(read(turns), discount) == returns


def test_successors_come_before_those_who_share_in_their_credit() -> None:
    found = find_successors(
        read(
            "outer1 1-2, inner1 3-4, broken 4-5 <inner1 !, inner2 5-6 <inner1, "
            "outer2 7-8 <outer1 =1, outer3 9-10 <outer1 =0"
        )
    )
    assert found == {
        "outer3": (), "outer2": (), "inner2": ("outer2",), "inner1": ("inner2",),
        "outer1": ("outer2", "outer3"),
    }  # fmt: skip
    order = list(found)
    assert all(order.index(s) < order.index(name) for name in found for s in found[name])


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
