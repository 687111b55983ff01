"""From values of samples to advantages of samples, along the tree and not along samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl_cli.config.algorithm_config import GaeAdvantageConfig
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.tracking.credit import compute_turn_returns
from agentrl_cli.train.data.packing import build_micro_batch
from agentrl_cli.train.data.samples import Sample, build_samples
from agentrl_cli.train.loss.gae import ValueTargets, assign_gae


def call(name: str, started: int, prompt: list[int], completion: list[int], **more: Any) -> Any:
    return Interaction(
        id=name,
        started=started,
        ended=started + 1,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        rollout_logprobs=(-1.0,) * len(completion),
        versions=(0,) * len(completion),
        **more,
    )


def attempt(index: int, interactions: list[Interaction], turn_discount: float = 1.0) -> Trajectory:
    returns = compute_turn_returns(interactions, turn_discount)
    rewards = [i.reward for i in interactions if i.reward is not None]
    return Trajectory(
        id=f"g/{index}",
        group_id="g",
        task_id="g",
        sample_index=index,
        interactions=tuple(
            Interaction(**{f: getattr(i, f) for f in i.__slots__} | {"turn_return": returns[i.id]})
            for i in interactions
        ),
        reward=sum(rewards),
    )


def branching() -> Trajectory:
    """root samples 2 tokens; left (reward 1) and right (reward 0) both continue it."""
    below = {"parent_id": "root", "extends_parent": True}
    return attempt(
        0,
        [
            call("root", 1, [1, 2], [3, 4]),
            call("left", 3, [1, 2, 3, 4, 5], [6], **below, reward=1.0),
            call("right", 5, [1, 2, 3, 4, 7], [8], **below, reward=0.0),
        ],
    )


def build(trajectories: list[Trajectory], style: str = "concat") -> list[Sample]:
    return build_samples(trajectories, style)  # type: ignore[arg-type]


def by_turn(samples: list[Sample], tensors: dict[int, torch.Tensor]) -> dict[str, list[float]]:
    return {
        turn.interaction_id: tensors[id(sample)][turn.start : turn.end].tolist()
        for sample in samples
        for turn in sample.turns
    }


def assign(
    trajectories: list[Trajectory],
    samples: list[Sample],
    values: dict[str, list[float]],
    turn_discount: float = 1.0,
    **config: Any,
) -> tuple[list[Sample], ValueTargets]:
    scored = {
        id(s): torch.tensor([v for t in s.turns for v in values[t.interaction_id]]) for s in samples
    }
    gae = GaeAdvantageConfig(**{"normalization": "none", **config})
    return assign_gae(trajectories, samples, scored, gae, turn_discount)


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_a_shared_turn_hears_of_all_its_branches(style: str):
    """root is trained in the first sample alone, and has its credit from both."""
    samples = build([branching()], style)
    values = {"root": [0.1, 0.2], "left": [0.6], "right": [0.4]}
    found, targets = assign([branching()], samples, values, gae_lambda=0.5)
    advantages = by_turn(found, {id(s): s.targets.advantages for s in found})
    # left: 1 - 0.6; right: 0 - 0.4; root's last: 0.5 - 0.2 + 0.5 x (0.4 - 0.4) / 2
    assert advantages["left"] == pytest.approx([0.4])
    assert advantages["right"] == pytest.approx([-0.4])
    assert advantages["root"] == pytest.approx([0.1 + 0.5 * 0.3, 0.3])
    returns = by_turn(found, dict(targets.returns))
    assert returns["root"] == pytest.approx([0.35, 0.5])
    assert sum(len(own) for own in returns.values()) == 4


def test_everything_else_of_a_sample_stays():
    samples = build([branching()])
    values = {"root": [0.0, 0.0], "left": [0.0], "right": [0.0]}
    found, targets = assign([branching()], samples, values)
    for new, old in zip(found, samples, strict=True):
        assert new.targets.ids is old.targets.ids
        assert (new.turns, new.trajectory_id) == (old.turns, old.trajectory_id)
        assert old.targets.advantages.tolist() == [0.0] * old.num_targets
        assert len(targets.values[id(new)]) == new.num_targets
    assert targets.values.keys() == targets.returns.keys() == {id(s) for s in found}


def test_an_unscored_trajectory_is_neither_credited_nor_counted():
    lost = Trajectory(
        id="g/1",
        group_id="g",
        task_id="g",
        interactions=(call("x", 1, [1], [2], turn_return=5.0),),
        reward=None,
    )
    alone = call("y", 1, [1], [2, 3], reward=1.0)
    batch = [lost, attempt(1, [alone])]
    samples = build(batch)
    found, targets = assign(batch, samples, {"y": [0.25, 0.5]})
    assert [s.trajectory_id for s in found] == ["g/1"]
    assert found[0].targets.advantages.tolist() == [0.75, 0.5]
    assert targets.summarize()["return_mean"] == 1.0


def test_a_greedy_turn_is_no_action_but_what_follows_it_counts():
    greedy = call("b", 3, [1, 2, 3], [4], parent_id="a", extends_parent=True, temperature=0.0)
    last = call("c", 5, [1, 2, 3, 4, 5], [6], parent_id="b", extends_parent=True, reward=1.0)
    batch = [attempt(0, [call("a", 1, [1], [2]), greedy, last])]
    found, _ = assign(batch, build(batch), {"a": [0.5], "c": [0.8]}, gae_lambda=0.0)
    assert by_turn(found, {id(s): s.targets.advantages for s in found}) == {
        "a": pytest.approx([0.3]),
        "c": pytest.approx([0.2]),
    }


def test_interactions_of_equal_ids_in_two_trajectories_do_not_mix():
    """A workflow of the user's names its interactions as it likes."""
    batch = [attempt(i, [call("same", 1, [1], [2], reward=float(i))]) for i in range(2)]
    found, _ = assign(batch, build(batch), {"same": [0.25]})
    assert [s.targets.advantages.tolist() for s in found] == [[-0.25], [0.75]]


def test_advantages_are_normalized_over_the_batch_and_returns_are_not():
    batch = [attempt(i, [call(f"t{i}", 1, [1], [2], reward=r)]) for i, r in enumerate([0.0, 4.0])]
    values = {"t0": [1.0], "t1": [1.0]}
    found, targets = assign(batch, build(batch), values, normalization="batch")
    # Advantages -1 and 3: mean 1, unbiased deviation sqrt(8).
    expected = [-2 / 8**0.5, 2 / 8**0.5]
    assert [s.targets.advantages.item() for s in found] == pytest.approx(expected, rel=1e-5)
    assert [targets.returns[id(s)].item() for s in found] == [0.0, 4.0]
    assert targets.summarize() == {
        "value_mean": 1.0, "return_mean": 2.0, "explained_variance": 0.0,
    }  # fmt: skip


def test_targets_are_joined_in_the_order_of_a_micro_batch():
    samples = build([branching()])
    values = {"root": [0.1, 0.2], "left": [0.6], "right": [0.4]}
    found, targets = assign([branching()], samples, values)
    batch = build_micro_batch(found[::-1], torch.device("cpu"))
    old, returns = targets.join(batch)
    assert old.tolist() == pytest.approx([0.4, 0.1, 0.2, 0.6])
    assert returns.tolist() == pytest.approx([0.0, 0.5, 0.5, 1.0])


def test_no_samples_no_targets():
    found, targets = assign([], [], {}, normalization="batch")
    assert found == []
    assert targets.summarize() == {}
