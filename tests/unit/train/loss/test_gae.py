"""GAE through turns: against numbers worked by hand, a slow double loop, and the turns' returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.credit import compute_turn_returns, find_successors
from agentrl_cli.train.loss.gae import (
    GaeFactors,
    Outlook,
    compute_gae,
    compute_turn_advantages,
    normalize_advantages,
)

PLAIN = GaeFactors(gae_lambda=1.0, discount=1.0, turn_discount=1.0)


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


def with_returns(turns: Sequence[Interaction], turn_discount: float) -> list[Interaction]:
    returns = compute_turn_returns(turns, turn_discount)
    return [dataclasses.replace(t, turn_return=returns.get(t.id)) for t in turns]


def compute(
    turns: Sequence[Interaction], values: Mapping[str, Sequence[float]], factors: GaeFactors
) -> dict[str, list[float]]:
    tensors = {name: torch.tensor(own, dtype=torch.float64) for name, own in values.items()}
    found = compute_gae(with_returns(turns, factors.turn_discount), tensors, factors)
    return {name: advantages.tolist() for name, advantages in found.items()}


def test_one_turn_by_hand():
    # discount 0.9, lambda 0.5; values 1, 2, 4; reward 3 at the end.
    # A3 = 3 - 4 = -1
    # A2 = (0.9 x 4 - 2) + 0.45 x -1 = 1.6 - 0.45 = 1.15
    # A1 = (0.9 x 2 - 1) + 0.45 x 1.15 = 0.8 + 0.5175 = 1.3175
    factors = GaeFactors(gae_lambda=0.5, discount=0.9, turn_discount=1.0)
    found = compute_turn_advantages([1.0, 2.0, 4.0], 3.0, Outlook(), factors)
    assert found == pytest.approx([1.3175, 1.15, -1.0])


def test_the_example_of_the_docstring():
    turns = [turn("one", 1, 2), turn("two", 3, 4, "one", reward=1.0)]
    factors = GaeFactors(gae_lambda=0.5, discount=1.0, turn_discount=0.9)
    found = compute(turns, {"one": [0.5, 0.6], "two": [0.8]}, factors)
    assert found["two"] == pytest.approx([0.2])
    assert found["one"] == pytest.approx([0.205, 0.21])


def test_discount_counts_tokens_and_turn_discount_turns():
    # No critic: A is the return from each token on. Reward 8 after turns of 2 and 1 tokens:
    # c = 8; b = 0.5 x 0.25 x 8 = 1 (a token and a turn further); a = 0.5 x 1 = 0.5.
    turns = [turn("one", 1, 2), turn("two", 3, 4, "one", reward=8.0)]
    factors = GaeFactors(gae_lambda=1.0, discount=0.5, turn_discount=0.25)
    found = compute(turns, {"one": [0.0, 0.0], "two": [0.0]}, factors)
    assert found == {"one": [0.5, 1.0], "two": [8.0]}


def test_merged_turns_are_one_turn_when_nothing_is_discounted_between_them():
    factors = GaeFactors(gae_lambda=0.7, discount=0.9, turn_discount=1.0)
    values = [0.3, -0.2, 0.9, 0.4, 0.1]
    parted = [turn("one", 1, 2), turn("two", 3, 4, "one", reward=2.0)]
    found = compute(parted, {"one": values[:2], "two": values[2:]}, factors)
    whole = compute([turn("whole", 1, 2, reward=2.0)], {"whole": values}, factors)
    assert found["one"] + found["two"] == pytest.approx(whole["whole"])


def test_a_reward_inside_enters_at_the_last_token_of_its_turn():
    # Lambda 0: A = r + V_next - V. The inner reward of 0.5 is seen by b alone, not by a.
    turns = [turn("one", 1, 2, reward=0.5), turn("two", 3, 4, "one", reward=1.0)]
    factors = GaeFactors(gae_lambda=0.0, discount=1.0, turn_discount=1.0)
    found = compute(turns, {"one": [0.2, 0.3], "two": [0.4]}, factors)
    assert found["one"] == pytest.approx([0.1, 0.5 + 0.4 - 0.3])
    assert found["two"] == pytest.approx([0.6])


def test_branches_count_by_their_mean_and_do_not_leak():
    turns = [
        turn("root", 1, 2),
        turn("left", 3, 4, "root", reward=1.0),
        turn("right", 5, 6, "root", reward=-3.0),
    ]
    factors = GaeFactors(gae_lambda=0.5, discount=1.0, turn_discount=1.0)
    found = compute(turns, {"root": [0.5], "left": [0.2], "right": [0.4]}, factors)
    # left: 1 - 0.2 = 0.8; right: -3 - 0.4 = -3.4
    # root: mean V 0.3 - 0.5 + 0.5 x mean A (-1.3) = -0.2 - 0.65
    assert found["left"] == pytest.approx([0.8])
    assert found["right"] == pytest.approx([-3.4])
    assert found["root"] == pytest.approx([-0.85])


def test_a_handoff_leads_to_the_conversation_that_began_after_it():
    turns = [turn("triage", 1, 2), turn("solve", 3, 4, reward=1.0)]
    factors = GaeFactors(gae_lambda=0.0, discount=1.0, turn_discount=0.5)
    found = compute(turns, {"triage": [0.1], "solve": [0.6]}, factors)
    assert found["triage"] == pytest.approx([0.5 * 0.6 - 0.1])


def test_a_turn_that_is_not_trained_lets_credit_through():
    # The greedy turn in the middle has no tokens to train; its own reward of 0.5 is kept.
    turns = [turn("a", 1, 2), turn("greedy", 3, 4, "a", reward=0.5), turn("c", 5, 6, "greedy", 1.0)]
    factors = GaeFactors(gae_lambda=0.5, discount=0.5, turn_discount=0.8)
    found = compute(turns, {"a": [0.3], "c": [0.6]}, factors)
    # c: A = 0.4. greedy: V = 0.5 + 0.8 x 0.6 = 0.98, A = 0.8 x 0.4 = 0.32
    # a: 0.5 x 0.8 x 0.98 - 0.3 + 0.5 x 0.8 x 0.5 x 0.32 = 0.092 + 0.064
    assert found["c"] == pytest.approx([0.4])
    assert found["a"] == pytest.approx([0.156])
    assert compute(turns, {"a": [0.3], "greedy": [], "c": [0.6]}, factors) == found


def test_failed_calls_have_no_place_and_no_values():
    turns = [
        turn("a", 1, 2),
        turn("x", 3, 4, "a", status=InteractionStatus.FAILED),
        turn("b", 5, 6, "a", reward=1.0),
    ]
    assert compute(turns, {"a": [0.0], "b": [0.0]}, PLAIN) == {"a": [1.0], "b": [1.0]}
    with pytest.raises(ValueError, match=r"did not complete: \['x'\]"):
        compute(turns, {"x": [0.0]}, PLAIN)


def test_what_the_returns_are_is_what_is_estimated():
    """A penalty of 0.25 taken off both returns enters once, at the end."""
    turns = [
        dataclasses.replace(turn("one", 1, 2), turn_return=0.75),
        dataclasses.replace(turn("two", 3, 4, "one", reward=1.0), turn_return=0.75),
    ]
    factors = GaeFactors(gae_lambda=0.0, discount=1.0, turn_discount=1.0)
    values = {"one": torch.tensor([0.5]), "two": torch.tensor([0.5])}
    found = compute_gae(turns, values, factors)
    assert found["one"].tolist() == [0.0]
    assert found["two"].tolist() == [0.25]


def test_a_turn_without_a_return_passes_on_that_of_its_successor():
    turns = [
        dataclasses.replace(turn("one", 1, 2), turn_return=1.0),
        turn("no return", 3, 4, "one"),
        dataclasses.replace(turn("three", 5, 6, "no return", reward=1.0), turn_return=1.0),
    ]
    values = {"one": torch.tensor([0.25]), "three": torch.tensor([0.5])}
    found = compute_gae(turns, values, PLAIN)
    assert {name: own.tolist() for name, own in found.items()} == {"one": [0.75], "three": [0.5]}


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Interaction], dict[str, list[float]]]:
    """Trees with branches, handoffs, parallel calls, failed calls and turns without tokens."""
    numbers = st.integers(-8, 8).map(lambda n: n / 4)
    turns: list[Interaction] = []
    values: dict[str, list[float]] = {}
    clock = 0
    for index in range(draw(st.integers(1, 8))):
        # A parent has ended before its child begins; calls may overlap otherwise.
        clock += 1
        ended = clock + draw(st.integers(1, 4))
        parents = [t.id for t in turns if t.ended is not None and t.ended < clock]
        parent = draw(st.sampled_from([None, *parents]))
        failed = draw(st.integers(0, 5)) == 0
        one = turn(
            f"t{index}",
            clock,
            ended,
            parent,
            None if failed else draw(st.none() | numbers),
            InteractionStatus.FAILED if failed else InteractionStatus.COMPLETED,
        )
        turns.append(one)
        if draw(st.booleans()):
            clock = ended
        if not failed:
            own = draw(st.lists(numbers, max_size=4))
            if own or draw(st.booleans()):
                values[one.id] = own
    return turns, values


@given(conversations(), st.sampled_from([0.0, 0.5, 1.0]))
def test_believing_rewards_alone_gives_the_returns_whatever_the_critic_says(
    conversation: tuple[list[Interaction], dict[str, list[float]]], turn_discount: float
):
    turns, values = conversation
    factors = GaeFactors(gae_lambda=1.0, discount=1.0, turn_discount=turn_discount)
    found = compute(turns, values, factors)
    returns = compute_turn_returns(turns, turn_discount)
    assert set(found) == {name for name, own in values.items() if own}
    for name, advantages in found.items():
        sums = [a + v for a, v in zip(advantages, values[name], strict=True)]
        assert sums == pytest.approx([returns.get(name, 0.0)] * len(sums), abs=1e-5)


def sum_over_paths(
    turns: Sequence[Interaction], values: Mapping[str, Sequence[float]], factors: GaeFactors
) -> dict[str, list[float]]:
    """GAE as the sum over all later actions, on all paths, of their discounted deltas.

    A_t = sum over k >= t of (product of d x lambda from t to k) x delta_k x the path's weight.
    """
    by_id = {t.id: t for t in turns}
    successors = find_successors(turns)

    def value_after(name: str) -> float:
        """What is expected when the turn is over, before any discount."""
        following = successors[name]
        expected = [value_of(s) for s in following]
        return sum(expected) / len(expected) if expected else 0.0

    def value_of(name: str) -> float:
        own = values.get(name) or ()
        if own:
            return own[0]
        return (by_id[name].reward or 0.0) + factors.turn_discount * value_after(name)

    def deltas(name: str, start: int, weight: float) -> float:
        own = values.get(name) or ()
        total = 0.0
        for position in range(start, len(own)):
            last = position == len(own) - 1
            discount = factors.discount * (factors.turn_discount if last else 1.0)
            following = value_after(name) if last else own[position + 1]
            reward = (by_id[name].reward or 0.0) if last else 0.0
            total += weight * (reward + discount * following - own[position])
            weight *= discount * factors.gae_lambda
        if not own:
            weight *= factors.turn_discount
        branches = successors[name]
        return total + sum(deltas(s, 0, weight / len(branches)) for s in branches)

    return {
        name: [deltas(name, position, 1.0) for position in range(len(own))]
        for name, own in values.items()
        if own
    }


@given(
    conversations(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_equals_the_sum_over_all_later_actions(
    conversation: tuple[list[Interaction], dict[str, list[float]]],
    gae_lambda: float,
    discount: float,
    turn_discount: float,
):
    turns, values = conversation
    if all(t.reward is None for t in turns):
        return
    factors = GaeFactors(gae_lambda=gae_lambda, discount=discount, turn_discount=turn_discount)
    found = compute(turns, values, factors)
    expected = sum_over_paths(turns, values, factors)
    assert found.keys() == expected.keys()
    for name, advantages in found.items():
        assert advantages == pytest.approx(expected[name], abs=1e-4, rel=1e-5), name


def test_normalized_advantages():
    # Mean 3, unbiased deviation 2: (1 - 3) / 2, 0, (5 - 3) / 2.
    found = normalize_advantages(torch.tensor([1.0, 3.0, 5.0]))
    assert found.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert found.dtype == torch.float32
    # Deviation sqrt 2.
    two = normalize_advantages(torch.tensor([-1.0, 1.0]))
    assert two.tolist() == pytest.approx([-0.707106, 0.707106], abs=1e-5)
    # Small is not equal: 1e-6 over sqrt(2) x 1e-6 + 1e-6.
    small = normalize_advantages(torch.tensor([1e-6, 3e-6]))
    assert small.tolist() == pytest.approx([-0.414214, 0.414214], abs=1e-5)


@pytest.mark.parametrize("equal", [[], [2.5], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_equal_advantages_are_exactly_0(equal: list[float]):
    assert normalize_advantages(torch.tensor(equal)).tolist() == [0.0] * len(equal)
