"""Columns and rows of a trajectory file say what its trajectories say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.records import Interaction, SharedSequence, Trajectory
from agentrl_cli.store.trajectory_file import (
    read_proximal_logprobs,
    read_rows,
    read_size,
    read_summaries,
    read_summary_columns,
    read_trajectory_file,
    write_proximal_file,
    write_trajectory_file,
)
from agentrl_cli.store.trajectory_record import CALL_COLUMNS, parse_row


def make(number: int) -> Trajectory:
    prompt = SharedSequence((1, 2, number))
    first = Interaction(
        id=f"call-{number}", messages=({"role": "user", "content": str(number)},),
        prompt_ids=prompt,
        completion_ids=(3,) * (number % 3), rollout_logprobs=(-0.5 * number,) * (number % 3),
        versions=(number,) * (number % 3), turn_return=0.5,
    )  # fmt: skip
    return Trajectory(
        id=f"g/{number}", group_id="g", task_id=str(number), sample_index=number,
        interactions=(first,) if number % 5 else (), reward=None if number == 4 else 1.0,
        seconds=1.0,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    # More than one row group.
    path = tmp_path / "trajectories" / "step-000001.parquet"
    write_trajectory_file(path, [make(number) for number in range(600)])
    return path


def test_columns_are_those_of_summaries(path: Path) -> None:
    columns, summaries = read_summary_columns(path), read_summaries(path)
    assert columns.texts["task_id"] == [s.task_id for s in summaries]
    assert columns.texts["final_answer"] == [None] * 600
    turns = columns.numbers["num_turns"]
    assert turns.tolist() == [s.num_turns for s in summaries]
    rewards = columns.numbers["reward"].tolist()
    assert math.isnan(rewards[4])
    assert rewards[:4] == [1.0] * 4
    # Over the tokens of each trajectory, NaN where it sampled none.
    smallest = columns.numbers["logprob_min"]
    expected = [-0.5 * n if n % 3 and n % 5 else math.nan for n in range(600)]
    np.testing.assert_array_equal(smallest, expected)
    np.testing.assert_array_equal(columns.numbers["logprob_mean"], expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (250, 270), (595, 9999), (255, 513)])
def test_rows_make_the_trajectories_that_were_written(path: Path, start: int, stop: int) -> None:
    rows = read_rows(path, start, stop)
    trajectories = read_trajectory_file(path)[start:stop]
    assert [row["task_json"] for row in rows] == [json.dumps({})] * len(trajectories)
    for row, trajectory in zip(rows, trajectories, strict=True):
        calls = row["interactions"]
        assert all(len(none) == 0 for none in calls.pop("proximal_logprobs"))
        assert calls.keys() == CALL_COLUMNS.keys()
        for name, values in calls.items():
            calls[name] = [v.tolist() if isinstance(v, np.ndarray) else v for v in values]
        assert parse_row(row) == trajectory


def test_proximal_logprobs_belong_to_the_calls_that_have_them(path: Path) -> None:
    assert np.isnan(read_summary_columns(path).numbers["logprob_gap_max"]).all()
    assert read_proximal_logprobs(path, ["call-2"]) == {}
    # Of some, in any order; the first token of a sequence has none.
    passed = [n for n in range(599, 0, -1) if n % 3 == 2 and n % 5]
    computed = {
        f"call-{n}": np.array([math.nan if n == 2 else -0.5 * n - 4, -0.5 * n + 0.25], np.float32)
        for n in passed
    }
    write_proximal_file(path, computed)
    gaps = read_summary_columns(path).numbers["logprob_gap_max"]
    expected = [0.25 if n == 2 else 4.0 if n in passed else math.nan for n in range(600)]
    np.testing.assert_array_equal(gaps, expected)
    for row in read_rows(path, 250, 270):
        number, calls = row["sample_index"], row["interactions"]
        found = [values.tolist() for values in calls["proximal_logprobs"]]
        known = computed.get(f"call-{number}", np.zeros(0)).tolist()
        assert found == ([known] if number % 5 else [])
    [(name, values)] = read_proximal_logprobs(path, ["call-1", "call-8", "nobody"]).items()
    assert (name, values.tolist()) == ("call-8", [-8.0, -3.75])
    # A step is learned again.
    write_proximal_file(path, {})
    assert np.isnan(read_summary_columns(path).numbers["logprob_gap_max"]).all()
    beside = path.parents[1] / "proximal_logprobs" / path.name
    beside.write_bytes(b"torn")
    with pytest.raises(StoreError, match=r"proximal_logprobs/step-000001\.parquet: is damaged"):
        read_rows(path, 0, 3)


def test_empty_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "trajectories" / "step-000001.parquet"
    write_trajectory_file(path, [])
    assert read_rows(path, 0, 10) == []
    assert len(read_summary_columns(path).numbers["reward"]) == 0
    assert read_size(path).num_rows == 0
    path.write_bytes(b"torn")
    with pytest.raises(StoreError, match="is damaged"):
        read_summary_columns(path)
