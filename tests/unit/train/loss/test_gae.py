"""GAE through turns against numbers worked by hand, a slow double loop and the turns' returns; the
critic's loss by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.config.algorithm_config import GaeAdvantageConfig
from agentrl_cli.records import Interaction, InteractionStatus, Trajectory
from agentrl_cli.tracking.credit import compute_turn_returns, find_successors
from agentrl_cli.train.data.samples import Sample, build_samples
from agentrl_cli.train.loss.gae import (
    ValueTargets,
    assign_gae,
    compute_explained_variance,
    compute_gae,
    compute_value_loss,
    normalize_advantages,
)

Values = dict[str, list[float]]


def turn(
    name: str, started: int, parent: str | None = None, reward: float | None = None, **more: Any
) -> Interaction:
    return Interaction(
        id=name, started=started, parent_id=parent, reward=reward, **{"ended": started + 1, **more}
    )


def with_returns(turns: Sequence[Interaction], turn_discount: float) -> tuple[Interaction, ...]:
    returns = compute_turn_returns(turns, turn_discount)
    return tuple(dataclasses.replace(t, turn_return=returns.get(t.id)) for t in turns)


def compute(
    turns: Sequence[Interaction],
    values: Values,
    gae_lambda: float = 1.0,
    discount: float = 1.0,
    turn_discount: float = 1.0,
) -> Values:
    """The advantages; turns get the returns of their rewards, unless some have one already."""
    if all(t.turn_return is None for t in turns):
        turns = with_returns(turns, turn_discount)
    tensors = {name: torch.tensor(own, dtype=torch.float64) for name, own in values.items()}
    config = GaeAdvantageConfig(gae_lambda=gae_lambda, discount=discount)
    found = compute_gae(turns, tensors, config, turn_discount)
    return {name: advantages.tolist() for name, advantages in found.items()}


CHAIN = [turn("one", 1), turn("two", 3, "one", reward=1.0)]


@pytest.mark.parametrize(
    ("turns", "values", "factors", "expected"),
    [
        # discount 0.9, lambda 0.5; reward 3 at the end. A3 = 3 - 4 = -1;
        # A2 = (0.9 x 4 - 2) + 0.45 x -1 = 1.15; A1 = (0.9 x 2 - 1) + 0.45 x 1.15 = 1.3175
        (
            [turn("a", 1, reward=3.0)],
            {"a": [1.0, 2.0, 4.0]},
            (0.5, 0.9, 1.0),
            {"a": [1.3175, 1.15, -1.0]},
        ),
        # The example of the module's docstring.
        (
            CHAIN,
            {"one": [0.5, 0.6], "two": [0.8]},
            (0.5, 1.0, 0.9),
            {"one": [0.205, 0.21], "two": [0.2]},
        ),
        # No critic: A is the return from each token on. Reward 1 after turns of 2 and 1 tokens:
        # 1; 0.5 x 0.25 (a token and a turn further); half of that.
        (
            CHAIN,
            {"one": [0.0, 0.0], "two": [0.0]},
            (1.0, 0.5, 0.25),
            {"one": [0.0625, 0.125], "two": [1.0]},
        ),
        # Lambda 0: A = r + V_next - V. The inner reward of 0.5 enters at its turn's last token.
        (
            [turn("one", 1, reward=0.5), turn("two", 3, "one", reward=1.0)],
            {"one": [0.2, 0.3], "two": [0.4]},
            (0.0, 1.0, 1.0),
            {"one": [0.1, 0.5 + 0.4 - 0.3], "two": [0.6]},
        ),
        # Branches count by their mean and do not leak. left: 1 - 0.2; right: -3 - 0.4;
        # root: mean V 0.3 - 0.5 + 0.5 x mean A (-1.3) = -0.2 - 0.65
        (
            [turn("root", 1), turn("left", 3, "root", 1.0), turn("right", 5, "root", -3.0)],
            {"root": [0.5], "left": [0.2], "right": [0.4]},
            (0.5, 1.0, 1.0),
            {"root": [-0.85], "left": [0.8], "right": [-3.4]},
        ),
        # A handoff leads to the conversation that began after it.
        (
            [turn("triage", 1), turn("solve", 3, reward=1.0)],
            {"triage": [0.1], "solve": [0.6]},
            (0.0, 1.0, 0.5),
            {"triage": [0.5 * 0.6 - 0.1], "solve": [0.4]},
        ),
        # A penalty of 0.25 taken off both returns enters once, at the end.
        (
            [turn("one", 1, turn_return=0.75), turn("two", 3, "one", 1.0, turn_return=0.75)],
            {"one": [0.5], "two": [0.5]},
            (0.0, 1.0, 1.0),
            {"one": [0.0], "two": [0.25]},
        ),
        # A turn without a return passes on that of its successor.
        (
            [
                turn("one", 1, turn_return=1.0),
                turn("none", 3, "one"),
                turn("three", 5, "none", 1.0, turn_return=1.0),
            ],
            {"one": [0.25], "three": [0.5]},
            (1.0, 1.0, 1.0),
            {"one": [0.75], "three": [0.5]},
        ),
    ],
)
def test_by_hand(
    turns: list[Interaction], values: Values, factors: tuple[float, float, float], expected: Values
):
    found = compute(turns, values, *factors)
    assert found.keys() == expected.keys()
    for name, advantages in expected.items():
        assert found[name] == pytest.approx(advantages), name


def test_a_turn_that_is_not_trained_lets_credit_through():
    # The greedy turn in the middle has no tokens to train; its own reward of 0.5 is kept.
    turns = [turn("a", 1), turn("greedy", 3, "a", reward=0.5), turn("c", 5, "greedy", 1.0)]
    found = compute(turns, {"a": [0.3], "c": [0.6]}, 0.5, 0.5, 0.8)
    # c: A = 0.4. greedy: V = 0.5 + 0.8 x 0.6 = 0.98, A = 0.8 x 0.4 = 0.32
    # a: 0.5 x 0.8 x 0.98 - 0.3 + 0.5 x 0.8 x 0.5 x 0.32 = 0.092 + 0.064
    assert found["c"] == pytest.approx([0.4])
    assert found["a"] == pytest.approx([0.156])
    assert compute(turns, {"a": [0.3], "greedy": [], "c": [0.6]}, 0.5, 0.5, 0.8) == found


def test_failed_calls_have_no_place_and_no_values():
    failed = turn("x", 3, "a", status=InteractionStatus.FAILED)
    turns = [turn("a", 1), failed, turn("b", 5, "a", reward=1.0)]
    assert compute(turns, {"a": [0.0], "b": [0.0]}) == {"a": [1.0], "b": [1.0]}
    with pytest.raises(ValueError, match=r"did not complete: \['x'\]"):
        compute(turns, {"x": [0.0]})


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Interaction], Values]:
    """Trees with branches, handoffs, parallel calls, failed calls and turns without tokens."""
    numbers = st.integers(-8, 8).map(lambda n: n / 4)
    turns: list[Interaction] = []
    values: Values = {}
    clock = 0
    for index in range(draw(st.integers(1, 8))):
        # A parent has ended before its child begins; calls may overlap otherwise.
        clock += 1
        ended = clock + draw(st.integers(1, 4))
        parents = [t.id for t in turns if t.ended is not None and t.ended < clock]
        parent = draw(st.sampled_from([None, *parents]))
        failed = draw(st.integers(0, 5)) == 0
        reward = None if failed else draw(st.none() | numbers)
        status = InteractionStatus.FAILED if failed else InteractionStatus.COMPLETED
        one = turn(f"t{index}", clock, parent, reward, ended=ended, status=status)
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
    conversation: tuple[list[Interaction], Values], turn_discount: float
):
    turns, values = conversation
    found = compute(turns, values, turn_discount=turn_discount)
    returns = compute_turn_returns(turns, turn_discount)
    assert set(found) == {name for name, own in values.items() if own}
    for name, advantages in found.items():
        sums = [a + v for a, v in zip(advantages, values[name], strict=True)]
        assert sums == pytest.approx([returns.get(name, 0.0)] * len(sums), abs=1e-5)


def sum_over_paths(
    turns: Sequence[Interaction],
    values: Values,
    gae_lambda: float,
    discount: float,
    turn_discount: float,
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
        return (by_id[name].reward or 0.0) + turn_discount * value_after(name)

    def deltas(name: str, start: int, weight: float) -> float:
        own = values.get(name) or ()
        total = 0.0
        for position in range(start, len(own)):
            last = position == len(own) - 1
            factor = discount * (turn_discount if last else 1.0)
            following = value_after(name) if last else own[position + 1]
            reward = (by_id[name].reward or 0.0) if last else 0.0
            total += weight * (reward + factor * following - own[position])
            weight *= factor * gae_lambda
        if not own:
            weight *= turn_discount
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
    conversation: tuple[list[Interaction], Values],
    gae_lambda: float,
    discount: float,
    turn_discount: float,
):
    turns, values = conversation
    if all(t.reward is None for t in turns):
        return
    found = compute(turns, values, gae_lambda, discount, turn_discount)
    expected = sum_over_paths(turns, values, gae_lambda, discount, turn_discount)
    assert found.keys() == expected.keys()
    for name, advantages in found.items():
        assert advantages == pytest.approx(expected[name], abs=1e-4, rel=1e-5), name


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        # Mean 3, unbiased deviation 2: (1 - 3) / 2, 0, (5 - 3) / 2.
        ([1.0, 3.0, 5.0], [-1.0, 0.0, 1.0]),
        # Deviation sqrt 2.
        ([-1.0, 1.0], [-0.707106, 0.707106]),
        # Small is not equal: 1e-6 over sqrt(2) x 1e-6 + 1e-6.
        ([1e-6, 3e-6], [-0.414214, 0.414214]),
    ],
)
def test_normalized_advantages(advantages: list[float], expected: list[float]):
    found = normalize_advantages(torch.tensor(advantages))
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("equal", [[], [2.5], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_equal_advantages_are_exactly_0(equal: list[float]):
    assert normalize_advantages(torch.tensor(equal)).tolist() == [0.0] * len(equal)


def call(
    name: str, started: int, prompt: list[int], completion: list[int], **more: Any
) -> Interaction:
    return turn(
        name,
        started,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        rollout_logprobs=(-1.0,) * len(completion),
        versions=(0,) * len(completion),
        **more,
    )


def attempt(index: int, *interactions: Interaction) -> Trajectory:
    return Trajectory(
        id=f"g/{index}",
        group_id="g",
        task_id="g",
        interactions=with_returns(interactions, 1.0),
        reward=sum(i.reward or 0.0 for i in interactions),
    )


#: root samples 2 tokens; left (reward 1) and right (reward 0) both continue it.
BRANCHING = attempt(
    0,
    call("root", 1, [1, 2], [3, 4]),
    call("left", 3, [1, 2, 3, 4, 5], [6], parent="root", extends_parent=True, reward=1.0),
    call("right", 5, [1, 2, 3, 4, 7], [8], parent="root", extends_parent=True, reward=0.0),
)


def assign(
    trajectories: list[Trajectory], values: Values, style: Any = "concat", **config: Any
) -> tuple[list[Sample], ValueTargets, Values]:
    """The samples, their targets, and the advantages by turn."""
    samples = build_samples(trajectories, style)
    scored = {
        id(s): torch.tensor([v for t in s.turns for v in values[t.interaction_id]]) for s in samples
    }
    gae = GaeAdvantageConfig(**{"normalization": "none", **config})
    found, targets = assign_gae(trajectories, samples, scored, gae, 1.0)
    for new, old in zip(found, samples, strict=True):
        # Everything else stays.
        assert new.targets.ids is old.targets.ids
        assert (new.turns, new.trajectory_id) == (old.turns, old.trajectory_id)
        assert old.targets.advantages.tolist() == [0.0] * old.num_targets
        assert len(targets.values[id(new)]) == new.num_targets
    assert targets.values.keys() == targets.returns.keys() == {id(s) for s in found}
    return found, targets, by_turn(found, {id(s): s.targets.advantages for s in found})


def by_turn(samples: list[Sample], tensors: dict[int, torch.Tensor]) -> Values:
    return {
        turn.interaction_id: tensors[id(sample)][turn.start : turn.end].tolist()
        for sample in samples
        for turn in sample.turns
    }


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_a_shared_turn_hears_of_all_its_branches(style: str):
    """root is trained in the first sample alone, and has its credit from both."""
    values = {"root": [0.1, 0.2], "left": [0.6], "right": [0.4]}
    found, targets, advantages = assign([BRANCHING], values, style, gae_lambda=0.5)
    # left: 1 - 0.6; right: 0 - 0.4; root's last: 0.5 - 0.2 + 0.5 x (0.4 - 0.4) / 2
    assert advantages["left"] == pytest.approx([0.4])
    assert advantages["right"] == pytest.approx([-0.4])
    assert advantages["root"] == pytest.approx([0.1 + 0.5 * 0.3, 0.3])
    returns = by_turn(found, dict(targets.returns))
    assert returns["root"] == pytest.approx([0.35, 0.5])
    assert sum(len(own) for own in returns.values()) == 4


def test_an_unscored_trajectory_is_neither_credited_nor_counted():
    lost = dataclasses.replace(attempt(0, call("x", 1, [1], [2], reward=5.0)), reward=None)
    batch = [lost, attempt(1, call("y", 1, [1], [2, 3], reward=1.0))]
    found, targets, advantages = assign(batch, {"y": [0.25, 0.5]})
    assert [s.trajectory_id for s in found] == ["g/1"]
    assert advantages == {"y": [0.75, 0.5]}
    assert targets.summarize()["return_mean"] == 1.0


def test_a_greedy_turn_is_no_action_but_what_follows_it_counts():
    greedy = call("b", 3, [1, 2, 3], [4], parent="a", extends_parent=True, temperature=0.0)
    last = call("c", 5, [1, 2, 3, 4, 5], [6], parent="b", extends_parent=True, reward=1.0)
    batch = [attempt(0, call("a", 1, [1], [2]), greedy, last)]
    *_, advantages = assign(batch, {"a": [0.5], "c": [0.8]}, gae_lambda=0.0)
    assert advantages == {"a": pytest.approx([0.3]), "c": pytest.approx([0.2])}


def test_interactions_of_equal_ids_in_two_trajectories_do_not_mix():
    """A workflow of the user's names its interactions as it likes."""
    batch = [attempt(i, call("same", 1, [1], [2], reward=float(i))) for i in range(2)]
    found, *_ = assign(batch, {"same": [0.25]})
    assert [s.targets.advantages.tolist() for s in found] == [[-0.25], [0.75]]


