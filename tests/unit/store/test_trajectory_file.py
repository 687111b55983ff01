from __future__ import annotations

import dataclasses
import datetime
import json
import math
import random
import struct
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.errors import StoreError
from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    InteractionStatus,
    Message,
    MismatchCause,
    SharedSequence,
    StopReason,
    Trajectory,
)
from agentrl_cli.store.trajectory_file import (
    find_matches,
    read_summaries,
    read_totals,
    read_trajectory,
    read_trajectory_file,
    write_trajectory_file,
)
from agentrl_cli.store.trajectory_record import format_record, parse_record
from agentrl_cli.store.trajectory_summary import TrajectoryTotals

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}}

FULL = Trajectory(
    id="g7/3",
    group_id="g7",
    task_id="41",
    sample_index=3,
    step=12,
    replaced_by="g9",
    task={"question": "wie viel? 何", "answer": 4, "nested": {"x": [1, 2.5, None]}},
    agent_name="solver",
    interactions=(
        Interaction(
            id="chatcmpl-1",
            messages=({"role": "user", "content": "3+1\n\ud83d"},),
            tools=({"type": "function", "function": {"name": "f", "parameters": {}}},),
            reply={"role": "assistant", "content": None, "tool_calls": [CALL]},
            prompt_ids=(1, 2, 151643),
            completion_ids=(5, 6),
            rollout_logprobs=(-0.1, -1e-300),
            versions=(3, 4),
            temperature=0.7,
            top_p=0.95,
            structural_tag="{}",
            has_malformed_call=True,
            finish_reason="tool_calls",
            started=1,
            ended=2,
            started_at=1700000000.123456,
            seconds=0.25,
            turn_return=1.0,
        ),
        Interaction(
            id="chatcmpl-2",
            parent_id="chatcmpl-1",
            extends_parent=True,
            mismatch_cause=MismatchCause.HISTORY_EDITED,
            status=InteractionStatus.CANCELLED,
            error="cancelled",
            started=3,
            num_reported_tokens=17,
            reward=-0.0,
        ),
    ),
    reward=0.1 + 0.2,
    reward_parts={"format": 0.1, "answer": math.inf},
    export_style="individual",
    stop_reason=StopReason.MAX_TURNS,
    final_answer="4",
    failure=Failure(
        boundary=Boundary.TOOL,
        kind="KeyError",
        message="'x'",
        traceback="Trace\n  x",
        cause=FailureCause.POLICY,
    ),
    started_at=1700000000.25,
    seconds=3.5,
    reward_seconds=0.001,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-000012.parquet"


def test_every_field_survives(path) -> None:
    write_trajectory_file(path, [FULL, Trajectory(id="a/0", group_id="a", task_id="0")])
    first, second = read_trajectory_file(path)
    for field in dataclasses.fields(Trajectory):
        assert getattr(first, field.name) == getattr(FULL, field.name), field.name
    assert second == Trajectory(id="a/0", group_id="a", task_id="0")
    assert str(first.interactions[1].reward) == "-0.0"
    assert parse_record(format_record(FULL)) == FULL


def test_the_full_record_sets_every_field_away_from_its_default() -> None:
    """Guards the test above: a new field of the records must be added to FULL."""
    for record, made in ((Trajectory, [FULL]), (Interaction, FULL.interactions)):
        for field in dataclasses.fields(record):
            if field.default is not dataclasses.MISSING:
                assert any(getattr(m, field.name) != field.default for m in made), field.name


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(), max_size=20))
def test_floats_come_back_bit_for_bit(tmp_path_factory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("floats") / "step-000001.parquet"
    call = Interaction(
        id="c",
        completion_ids=tuple(range(len(values))),
        rollout_logprobs=tuple(values),
        versions=(0,) * len(values),
    )
    write_trajectory_file(
        path, [Trajectory(id="a/0", group_id="a", task_id="0", interactions=(call,))]
    )
    back = read_trajectory_file(path)[0].interactions[0].rollout_logprobs
    # NaN has many bit patterns and no equality; its presence is what matters.
    same = [struct.pack("d", v) if v == v else b"nan" for v in values]
    assert [struct.pack("d", v) if v == v else b"nan" for v in back] == same


def test_rows_with_values_that_json_has_not_are_saved(path) -> None:
    task = {
        "when": datetime.date(2026, 1, 2),
        "array": np.array([1, 2]),
        "scalar": np.int64(3),
        "blob": b"\x00\xff",
        "set": {2, 1},
        "odd": object,
        7: "a number as key",
    }
    rewards = [math.nan, None, True, np.float32(0.5)]
    made = [
        Trajectory(
            id=f"a/{i}", group_id="a", task_id="0", task=task, final_answer="x\ud83dy", reward=r
        )
        for i, r in enumerate(rewards * 100)
    ]
    write_trajectory_file(path, made)
    assert pq.ParquetFile(path).num_row_groups > 1
    read = read_trajectory_file(path)
    assert [t.id for t in read] == [t.id for t in made]
    assert math.isnan(read[0].reward)
    assert [t.reward for t in read[1:4]] == [None, 1.0, 0.5]
    assert read[0].final_answer == "x\\ud83dy"
    assert read[0].task == {
        "when": "2026-01-02",
        "array": [1, 2],
        "scalar": 3,
        "blob": {"base64": "AP8="},
        "set": [1, 2],
        "odd": "<class 'object'>",
        "7": "a number as key",
    }


def test_summaries_count_and_read_no_tokens(path, monkeypatch) -> None:
    write_trajectory_file(path, [FULL])
    read: list[str] = []
    real = pq.ParquetFile.read

    def spy(file, columns, **options):
        read.extend(columns)
        return real(file, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", spy)
    (summary,) = read_summaries(path)
    assert "interactions" not in read
    assert "task_json" not in read
    assert summary.num_turns == FULL.num_turns == 1
    assert summary.num_completion_tokens == FULL.num_completion_tokens == 2 + 17
    assert summary.num_prompt_tokens == 3
    assert summary.num_tool_calls == 1
    assert summary.reward == FULL.reward
    assert summary.replaced_by == "g9"
    # The mean return of its turns, of which the second has none.
    assert summary.score == 1.0
    assert summary.failure_boundary is Boundary.TOOL


def test_the_footer_has_the_totals(path) -> None:
    made = [FULL, Trajectory(id="a/0", group_id="a", task_id="0", reward=math.nan)]
    write_trajectory_file(path, made)
    assert read_totals(path) == TrajectoryTotals.of(made)
    assert read_totals(path).num_policy_failures == read_totals(path).num_unscored == 1
    write_trajectory_file(path, [])
    assert read_totals(path) == TrajectoryTotals.of([])
    assert read_trajectory_file(path) == read_summaries(path) == []
    assert find_matches(path, {"reward": lambda _: True}, "seconds").num_matching == 0


def test_one_of_many_is_found_and_read_alone(path) -> None:
    made = [
        dataclasses.replace(FULL, id=f"g7/{n}", reward=[0.0, None, math.nan, 0.5][n % 4], seconds=n)
        for n in range(600)
    ]
    write_trajectory_file(path, made)
    assert pq.ParquetFile(path).num_row_groups > 1
    high = {"reward": lambda reward: reward is not None and reward > 0.2}
    found = find_matches(path, high, "seconds", ascending=True, limit=3)
    assert found == (150, [3, 7, 11], [3.0, 7.0, 11.0])
    assert find_matches(path, high, "seconds", limit=2).numbers == [599, 595]
    # Unscored ones, also those with NaN, come last either way.
    for ascending in (True, False):
        by_reward = find_matches(path, {}, "reward", ascending=ascending).numbers
        assert by_reward[300:] == [n for n in range(600) if n % 4 in (1, 2)]
    unscored = find_matches(path, {"reward": lambda reward: reward is None})
    assert unscored.numbers == [*range(1, 600, 4)]
    tools = {"failure_boundary": lambda b: b is Boundary.TOOL, "id": lambda name: name == "g7/599"}
    assert find_matches(path, tools).numbers == [599]
    assert read_trajectory(path, 599) == made[599]
    assert [s.id for s in read_summaries(path, [599, 3, 300])] == ["g7/599", "g7/3", "g7/300"]


def converse(num_turns: int, *, is_shared: bool = True) -> Trajectory:
    """A conversation as the gateway records it, in which each call repeats what came before."""
    rng = random.Random(num_turns)
    messages: SharedSequence[Message] = SharedSequence()
    ids: SharedSequence[int] = SharedSequence()
    calls: list[Interaction] = []
    for turn in range(num_turns):
        asked = {"role": "tool", "content": f"{rng.random()} is what was found"}
        messages = SharedSequence((asked,), messages)
        prompt_ids = SharedSequence(array("i", (rng.randrange(50_000) for _ in range(60))), ids)
        completion_ids = SharedSequence(array("i", (rng.randrange(50_000) for _ in range(60))))
        reply = {"role": "assistant", "content": f"{rng.random()} it is"}
        call = Interaction(
            id=f"c{turn}",
            parent_id=f"c{turn - 1}" if turn else None,
            extends_parent=turn > 0,
            messages=messages if is_shared else tuple(messages),
            tools=({"type": "function", "function": {"name": "f"}},),
            reply=reply,
            prompt_ids=prompt_ids if is_shared else tuple(prompt_ids),
            completion_ids=completion_ids,
            rollout_logprobs=tuple(rng.random() for _ in range(60)),
            versions=(turn,) * 60,
            started=turn,
        )
        calls.append(call)
        messages = SharedSequence(({**reply},), messages)
        ids = SharedSequence(completion_ids, prompt_ids)
    return Trajectory(id="a/0", group_id="a", task_id="0", interactions=tuple(calls))


def test_a_conversation_grows_by_what_is_new(path) -> None:
    """In the record, in the file, and in memory after both were read: not with its square."""
    sizes = []
    for num_turns in (25, 100):
        made = converse(num_turns)
        record = format_record(made)
        write_trajectory_file(path, [made])
        sizes.append((len(record), path.stat().st_size))
        for read in (parse_record(record), *read_trajectory_file(path)):
            assert read == made
            calls = read.interactions
            assert all(len(call.prompt_ids.own) == 60 for call in calls)
            assert format_record(read) == record
            # A reply that came back as it was given is the same message.
            assert calls[1].messages[1] is calls[0].reply
    assert all(large < 4.5 * small for small, large in zip(*sizes, strict=True))


def test_what_is_held_apart_is_stored_all_the_same(path) -> None:
    made = converse(5, is_shared=False)
    assert parse_record(format_record(made)) == made == converse(5)
    write_trajectory_file(path, [made])
    assert read_trajectory_file(path) == [made]


def test_a_prompt_that_shares_a_part_of_its_parents_tokens(path) -> None:
    """Reasoning that the template strips: what comes before it is the parent's."""
    first, second, *_ = converse(2).interactions
    ids = SharedSequence(first.completion_ids, first.prompt_ids)
    other = SharedSequence(array("i", [7, 8]), ids, 70)
    made = Trajectory(
        id="a/0",
        group_id="a",
        task_id="0",
        interactions=(first, dataclasses.replace(second, prompt_ids=other, extends_parent=False)),
    )
    assert parse_record(format_record(made)) == made
    write_trajectory_file(path, [made])
    (read,) = read_trajectory_file(path)
    assert read == made
    assert read.interactions[1].prompt_ids[68:] == (*ids[68:70], 7, 8)
    (call, *_) = pq.read_table(path).column("interactions").to_pylist()[0][1:]
    assert (call["num_parent_ids"], call["new_prompt_ids"]) == (70, [7, 8])


def test_other_tools_can_read_the_columns(path) -> None:
    write_trajectory_file(path, [FULL])
    table = pq.read_table(path)
    assert table.column("reward").to_pylist() == [FULL.reward]
    call = table.column("interactions").to_pylist()[0][0]
    assert call["new_prompt_ids"] == [1, 2, 151643]
    messages = table.column("messages_json").to_pylist()[0]
    assert json.loads(messages[call["reply"]])["tool_calls"] == [CALL]


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "text", "foreign"])
def test_damage_is_named(path, damage: str) -> None:
    with pytest.raises(StoreError, match="no such file"):
        read_trajectory_file(path)
    pq.write_table(pa.table({"x": [1]}), path)
    foreign = path.read_bytes()
    write_trajectory_file(path, [FULL] * 50)
    data = path.read_bytes()
    damaged = {
        "cut": data[: len(data) // 2],
        "zeros": data[:8] + bytes(len(data) - 100) + data[-92:],
        "empty": b"",
        "text": b"hello",
        "foreign": foreign,
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(StoreError, match=r"step-000012\.parquet: is damaged") as caught:
        read_trajectory_file(path)
    assert "other steps" in str(caught.value)
    with pytest.raises(StoreError, match="another version"):
        read_summaries(path)
