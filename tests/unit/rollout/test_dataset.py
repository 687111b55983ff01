"""Rows from every kind of source, and tasks as a pure function of seed and step."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.config.experiment import DatasetConfig
from agentrl_cli.errors import DatasetError
from agentrl_cli.rollout.dataset import TaskStream, build_eval_tasks, load_rows

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
        "def text():\n    return 'rows'\n"
    )
    assert _load(f"{module}:by_split", split="test") == [{"split": "test"}]
    assert _load(f"{module}:plain", limit=2) == [{"i": 0}, {"i": 1}]
    with pytest.raises(DatasetError, match="raised KeyError: 'gone'"):
        _load(f"{module}:broken")
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
    tasks = build_eval_tasks(ROWS, step=7)
    assert [t.row for t in tasks] == ROWS
    assert len({t.group_id for t in tasks}) == len(ROWS)
    assert not {t.group_id for t in tasks} & {t.group_id for t in build_eval_tasks(ROWS, step=8)}