def test_advantages_are_normalized_over_the_batch_and_returns_are_not():
    batch = [attempt(i, call(f"t{i}", 1, [1], [2], reward=4.0 * i)) for i in range(2)]
    found, targets, advantages = assign(batch, {"t0": [1.0], "t1": [1.0]}, normalization="batch")
    # Advantages -1 and 3: mean 1, unbiased deviation sqrt(8).
    assert advantages["t0"] == pytest.approx([-2 / 8**0.5], rel=1e-5)
    assert advantages["t1"] == pytest.approx([2 / 8**0.5], rel=1e-5)
    assert [targets.returns[id(s)].item() for s in found] == [0.0, 4.0]
    assert targets.summarize() == {
        "value_mean": 1.0, "return_mean": 2.0, "explained_variance": 0.0,
    }  # fmt: skip


def test_no_samples_no_targets():
    found, targets, _ = assign([], {}, normalization="batch")
    assert found == []
    assert targets.summarize() == {}


@pytest.mark.parametrize(
    ("new", "old", "returns", "clip_range", "loss", "gradient", "num_clipped"),
    [
        # Half the mean square: (4 + 1) / 2 / 2; gradient (V - R) / 2.
        ([1.0, 0.0], [0.0, 0.0], [3.0, 1.0], None, 1.25, [-1.0, -0.5], 0),
        # 0.5 is beyond the clip: (0.2 - 1)² = 0.64 instead of 0.25. 0.1 is within. -0.5 moved the
        # wrong way: the larger (-0.5 - 1)² = 2.25 keeps its gradient.
        (
            *([0.5, 0.1, -0.5], [0.0] * 3, [1.0] * 3, 0.2),
            *((0.64 + 0.81 + 2.25) / 6, [0.0, -0.9 / 3, -1.5 / 3], 1),
        ),
        # The mirror image: 0.5 is held at 0.8, 0.9 is within, 1.5 the wrong way.
        (
            *([0.5, 0.9, 1.5], [1.0] * 3, [0.0] * 3, 0.2),
            *((0.64 + 0.81 + 2.25) / 6, [0.0, 0.9 / 3, 1.5 / 3], 1),
        ),
        # Beyond its return by more than the clip: (1 - 0.1)² is larger than (0.2 - 0.1)².
        ([1.0], [0.0], [0.1], 0.2, 0.81 / 2, [0.9], 0),
    ],
)
def test_value_loss_by_hand(
    new: list[float],
    old: list[float],
    returns: list[float],
    clip_range: float | None,
    loss: float,
    gradient: list[float],
    num_clipped: int,
):
    values = torch.tensor(new, requires_grad=True)
    found = compute_value_loss(
        values,
        torch.tensor(old),
        torch.tensor(returns),
        clip_range=clip_range,
        num_targets=len(new),
    )
    assert found.loss.item() == pytest.approx(loss)
    assert found.num_clipped == num_clipped
    found.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx(gradient)


