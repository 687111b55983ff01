"""Rows from every kind of source; tasks and cooldowns by the seed and what is stored of the run."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.errors import DatasetError, RunFolderError
from agentrl_cli.records import Interaction
from agentrl_cli.rollout.dataset import (
    GroupOutcome,
    TaskStream,
    build_eval_tasks,
    build_task_stream,
    list_outcomes,
    load_rows,
    recall_outcomes,
)
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.store.run_folder import RunFolder

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]


def _load(path, **options):
    return load_rows(DatasetConfig(path=str(path), **options), "train_dataset")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_reads_every_file_format_and_limits(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    texts = {
        "jsonl": "\n".join(json.dumps(r) for r in ROWS) + "\n\n",
        "json": json.dumps(ROWS),
        "csv": "question,answer\n" + "".join(f"q{i},{i}\n" for i in range(5)),
    }
    if suffix in texts:
        path.write_text(texts[suffix])
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert _load(path) == ROWS
    assert _load(path, limit=2) == ROWS[:2]


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}')
    with pytest.raises(DatasetError, match=r"no such file; did you mean 'train.jsonl'"):
        _load(tmp_path / "trian.jsonl")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DatasetError, match=r"no such file; its folder has no file of rows"):
        _load(tmp_path / "trian.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": \n', r"a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"q": 1}\n[1, 2]\n', r"a.jsonl:2: the row is list, not a mapping"),
        ("a.json", '[{"q": 1},\n\n oops]', r"a.json:3: not valid JSON"),
        ("a.json", '{"q": 1}', r"expected a list of rows, found dict"),
        ("a.json", '[{"q": 1}, 7]', r"row 2 is int, not a mapping"),
        ("a.csv", "q,a\n1,2\n3\n", r"a.csv:3: this row does not have the 2 columns"),
        ("a.csv", "q,a\n1,2,3\n", r"a.csv:2: this row does not have the 2 columns"),
        ("a.jsonl", "\n\n", r"has no rows"),
        ("a.json", "[]", r"has no rows"),
        ("a.csv", "q,a\n", r"has no rows"),
        ("a.parquet", "not parquet", r"not a Parquet file"),
        ("a.txt", "x", r"files that end in '.txt' are not read"),
        ("a.jsonl", "\udcff\udcfe", "cannot be read"),
        (".", None, "is a folder"),
    ],
)
def test_bad_files_say_where_and_what(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(DatasetError, match=message):
        _load(path)


def test_import_path_function_gets_its_split(tmp_path, monkeypatch):
    module = tmp_path / "my_rows.py"
    module.write_text(
        "def by_split(split):\n    return [{'split': split}]\n"
        "def plain():\n    return ({'i': i} for i in range(9))\n"
        "def broken():\n    raise KeyError('gone')\n"
        "def leave():\n    exit(0)\n"
        "def leave_late():\n    yield {'i': 0}\n    exit(0)\n"
        "def text():\n    return 'rows'\n"
    )
    assert _load(f"{module}:by_split", split="test") == [{"split": "test"}]
    assert _load(f"{module}:plain", limit=2) == [{"i": 0}, {"i": 1}]
    with pytest.raises(DatasetError, match="raised KeyError: 'gone'"):
        _load(f"{module}:broken")
    for name in ("leave", "leave_late"):
        with pytest.raises(DatasetError, match="raised SystemExit: 0"):
            _load(f"{module}:{name}")
    assert _load(f"{module}:leave_late", limit=1) == [{"i": 0}]
    with pytest.raises(DatasetError, match="expected a list of rows, found str"):
        _load(f"{module}:text")


def test_hub_datasets_say_what_to_type(monkeypatch):
    import datasets

    def load(answer):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_a, **_o: answer())
        return _load("openai/gsm8k", split="train", limit=3)

    def refuse():
        raise ConnectionError("no route")

    with pytest.raises(DatasetError, match=r"no route\n.*train_dataset.path=FILE.jsonl"):
        load(refuse)
    with pytest.raises(DatasetError, match=r"splits train, test. Type train_dataset.split=train"):
        load(lambda: {"train": [], "test": []})
    assert load(lambda: iter(ROWS)) == ROWS[:3]


@given(
    num_rows=st.integers(1, 12),
    batch_size=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
def test_batches_are_pure_and_epochs_are_complete(num_rows, batch_size, seed, shuffle, steps):
    rows = [{"i": i} for i in range(num_rows)]

    def stream():
        return TaskStream(rows, batch_size=batch_size, shuffle=shuffle, seed=seed)

    # Whatever was asked before, and in whichever order, a step's batch is the same.
    used = stream()
    for step in steps:
        assert used.batch(step) == stream().batch(step)
    tasks = [task for step in range(1, 21) for task in stream().batch(step)]
    for start in range(0, len(tasks) - num_rows + 1, num_rows):
        epoch = [int(task.task_id) for task in tasks[start : start + num_rows]]
        assert sorted(epoch) == list(range(num_rows))
        assert shuffle or epoch == list(range(num_rows))
    assert Counter(task.group_id for task in tasks).most_common(1)[0][1] == 1
    assert all(task.row["i"] == int(task.task_id) for task in tasks)


def test_seeds_and_epochs_differ_and_group_ids_sort():
    rows = [{"i": i} for i in range(50)]
    one = TaskStream(rows, batch_size=50, shuffle=True, seed=1)
    two = TaskStream(rows, batch_size=50, shuffle=True, seed=2)
    orders = [[t.task_id for t in s.batch(k)] for s in (one, two) for k in (1, 2)]
    assert len({tuple(order) for order in orders}) == 4
    assert one.batch(12)[3].group_id == "000012.003"
    with pytest.raises(ValueError, match="from 1"):
        one.batch(0)


def test_eval_tasks_cover_the_rows_once_in_order():
    tasks = build_eval_tasks(ROWS, "eval-000007")
    assert [t.row for t in tasks] == ROWS
    assert len({t.group_id for t in tasks}) == len(ROWS)
    assert not {t.group_id for t in tasks} & {t.group_id for t in build_eval_tasks(ROWS, "eval-8")}


def open_stream(num_rows=4, batch_size=2, **options):
    options = {"shuffle": False, "seed": 1, "max_staleness": 0, "max_cooldown_epochs": 2} | options
    return TaskStream([{}] * num_rows, batch_size=batch_size, **options)


def find_rows(tasks):
    return [int(task.task_id) for task in tasks]


def observe(stream, step, flat, tasks=None):
    """Every group of the step has signal, those of the rows in ``flat`` excepted."""
    tasks = stream.batch(step) if tasks is None else tasks
    outcomes = [GroupOutcome(t.group_id, t.task_id, int(t.task_id) not in flat) for t in tasks]
    stream.observe(step, outcomes)


def run(stream, num_steps, flat, first_step=1):
    batches = []
    for step in range(first_step, first_step + num_steps):
        batches.append(find_rows(stream.batch(step)))
        observe(stream, step, flat)
    return batches


def test_the_cooldown_of_a_task_without_signal_by_hand():
    # Epochs, of rows 0 to 3, two a step: | 0 1  2 3 | 1 2  3   | 0  1 2  3 | 1 2  3 | 1 2  3 | 0
    # Row 0 sits out epoch 1 after its first group, and epochs 3 and 4 after its second.
    batches = run(open_stream(), 8, flat={0})
    assert batches == [[0, 1], [2, 3], [1, 2], [3, 0], [1, 2], [3, 1], [2, 3], [1, 2]]
    # A cooldown is never longer than the limit, which here is two epochs.
    assert run(open_stream(), 10, flat={0})[8:] == [[3, 0], [1, 2]]


def test_a_cooldown_doubles_until_the_limit_and_ends_with_a_signal():
    stream = open_stream(num_rows=2, batch_size=1, max_cooldown_epochs=8)
    batches = run(stream, 59, flat={0}) + run(stream, 20, flat=(), first_step=60)
    # Row 1 always has signal, so it marks the epochs between two turns of row 0.
    gaps = [len(ones) for ones in "".join(str(row) for (row,) in batches).split("0")[1:-1]]
    # One epoch later than without a cooldown: 1 + 1, 1 + 2, 1 + 4, 1 + 8, 1 + 8 ...
    assert gaps[:5] == [2, 3, 5, 9, 9]
    assert gaps[-3:] == [1, 1, 1]


def test_without_flat_groups_it_is_the_plain_stream():
    plain = TaskStream([{}] * 7, batch_size=3, shuffle=True, seed=5, num_backup_tasks=2)
    cooling = open_stream(7, 3, shuffle=True, seed=5, num_backup_tasks=2)
    for step in range(1, 12):
        assert cooling.batch(step) == plain.batch(step)
        assert cooling.backup_tasks(step) == plain.backup_tasks(step)
        assert cooling.count_cooling(step) == plain.count_cooling(step) == 0
        observe(cooling, step, flat=())


@pytest.mark.timeout(20)
def test_epochs_in_which_every_task_has_a_cooldown_take_no_time():
    """After thirty groups without signal a cooldown is a thousand million epochs long."""
    stream = open_stream(num_rows=3, batch_size=3, max_cooldown_epochs=10**9)
    assert all(sorted(batch) == [0, 1, 2] for batch in run(stream, 40, flat={0, 1, 2}))
    # Both take part in epochs 0, 2, 5 and 10. There row 1 has signal: it is alone from 11 to 18.
    stream = open_stream(num_rows=2, batch_size=1, max_cooldown_epochs=10**9)
    assert run(stream, 7, flat={0, 1}) == [[0], [1], [0], [1], [0], [1], [0]]
    assert run(stream, 10, flat={0}, first_step=8) == [[1]] * 9 + [[0]]


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    max_cooldown_epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    flat_seed=st.randoms(use_true_random=False),
)
def test_no_task_is_left_out_for_ever(
    num_rows, batch_size, max_staleness, max_cooldown_epochs, shuffle, flat_seed
):
    stream = open_stream(
        num_rows,
        batch_size,
        max_staleness=max_staleness,
        max_cooldown_epochs=max_cooldown_epochs,
        shuffle=shuffle,
    )
    always_flat = {row for row in range(num_rows) if flat_seed.random() < 0.5}
    since: dict[int, Counter[int]] = {row: Counter() for row in range(num_rows)}
    for step in range(1, 60):
        batch = find_rows(stream.batch(step))
        assert len(batch) == batch_size
        for row in batch:
            since[row] = Counter()
            for other in since:
                since[other][row] += 1
        # A task comes once an epoch at most, so between two turns of another there are at most
        # the epochs of the longest cooldown and the two of the turns themselves.
        assert all(
            c <= max_cooldown_epochs + 2 for counts in since.values() for c in counts.values()
        )
        sometimes = {row for row in range(num_rows) if flat_seed.random() < 0.2}
        observe(stream, step, flat=always_flat | sometimes)


@settings(max_examples=40, deadline=None)
@given(max_staleness=st.integers(0, 3), flat=st.sets(st.integers(0, 6)), eager=st.booleans())
def test_only_steps_that_are_certain_to_be_known_count(max_staleness, flat, eager):
    """A trainer that is quick with its steps, or slow, chooses the same tasks."""
    options = {"max_staleness": max_staleness, "shuffle": True, "num_backup_tasks": 2}
    quick = open_stream(7, 2, **options)
    slow = open_stream(7, 2, **options)
    for step in range(1, 15):
        tasks, backup_tasks = quick.batch(step), quick.backup_tasks(step)
        observe(quick, step, flat)
        assert (slow.batch(step), slow.backup_tasks(step)) == (tasks, backup_tasks)
        # As late as admission allows: step k + 1 + max_staleness may begin only after step k.
        late = step - max_staleness
        if late >= 1:
            observe(slow, late, flat)
    if max_staleness:
        with pytest.raises(RuntimeError, match="observe step 15 before round"):
            quick.batch(16 + max_staleness)


def test_tasks_in_cooldown_are_no_backup_tasks_while_there_are_others():
    stream = open_stream(num_rows=6, batch_size=1, num_backup_tasks=9)
    assert find_rows(stream.backup_tasks(1)) == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    observe(stream, 1, flat={0})
    for step in range(2, 7):
        stream.batch(step)
        observe(stream, step, flat={0})
    # Epoch 1 begins with row 1; row 0 has a cooldown.
    assert find_rows(stream.batch(7)) == [1]
    assert find_rows(stream.backup_tasks(7)) == [2, 3, 4, 5, 2, 3, 4, 5, 2]
    assert stream.count_cooling(7) == 1


def test_backup_tasks_are_other_tasks_drawn_again_every_step():
    stream = TaskStream([{}] * 8, batch_size=3, shuffle=True, seed=2, num_backup_tasks=5)
    drawn = []
    for step in range(1, 30):
        rows = find_rows(stream.backup_tasks(step))
        assert sorted(rows + find_rows(stream.batch(step))) == list(range(8))
        assert [t.group_id for t in stream.backup_tasks(step)] == [
            f"{step:06d}.{position:03d}" for position in range(3, 8)
        ]
        drawn.append(tuple(rows))
    assert len(set(drawn)) > 20
    few = TaskStream([{}] * 2, batch_size=2, shuffle=True, seed=2, num_backup_tasks=4)
    assert sorted(find_rows(few.backup_tasks(1))) == [0, 0, 1, 1]


def test_a_backup_task_without_signal_has_a_cooldown_at_once():
    stream = open_stream(num_rows=4, batch_size=2, num_backup_tasks=1)
    observe(stream, 1, flat={2}, tasks=[*stream.batch(1), *stream.backup_tasks(1)])
    # Row 2 was attempted in epoch 0 out of turn: its turn there is over, and it sits out epoch 1.
    batches = [find_rows(stream.batch(2))]
    observe(stream, 2, flat=())
    batches.append(find_rows(stream.batch(3)))
    assert batches == [[3, 0], [1, 3]]


def test_groups_that_show_nothing_change_nothing():
    stream = open_stream()
    first, second = stream.batch(1)
    # A program's own task, named as a row is, in the place of row 1.
    own = GroupOutcome(second.group_id, "3", False)
    stream.observe(1, [GroupOutcome(first.group_id, first.task_id, None), own])
    stream.batch(2)
    observe(stream, 2, flat=())
    assert find_rows(stream.batch(3)) == [0, 1]


def test_outcomes_of_groups():
    scores = {"a": (1.0, 0.5), "b": (1.0, 1.0, None), "c": (1.0, None), "d": (None,)}
    outcomes = list_outcomes((name, "0", score) for name in scores for score in scores[name])
    assert [o.has_signal for o in outcomes] == [True, False, None, None]
    assert outcomes[0] == GroupOutcome("a", "0", True)


CONFIG = {
    "experiment_name": "e",
    "model": {"path": "m"},
    "agent_builder_path": "a.b",
    "train_dataset": {"path": "d", "batch_size": 3, "shuffle": True},
    "rollout": {
        "max_staleness": 1,
        "curriculum": {"kind": "cooldown", "max_cooldown_epochs": 2},
        "filter": {"kind": "dynamic_sampling", "max_backup_tasks": 2},
    },
}


def make_batch(stream, step, flat):
    def make(task, index):
        reward = 1.0 if int(task.task_id) in flat else float(index)
        attempt = Attempt(task=task, sample_index=index, step=step)
        call = Interaction(id="call", completion_ids=(1,), rollout_logprobs=(-1.0,), versions=(0,))
        return attempt.begin_trajectory(reward=reward, interactions=(call,))

    return [make(task, index) for task in stream.batch(step) for index in range(2)]


def test_a_resumed_run_recalls_what_is_stored(tmp_path):
    config = ExperimentConfig.model_validate(CONFIG | {"output_dir": str(tmp_path)})
    rows = [{}] * 7
    stream = build_task_stream(config, rows)
    with RunFolder.create_or_resume(config) as folder:
        for step in range(1, 9):
            batch = make_batch(stream, step, flat={1, 4, 6})
            folder.write_trajectories(step, batch)
            outcomes = list_outcomes((t.group_id, t.task_id, t.reward) for t in batch)
            stream.observe(step, outcomes)
            resumed = build_task_stream(config, rows)
            recall_outcomes(resumed, folder, step + 1)
            assert resumed.batch(step + 1) == stream.batch(step + 1)
            assert resumed.backup_tasks(step + 1) == stream.backup_tasks(step + 1)
            for earlier in range(1, step + 2):
                assert resumed.count_cooling(earlier) == stream.count_cooling(earlier)
        assert stream.count_cooling(9) > 0
        (folder.path / "trajectories" / "step-000003.parquet").unlink()
        with pytest.raises(RunFolderError, match=r"step 3 are gone \(1 of 8 steps\)"):
            recall_outcomes(build_task_stream(config, rows), folder, 9)
        # A plain stream needs nothing of earlier steps.
        plain = config.rollout.model_copy(update={"curriculum": None})
        config = config.model_copy(update={"rollout": plain})
        recall_outcomes(build_task_stream(config, rows), folder, 9)
