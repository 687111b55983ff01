"""Samples: every sampled token trained once, with its own interaction's numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from agentrl_cli.errors import RunError
from agentrl_cli.records import Interaction, InteractionStatus, Trajectory
from agentrl_cli.train.samples import Sample, Turn, assign_advantages, build_samples


def interaction(
    name: str, prompt: list[int], completion: list[int], started: int, **fields: Any
) -> Interaction:
    values: dict[str, Any] = {
        "rollout_logprobs": tuple(-float(token) for token in completion),
        "versions": tuple(token % 3 for token in completion),
        "turn_return": 1.0,
    }
    return Interaction(
        id=name, prompt_ids=tuple(prompt), completion_ids=tuple(completion), started=started,
        **(values | fields),
    )  # fmt: skip


def trajectory(*interactions: Interaction, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(id="g/0", group_id="g", task_id="g", interactions=interactions, reward=reward)


def two_turns(**second: Any) -> tuple[Interaction, Interaction]:
    """Prompt 1 2, reply 3 4, tool result 5, reply 6."""
    return (
        interaction("a", [1, 2], [3, 4], 0, temperature=0.5, top_p=0.9),
        interaction("b", [1, 2, 3, 4, 5], [6], 1, parent_id="a", extends_parent=True, **second),
    )


def trained_tokens(samples: list[Sample]) -> list[tuple[int, float]]:
    """(token id, advantage) of every trained token."""
    return [
        (int(token), float(advantage))
        for sample in samples
        for token, advantage in zip(sample.targets.ids, sample.targets.advantages, strict=True)
    ]


def test_merged_turns_keep_their_own_numbers():
    batch = [trajectory(*two_turns(temperature=2.0))]
    (sample,) = build_samples(batch, {"a": 0.5, "b": -2.0}, "concat")
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    targets = sample.targets
    assert targets.sources.tolist() == [1, 2, 4]
    assert targets.ids.tolist() == [3, 4, 6]
    assert targets.advantages.tolist() == [0.5, 0.5, -2.0]
    assert targets.rollout_logprobs.tolist() == [-3, -4, -6]
    assert targets.versions.tolist() == [0, 1, 0]
    assert targets.temperatures.tolist() == [0.5, 0.5, 2.0]
    assert targets.top_ps.tolist() == pytest.approx([0.9, 0.9, 1.0])
    assert sample.turns == (Turn("a", 0, 2), Turn("b", 2, 3))
    assert sample.trajectory_id == "g/0"


def test_individual_style_gives_one_sample_per_interaction_and_the_same_tokens():
    batch, advantages = [trajectory(*two_turns())], {"a": 0.5, "b": -2.0}
    apart = build_samples(batch, advantages, "individual")
    assert [s.input_ids.tolist() for s in apart] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert trained_tokens(apart) == [(3, 0.5), (4, 0.5), (6, -2.0)]
    assert trained_tokens(build_samples(batch, advantages, "concat")) == trained_tokens(apart)


def test_branches_that_share_a_turn_train_it_once():
    first, second = two_turns()
    third = interaction("c", [1, 2, 3, 4, 7], [8, 9], 2, parent_id="a", extends_parent=True)
    samples = build_samples(
        [trajectory(first, second, third)], {"a": 0.5, "b": -2.0, "c": 3.0}, "concat"
    )
    assert len(samples) == 2
    assert Counter(trained_tokens(samples)) == Counter(
        [(3, 0.5), (4, 0.5), (6, -2.0), (8, 3.0), (9, 3.0)]
    )
    # The later branch still reads the shared turn, but does not train it.
    assert samples[1].input_ids.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert samples[1].targets.sources.tolist() == [4, 5]
    assert sum(sample.num_targets for sample in samples) == 5


@pytest.mark.parametrize("reward", [None, math.nan])
def test_unscored_trajectories_give_nothing(reward: float | None):
    batch = [trajectory(*two_turns(), reward=reward), trajectory(*two_turns())]
    samples = build_samples(batch, {"a": 1.0, "b": 1.0}, "concat")
    assert [s.trajectory_index for s in samples] == [1]
    assert [s.num_targets for s in samples] == [3]


def test_advantage_zero_stays_in_the_denominator_without_a_forward_pass():
    (sample,) = build_samples([trajectory(*two_turns())], {"a": 0.0, "b": 0.0}, "concat")
    assert not sample.has_advantage
    assert sample.num_targets == 3


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_advantages_may_be_assigned_later(style: Any):
    first, second = two_turns()
    third = interaction("c", [1, 2, 3, 4, 7], [8, 9], 2, parent_id="a", extends_parent=True)
    batch, advantages = [trajectory(first, second, third)], {"a": 0.5, "b": -2.0, "c": 3.0}
    drafts = build_samples(batch, None, style)
    assert not any(draft.has_advantage for draft in drafts)
    assigned = assign_advantages(drafts, advantages)
    assert trained_tokens(assigned) == trained_tokens(build_samples(batch, advantages, style))
    assert [s.turns for s in assigned] == [s.turns for s in drafts]
    # The drafts stay what they were.
    assert not any(draft.has_advantage for draft in drafts)


@pytest.mark.parametrize(
    "fields",
    [{"turn_return": None}, {"temperature": 0.0}, {"status": InteractionStatus.FAILED}],
    ids=["no return", "greedy", "failed"],
)
def test_what_cannot_be_trained_is_masked(fields: dict[str, Any]):
    samples = build_samples([trajectory(*two_turns(**fields))], {"a": 0.5, "b": -2.0}, "concat")
    assert trained_tokens(samples) == [(3, 0.5), (4, 0.5)]


def test_an_empty_prompt_leaves_the_first_token_out():
    """Nothing stands before it that could predict it."""
    batch = [trajectory(interaction("a", [], [3, 4], 0))]
    assert trained_tokens(build_samples(batch, {"a": 1.0}, "concat")) == [(4, 1.0)]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_rollout_logprob_that_is_not_finite_stops_the_run(logprob: float):
    batch = [trajectory(*two_turns(rollout_logprobs=(logprob,)))]
    with pytest.raises(RunError, match=r"trajectory g/0, interaction b: rollout logprob"):
        build_samples(batch, {"a": 1.0, "b": 1.0}, "concat")