def test_parts_of_the_value_loss_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    new, old, returns = (torch.randn(10, generator=generator) for _ in range(3))
    whole = compute_value_loss(new, old, returns, clip_range=0.3, num_targets=10)
    parts = [
        compute_value_loss(new[cut], old[cut], returns[cut], clip_range=0.3, num_targets=10)
        for cut in (slice(0, 3), slice(3, 3), slice(3, 10))
    ]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item())
    assert sum(p.num_clipped.item() for p in parts) == whole.num_clipped


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([0.0, 2.0], [0.0, 2.0], 1.0),
        # A constant explains nothing, however far off it is.
        ([5.0, 5.0], [0.0, 2.0], 0.0),
        # Residuals 1.5 and 0.5: variance 0.25 of 1.
        ([-1.5, 1.5], [0.0, 2.0], 0.75),
        # Residuals -2 and 2: variance 4 of 1.
        ([2.0, 0.0], [0.0, 2.0], -3.0),
        # Residuals -1 and 1: variance 1 of 4.
        ([1.0, 3.0], [0.0, 4.0], 0.75),
        # Small is not equal.
        ([0.0, 2e-7], [0.0, 2e-7], 1.0),
        ([], [], None),
        ([0.0], [1.0], None),
        ([0.0, 0.0], [0.0, 0.0], None),
        ([0.0, 0.0, 0.0], [0.3, 0.3, 0.3], None),
    ],
)
def test_explained_variance(values: list[float], returns: list[float], expected: float | None):
    found = compute_explained_variance(torch.tensor(values), torch.tensor(returns))
    assert found == pytest.approx(expected)
