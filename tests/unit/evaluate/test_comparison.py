from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.evaluate.comparison import (
    compare_tasks,
    compute_paired_interval,
    measure_tasks,
)
from agentrl_cli.records import Trajectory

rewards_of_tasks = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


def attempt(
    task: int, reward: float | None, *, sample: int = 0, row: str | None = None
) -> Trajectory:
    return Trajectory(
        id=f"{task}/{sample}",
        group_id=str(task),
        task_id=str(task),
        sample_index=sample,
        task={"question": row or f"question {task}"},
        reward=reward,
    )


def measure(*rewards: float | None):
    return measure_tasks([attempt(task, reward) for task, reward in enumerate(rewards)])


def test_differences_are_paired_by_task() -> None:
    comparison = compare_tasks(measure(0.0, 1.0, 0.2, 0.5), measure(1.0, 0.0, 0.4, 0.5))
    assert comparison.num_tasks == 4
    # (1 - 1 + 0.2 + 0) / 4
    assert (comparison.before, comparison.difference) == pytest.approx((0.425, 0.05))
    assert (comparison.num_improved, comparison.num_worse) == (2, 1)
    assert [flip.task_id for flip in comparison.newly_passed] == ["0"]
    assert [flip.task_id for flip in comparison.newly_failed] == ["1"]


def test_a_task_is_the_mean_of_its_attempts_and_passes_by_more_than_half_of_them() -> None:
    before = measure_tasks([attempt(0, r, sample=n) for n, r in enumerate((1.0, 0.0, None))])
    after = measure_tasks([attempt(0, r, sample=n) for n, r in enumerate((1.0, 1.0, 0.0))])
    comparison = compare_tasks(before, after)
    assert comparison.difference == pytest.approx(2 / 3 - 1 / 2)
    assert len(comparison.newly_passed) == 1
    assert comparison.interval is None


def test_what_has_no_partner_is_counted_and_left_out() -> None:
    before = measure(1.0, 0.0, None, 1.0)
    after = measure_tasks(
        [
            attempt(0, 1.0),
            # Another row has the position of task 1; nothing of task 3 was attempted.
            attempt(1, 1.0, row="another"),
            attempt(2, 1.0),
        ]
    )
    comparison = compare_tasks(before, after)
    assert comparison.num_tasks == 1
    # Task 1 of either dataset, the unscored one, and task 3.
    assert comparison.num_unpaired == 4
    nothing = compare_tasks(measure(1.0), measure_tasks([attempt(7, 1.0)]))
    assert nothing.difference is None
    assert "no task in common" in nothing.format_verdict("A", "B")


@pytest.mark.parametrize(
    ("num_better", "num_worse", "verdict"),
    [
        (30, 0, "better"),
        (0, 30, "worse"),
        (16, 14, "unclear"),
        # The bootstrap alone would call it better: 5 of 5 happen by chance one time in 16.
        (5, 0, "unclear"),
        (7, 0, "better"),
        (0, 0, "the same"),
    ],
)
def test_verdicts_on_sixty_tasks(num_better: int, num_worse: int, verdict: str) -> None:
    num_same = 60 - num_better - num_worse
    before = measure(*[0.0] * num_better, *[1.0] * num_worse, *[0.5] * num_same)
    after = measure(*[1.0] * num_better, *[0.0] * num_worse, *[0.5] * num_same)
    comparison = compare_tasks(before, after)
    assert comparison.verdict == verdict
    text = comparison.format_verdict("A", "B")
    assert "60 tasks" in text
    if verdict in ("better", "worse"):
        assert f"B is {verdict} than A by 0." in text


def test_the_interval_of_few_differences_by_hand() -> None:
    # Of two tasks, 0 and 1, the mean is 0, 1/2 or 1, with chances 1/4, 1/2 and 1/4.
    assert compute_paired_interval([0.0, 1.0]) == (0.0, 1.0)
    # Of 100 tasks with half of them 1, the normal approximation: 0.5 +- 1.96 x 0.05.
    low, high = compute_paired_interval([0.0, 1.0] * 50) or (0, 0)
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.015)


def test_paired_intervals_cover_the_truth() -> None:
    rng = random.Random(0)
    num_covered = 0
    for trial in range(200):
        # Skewed, with a mean of 0.1: one task in ten is solved that was not.
        differences = [float(rng.random() < 0.2) - float(rng.random() < 0.1) for _ in range(60)]
        low, high = compute_paired_interval(differences, seed=trial) or (0, 0)
        num_covered += low <= 0.1 <= high
    # 95 % of 200, with three standard errors of room.
    assert 180 <= num_covered <= 199


@given(rewards_of_tasks, st.data())
def test_the_other_way_round_is_the_same_with_the_other_sign(
    before: list[float], data: st.DataObject
) -> None:
    after = data.draw(st.lists(st.floats(-10, 10), min_size=len(before), max_size=len(before)))
    there, back = (
        compare_tasks(measure(*before), measure(*after)),
        compare_tasks(measure(*after), measure(*before)),
    )
    assert there.difference == pytest.approx(-(back.difference or 0.0), abs=1e-9)
    assert (there.num_improved, there.num_worse) == (back.num_worse, back.num_improved)
    assert there.newly_passed == tuple(
        type(f)(
            task_id=f.task_id,
            question=f.question,
            reward_before=f.reward_after,
            reward_after=f.reward_before,
        )
        for f in back.newly_failed
    )
    if there.interval is not None and back.interval is not None:
        low, high = back.interval
        assert there.interval == pytest.approx((-high, -low), abs=1e-9)
        assert min(there.interval) >= min(a - b for a, b in zip(after, before, strict=True)) - 1e-9


@given(rewards_of_tasks)
def test_equal_evaluations_do_not_differ(rewards: list[float]) -> None:
    comparison = compare_tasks(measure(*rewards), measure(*rewards))
    assert comparison.difference == 0.0
    assert comparison.interval in (None, (0.0, 0.0))
    assert comparison.verdict == "the same"
    assert comparison.num_unpaired == 0
