"""Rows for ``agentrl sft`` out of trajectories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.sft_config import SftDatasetConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.exports.conversation_export import export_conversations
from agentrl_cli.inspector.exports.export_selection import ExportSelection
from agentrl_cli.models.sft_rows import load_rows
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {}}}


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def talk(task: int, index: int, reward: float | None, answer: str, **fields: Any) -> Trajectory:
    call = Interaction(
        id=f"c{task}.{index}",
        messages=(say("user", f"question {task}"),),
        reply=say("assistant", answer),
        tools=(TOOL,),
        finish_reason="stop",
    )
    return Trajectory(
        **{
            "id": f"000001.{task:03d}/{index}",
            "group_id": f"000001.{task:03d}",
            "task_id": str(task),
            "interactions": (call,),
            "reward": reward,
        }
        | fields
    )


@pytest.fixture
def run(run_config) -> Any:
    """Writes trajectories as a run's first step."""

    def write(*trajectories: Trajectory) -> Path:
        with RunFolder.create_or_resume(run_config()) as folder:
            folder.write_trajectories(1, list(trajectories))
        return folder.path

    return write


def export(run: Path, to: Path, **options: Any) -> list[str]:
    """The answers of the rows; that ``agentrl sft`` reads them is part of it."""
    export_conversations(run, to, ExportSelection(**options))
    rows = load_rows(SftDatasetConfig(path=str(to)))
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    return [row["messages"][-1]["content"] for row in rows]


def test_the_best_come_first_and_none_comes_twice(run: Any, tmp_path: Path) -> None:
    path = run(
        talk(0, 0, 0.5, "half"),
        talk(0, 1, 1.0, "right"),
        talk(0, 2, 1.0, "right"),
        talk(0, 3, 1.0, "right, too"),
        talk(1, 0, 0.9, "nearly"),
    )
    to = tmp_path / "rows.jsonl"
    assert export(path, to) == ["right", "right, too", "nearly", "half"]
    assert export(path, to, min_reward=0.9) == ["right", "right, too", "nearly"]
    # An equal conversation takes no place of another.
    assert export(path, to, max_per_task=2) == ["right", "right, too", "nearly"]
    done = export_conversations(path, to, ExportSelection(max_per_task=1))
    assert (done.num_rows, done.num_tasks, done.num_trajectories) == (2, 2, 5)
    assert json.loads(to.read_text().splitlines()[0])["tools"] == [TOOL]


def test_what_failed_or_was_cut_short_is_no_example(run: Any, tmp_path: Path) -> None:
    cut = talk(0, 1, 1.0, "cut sho")
    failure = Failure(boundary=Boundary.BUDGET, kind="X", message="")
    path = run(
        talk(0, 0, None, "unscored"),
        replace(cut, interactions=(replace(cut.interactions[0], finish_reason="length"),)),
        talk(0, 2, 1.0, "failed", failure=failure),
        talk(0, 3, 0.25, "fine"),
    )
    assert export(path, tmp_path / "rows.jsonl") == ["fine"]
    with pytest.raises(UserInputError, match=r"none of 4 trajectories .*: 1 without a reward, "):
        export_conversations(path, tmp_path / "none.jsonl", ExportSelection(min_reward=1.0))
    assert not (tmp_path / "none.jsonl").exists()


def test_each_branch_is_a_conversation(folder: RunFolder, tmp_path: Path) -> None:
    to = tmp_path / "rows.jsonl"
    assert export(folder.path, to, steps="1", min_reward=1.0) == ["391", "It is 391."]
    first = json.loads(to.read_text().splitlines()[0])
    assert [message["role"] for message in first["messages"]] == [
        *("user", "assistant", "tool", "assistant")
    ]
    assert first["messages"][1]["tool_calls"][0]["function"]["name"] == "calculate"


def test_half_a_character_of_a_model_stops_nothing(run: Any, tmp_path: Path) -> None:
    path = run(talk(0, 0, 1.0, "\ud83d ok é"))
    assert export(path, tmp_path / "rows.jsonl") == ["? ok é"]
