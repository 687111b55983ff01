"""Micro-batches that were not finite: written whole, found, refused where damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.store.micro_batch_file import read_micro_batch, write_micro_batch
from agentrl_cli.store.run_folder import RunFolder

FACTS = {"step": 3, "what": "the loss is nan", "samples": []}


def test_what_is_written_is_read_back_nan_and_all(tmp_path: Path) -> None:
    values = np.array([1.0, np.nan, -np.inf], np.float32)
    ids = np.arange(6).reshape(2, 3).T
    write_micro_batch(tmp_path / "b", FACTS, {"values": values, "ids": ids})
    batch = read_micro_batch(tmp_path / "b")
    assert {name: batch.facts[name] for name in FACTS} == FACTS
    np.testing.assert_array_equal(batch.tensors["values"], values)
    # Not contiguous when it was written.
    np.testing.assert_array_equal(batch.tensors["ids"], ids)


def test_it_counts_once_it_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    path = folder.write_micro_batch(3, FACTS, {"a": np.zeros(1)})
    folder.write_micro_batch(12, FACTS, {"a": np.zeros(1)})
    assert [step for step, _ in folder.list_micro_batches()] == [3, 12]
    (path / "micro_batch.json").unlink()
    assert [step for step, _ in folder.list_micro_batches()] == [12]
    folder.write_micro_batch(3, FACTS, {"b": np.ones(2)})
    assert list(read_micro_batch(path).tensors) == ["b"]


def test_those_of_steps_that_will_be_done_again_are_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 5, 9):
        folder.write_micro_batch(step, FACTS, {"a": np.zeros(1)})
    folder.discard_micro_batches(5)
    assert [step for step, _ in folder.list_micro_batches()] == [1, 5]
    folder.discard_micro_batches(0)
    assert folder.list_micro_batches() == []
    assert list((tmp_path / "micro-batches").iterdir()) == []
    RunFolder(tmp_path / "none").discard_micro_batches(0)


@pytest.mark.parametrize("name", ["micro_batch.json", "micro_batch.safetensors"])
def test_a_damaged_one_is_refused(tmp_path: Path, name: str) -> None:
    write_micro_batch(tmp_path, FACTS, {"a": np.zeros(100)})
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StoreError, match="is damaged"):
        read_micro_batch(tmp_path)


def test_one_of_another_version_is_refused(tmp_path: Path) -> None:
    write_micro_batch(tmp_path, FACTS, {"a": np.zeros(1)})
    path = tmp_path / "micro_batch.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(StoreError, match="format 9, this one reads 1"):
        read_micro_batch(tmp_path)


def test_another_folder_is_told_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"RUN/micro-batches/step-\*"):
        read_micro_batch(tmp_path)
