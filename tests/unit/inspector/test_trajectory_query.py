from __future__ import annotations

import pytest

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.trajectory_query import TrajectoryQuery, find_one, parse_steps, select
from agentrl_cli.store.run_folder import RunFolder


def ids(folder: RunFolder, **query) -> list[str]:
    return [f.summary.id for f in select(folder, TrajectoryQuery(**query)).found]


def test_filters(folder: RunFolder) -> None:
    assert len(ids(folder)) == 6
    assert ids(folder, steps="1") == ["000001.000/0", "000001.000/1"]
    assert len(ids(folder, steps="last")) == 4
    assert ids(folder, min_reward=0.5, max_reward=0.9) == ["000002.000/0"]
    assert ids(folder, max_reward=0.0) == ["000001.000/1"]
    assert ids(folder, failure="any") == ["000002.000/1", "000002.000/2"]
    assert ids(folder, failure="timeout") == ["000002.000/1"]
    assert len(ids(folder, failure="none")) == 4
    assert ids(folder, task_id="5") == ["000001.000/0"]
    assert ids(folder, agent_name="solver") == ["000001.000/0"]
    assert ids(folder, steps="2", task_id="1", failure="none") == ["000002.000/3"]


def test_evals_are_apart_from_steps(folder: RunFolder) -> None:
    assert ids(folder, evals="all") == ["000000.000/0", "000900.000/0"]
    assert ids(folder, evals="all", steps="2") == ["000900.000/0"]
    assert ids(folder, evals="manual") == ["000900.000/0"]
    assert ids(folder, evals="training") == ["000000.000/0"]
    message = r"manul: no evaluation .* did you mean 'manual'\? allowed: all, manual, training$"
    with pytest.raises(UserInputError, match=message):
        ids(folder, evals="manul")


def test_sorting_puts_what_has_no_value_last(folder: RunFolder) -> None:
    step = {"steps": "2"}
    assert ids(folder, sort="reward", **step)[:2] == ["000002.000/3", "000002.000/0"]
    assert ids(folder, sort="reward", ascending=True, **step)[:2] == [
        "000002.000/0",
        "000002.000/3",
    ]
    assert ids(folder, sort="tokens", **step)[0] == "000002.000/3"
    assert ids(folder, sort="seconds", **step)[0] == "000002.000/0"
    assert ids(folder, sort="turns")[0] == "000001.000/0"


def test_limit_counts_what_is_left_out(folder: RunFolder) -> None:
    selection = select(folder, TrajectoryQuery(limit=2))
    assert len(selection.found) == 2
    assert selection.num_matching == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", [(12, 12)]), ("3-7", [(3, 7)]), ("1, 4-5", [(1, 1), (4, 5)])],
)
def test_steps_are_parsed(text: str, expected: list[tuple[int, int]]) -> None:
    assert parse_steps(text) == expected


@pytest.mark.parametrize("text", ["x", "", "1-", "-1", "7-3", "1..3"])
def test_steps_that_mean_nothing(text: str) -> None:
    with pytest.raises(UserInputError, match="--step"):
        parse_steps(text)


def test_steps_that_are_not_stored(folder: RunFolder) -> None:
    with pytest.raises(UserInputError, match=r"not stored; stored steps: 1 to 2 \(2\)"):
        select(folder, TrajectoryQuery(steps="7"))


def test_one_is_found_by_id_or_number(folder: RunFolder) -> None:
    assert find_one(folder, TrajectoryQuery(), "000002.000/3")[1].id == "000002.000/3"
    source, trajectory = find_one(folder, TrajectoryQuery(steps="2", sort="tokens"), "1")
    assert (source.step, trajectory.id) == (2, "000002.000/3")
    # An id is unique in the run, so it is found whatever the filters say.
    assert find_one(folder, TrajectoryQuery(steps="1"), "000900.000/0")[0].is_eval
    for name in ("0", "7", "nobody"):
        with pytest.raises(UserInputError, match="a number from 1 to 6"):
            find_one(folder, TrajectoryQuery(), name)


def test_a_damaged_step_does_not_hide_the_others(folder: RunFolder) -> None:
    (folder.path / "trajectories" / "step-000001.parquet").write_bytes(b"x")
    selection = select(folder, TrajectoryQuery())
    assert len(selection.found) == 4
    assert "step-000001.parquet: is damaged" in selection.problems[0]
    assert find_one(folder, TrajectoryQuery(), "000900.000/0")[0].is_eval


def test_a_run_without_any_step(config) -> None:
    with (
        RunFolder.create_or_resume(config) as run,
        pytest.raises(UserInputError, match="no steps are stored yet"),
    ):
        select(run, TrajectoryQuery())


def test_a_run_of_evaluations_alone_says_how_to_see_them(folder: RunFolder) -> None:
    for step in (folder.path / "trajectories").glob("step-*"):
        step.unlink()
    with pytest.raises(UserInputError, match="of evaluations, type --evals all"):
        select(folder, TrajectoryQuery())
