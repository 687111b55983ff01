"""Samples: every sampled token trained once, with its own interaction's numbers."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.errors import RunError
from agentrl_cli.records import Interaction, InteractionStatus, Trajectory
from agentrl_cli.train.data.samples import (
    Sample,
    Targets,
    Turn,
    assign_advantages,
    build_samples,
    build_scoring_sample,
    join_targets,
)
from agentrl_cli.train.masks import FREE, MaskTable, TokenMasks


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


def build(
    batch: list[Trajectory], advantages: dict[str, float], style: Any, maker: Any = None
) -> list[Sample]:
    return assign_advantages(build_samples(batch, style, maker), advantages)


def test_merged_turns_keep_their_own_numbers():
    batch = [trajectory(*two_turns(temperature=2.0))]
    (sample,) = build(batch, {"a": 0.5, "b": -2.0}, "concat")
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
    assert (sample.trajectory_id, sample.num_tokens, sample.num_targets) == ("g/0", 6, 3)
    assert targets.masks is None
    for field in dataclasses.fields(Targets)[:-1]:
        is_integer = field.name in ("sources", "ids", "versions")
        kind = torch.long if is_integer else torch.float32
        assert getattr(targets, field.name).dtype == kind, field.name


def test_individual_style_gives_one_sample_per_interaction_and_the_same_tokens():
    batch, advantages = [trajectory(*two_turns())], {"a": 0.5, "b": -2.0}
    apart = build(batch, advantages, "individual")
    assert [s.input_ids.tolist() for s in apart] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert trained_tokens(apart) == [(3, 0.5), (4, 0.5), (6, -2.0)]
    assert trained_tokens(build(batch, advantages, "concat")) == trained_tokens(apart)


def test_the_style_that_a_workflow_exported_in_goes_before_the_configured_one():
    individual = dataclasses.replace(trajectory(*two_turns()), export_style="individual")
    assert len(build([individual], {"a": 0.5, "b": -2.0}, "concat")) == 2
    concat = dataclasses.replace(individual, export_style="concat")
    assert len(build([concat], {"a": 0.5, "b": -2.0}, "individual")) == 1


def test_branches_that_share_a_turn_train_it_once():
    first, second = two_turns()
    third = interaction("c", [1, 2, 3, 4, 7], [8, 9], 2, parent_id="a", extends_parent=True)
    samples = build([trajectory(first, second, third)], {"a": 0.5, "b": -2.0, "c": 3.0}, "concat")
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
    samples = build(batch, {"a": 1.0, "b": 1.0}, "concat")
    assert [s.trajectory_index for s in samples] == [1]
    assert [s.num_targets for s in samples] == [3]


@pytest.mark.parametrize(
    "fields",
    [{"turn_return": None}, {"temperature": 0.0}, {"status": InteractionStatus.FAILED}],
    ids=["no return", "greedy", "failed"],
)
def test_what_cannot_be_trained_is_masked(fields: dict[str, Any]):
    samples = build([trajectory(*two_turns(**fields))], {"a": 0.5, "b": -2.0}, "concat")
    assert trained_tokens(samples) == [(3, 0.5), (4, 0.5)]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_rollout_logprob_that_is_not_finite_stops_the_run(logprob: float):
    batch = [trajectory(*two_turns(rollout_logprobs=(logprob,)))]
    message = f"^trajectory g/0, interaction b: rollout logprob {logprob} of completion token 0"
    with pytest.raises(RunError, match=message):
        build(batch, {"a": 1.0, "b": 1.0}, "concat")


@pytest.mark.parametrize("turn_return", [None, 1.0])
def test_a_sequence_without_a_trained_token_gives_no_sample(turn_return: float | None):
    # Without a return, or one token that nothing stands before.
    batch = [
        trajectory(interaction("a", [], [3], 0, turn_return=turn_return)),
        trajectory(interaction("b", [1], [4], 0)),
    ]
    (sample,) = build(batch, {"a": 1.0, "b": 2.0}, "concat")
    assert sample.trajectory_index == 1
    assert trained_tokens([sample]) == [(4, 2.0)]


def test_joined_targets_lie_one_after_the_other():
    first = build_scoring_sample([1, 2, 3], 1, temperature=0.5, top_p=0.9).targets
    second = build_scoring_sample([4, 5], 1, temperature=2.0, top_p=0.8).targets
    table = MaskTable(1)
    masked = dataclasses.replace(second, masks=TokenMasks(torch.tensor([3]), table))
    joined = join_targets([first, masked])
    assert joined.ids.tolist() == [2, 3, 5]
    assert joined.sources.tolist() == [0, 1, 0]
    assert joined.temperatures.tolist() == [0.5, 0.5, 2.0]
    assert joined.masks is not None
    assert joined.masks.numbers.tolist() == [FREE, FREE, 3]
    assert join_targets([first, second]).masks is None


@pytest.mark.parametrize(
    ("start", "sources", "ids"), [(0, [0, 1], [8, 9]), (1, [0, 1], [8, 9]), (2, [1], [9])]
)
def test_tokens_to_score(start: int, sources: list[int], ids: list[int]):
    sample = build_scoring_sample([7, 8, 9], start, temperature=0.5, top_p=0.25)
    targets = sample.targets
    assert sample.input_ids.tolist() == [7, 8, 9]
    assert (targets.sources.tolist(), targets.ids.tolist()) == (sources, ids)
    assert targets.versions.tolist() == [-1] * len(ids)
    assert targets.temperatures.tolist() == [0.5] * len(ids)
    assert targets.top_ps.tolist() == [0.25] * len(ids)
    assert targets.rollout_logprobs.tolist() == targets.advantages.tolist() == [0.0] * len(ids)
    assert (sample.trajectory_index, sample.trajectory_id) == (0, "")


class NumberingMaker:
    """Numbers masks as it is told; stands for a grammar."""

    def __init__(self, numbers: list[int] | None) -> None:
        self.table = MaskTable(1)
        self.table.add(np.array([1], np.int32))
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self._numbers = numbers

    def number_masks(self, tag: str, completion_ids: Sequence[int]) -> list[int] | None:
        self.asked.append((tag, tuple(completion_ids)))
        return self._numbers


def build_constrained(maker: Any, prompt: tuple[int, ...] = (1,)) -> list[Sample]:
    first = interaction("a", list(prompt), [3, 4, 5], 0, structural_tag="TAG")
    free = interaction("b", [9], [8], 1)
    return build([trajectory(first, free)], {"a": 1.0, "b": 1.0}, "concat", maker)


@pytest.mark.parametrize(
    ("prompt", "numbers", "found"),
    [
        ((1,), [0, 1, 1], [0, 1, 1]),
        # The first token of a sequence is left out.
        ((), [1, 0, 1], [0, 1]),
        # Everything was allowed.
        ((1,), [FREE] * 3, None),
    ],
)
def test_constrained_tokens_get_the_masks_of_their_tag(
    prompt: tuple[int, ...], numbers: list[int], found: list[int] | None
):
    maker = NumberingMaker(numbers)
    first, free = build_constrained(maker, prompt)
    assert maker.asked == [("TAG", (3, 4, 5))]
    assert first.targets.ids.tolist() == [3, 4, 5][-first.num_targets :]
    assert free.targets.masks is None
    masks = first.targets.masks
    assert (masks and masks.numbers.tolist()) == found
    assert masks is None or (masks.table is maker.table and masks.numbers.dtype == torch.long)


def test_tokens_that_their_tag_does_not_allow_are_not_trained(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        samples = build_constrained(NumberingMaker(None))
    assert trained_tokens(samples) == [(8, 1.0)]
    assert "interaction a: its tokens are not allowed by the structural tag" in caplog.text


def test_turns_after_one_that_cannot_be_trained_still_are():
    first, second = two_turns()
    first = dataclasses.replace(first, structural_tag="TAG")
    (sample,) = build(
        [trajectory(first, second)],
        {"a": 1.0, "b": 2.0},
        "concat",
        NumberingMaker(None),  # type: ignore[arg-type]
    )
    assert trained_tokens([sample]) == [(6, 2.0)]
    assert sample.turns == (Turn("b", 0, 1),)


def test_a_turn_without_targets_changes_no_type():
    first = interaction("a", [], [3], 0)
    second = interaction("b", [3, 5], [6], 1, parent_id="a", extends_parent=True)
    (sample,) = build([trajectory(first, second)], {"a": 1.0, "b": 2.0}, "concat")
    assert trained_tokens([sample]) == [(6, 2.0)]
    assert sample.turns == (Turn("a", 0, 0), Turn("b", 0, 1))
    targets = sample.targets
    assert {targets.ids.dtype, targets.versions.dtype, targets.sources.dtype} == {torch.long}


def test_constrained_tokens_need_a_mask_maker():
    message = "^trajectories with a structural tag need a mask_maker$"
    with pytest.raises(ValueError, match=message):
        build_constrained(None)
