"""Trajectories for other programs: what they read of them, without agentrl."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.exports import inspect_logs
from agentrl_cli.inspector.exports.atif_export import export_atif
from agentrl_cli.inspector.exports.export_selection import ExportSelection
from agentrl_cli.inspector.exports.inspect_logs import export_inspect
from agentrl_cli.inspector.exports.jsonl_export import export_jsonl
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

SCHEMA = json.loads(Path(__file__).with_name("atif_schema.json").read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def rebuild_prompt(row: dict[str, Any], call: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a call's request, by what docs/export.md says."""
    calls = {one["id"]: one for one in row["interactions"]}
    if not call["continues_parent"]:
        return call["new_messages"]
    parent = calls[call["parent_id"]]
    return [*rebuild_prompt(row, parent), parent["reply"], *call["new_messages"]]


def test_a_line_holds_all_that_is_known_of_a_trajectory(folder: RunFolder, tmp_path: Path) -> None:
    to = tmp_path / "all.jsonl"
    assert export_jsonl(folder.path, to, ExportSelection(), tokens=True) == 6
    rows = read_lines(to)
    forked = rows[0]
    assert [call["id"] for call in forked["interactions"]] == ["c1", "c2", "c3", "c4"]
    roles = [m["role"] for m in rebuild_prompt(forked, forked["interactions"][2])]
    assert roles == ["user", "assistant", "tool"]
    assert forked["interactions"][2]["new_messages"][0]["content"] == "391"
    assert forked["interactions"][1]["prompt_ids"] == [1, 2, 3, 4, 5, 6]
    assert forked["interactions"][0]["rollout_logprobs"] == [-0.5, -0.25]
    assert forked["interactions"][3]["error"] == "the engine died"
    assert (forked["reward"], forked["reward_parts"]) == (1.0, {"exact": 1.0})
    # NaN, which JSON does not have.
    assert rows[4]["reward"] is None
    assert rows[3]["failure"]["boundary"] == "timeout"
    export_jsonl(folder.path, to, ExportSelection(steps="1"), tokens=False)
    assert "prompt_ids" not in to.read_text()


def test_filters_choose_what_is_exported(folder: RunFolder, tmp_path: Path) -> None:
    to = tmp_path / "some.jsonl"

    def export(**filters: Any) -> list[str]:
        export_jsonl(folder.path, to, ExportSelection(**filters), tokens=False)
        return [row["id"] for row in read_lines(to)]

    assert export(min_reward=1.0) == ["000001.000/0", "000002.000/3"]
    # Of task 1 the best is in the second step.
    best = ["000001.000/0", "000002.000/0", "000002.000/3"]
    assert export(max_per_task=1) == best
    assert export(steps="2", max_per_task=1) == best[1:]
    assert export(evals="manual") == ["000900.000/0"]
    with pytest.raises(UserInputError, match="none of 6 trajectories has a reward of 2 or more"):
        export(min_reward=2.0)


def check_atif(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    names = [document["trajectory_id"]]
    for one in (document, *document.get("subagent_trajectories", ())):
        names.append(one["trajectory_id"])
        # What the schema cannot say.
        assert [step["step_id"] for step in one["steps"]] == [*range(1, len(one["steps"]) + 1)]
        for step in one["steps"]:
            calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            results = step.get("observation", {"results": []})["results"]
            assert {r["source_call_id"] for r in results if "source_call_id" in r} <= calls
            if step["source"] != "agent":
                assert not step.keys() & {"tool_calls", "metrics", "reasoning_content"}
    assert len(set(names)) == len(names) - 1
    return document


def test_a_forked_trajectory_is_a_document_with_its_branch_inside(
    folder: RunFolder, tmp_path: Path
) -> None:
    to = tmp_path / "atif"
    assert export_atif(folder.path, to, ExportSelection(steps="1"), tokens=True) == 2
    forked, _ = sorted((to / "step-1").iterdir())
    assert forked.name == "00000-000001.000-0.json"
    document = check_atif(forked)
    user, call, answer = document["steps"]
    assert user["source"] == "user"
    assert call["tool_calls"][0]["arguments"] == {"expression": "17*23"}
    # The branch ended last: it is the root, and the other one hangs where they part.
    assert answer["message"] == "It is 391."
    result, reference = call["observation"]["results"]
    assert result == {"content": "391", "source_call_id": "call_1"}
    [branch] = document["subagent_trajectories"]
    assert reference["subagent_trajectory_ref"] == [{"trajectory_id": branch["trajectory_id"]}]
    # Each sampled token is there once to train on.
    assert [s.get("is_copied_context") for s in branch["steps"]] == [True, True, None]
    assert branch["steps"][2]["metrics"]["completion_token_ids"] == [7]
    assert call["metrics"]["logprobs"] == [-0.5, -0.25]
    assert document["final_metrics"]["extra"]["reward"] == 1.0
    assert document["extra"]["calls_not_completed"][0]["error"] == "the engine died"


def make_hostile() -> Trajectory:
    """What models, frameworks and datasets have been seen to send."""
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.webp?x=1"}}
    question = {"role": "user", "content": [{"type": "text", "text": "\ud83d <script>"}, image]}
    reply = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm\x1b[31m",
        "tool_calls": [
            {"function": {"name": "f", "arguments": "{not json"}},
            {"id": "b", "function": {"name": "g", "arguments": {"x": float("nan")}}},
        ],
    }
    results = (
        {"role": "tool", "content": {"odd": 1}, "tool_call_id": "unknown"},
        {"role": "critic", "content": "?"},
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": ["object"]}}}
    first = Interaction(
        id="a", messages=(question,), reply=reply, tools=(tool,), started=1, ended=2
    )
    second = Interaction(
        id="b",
        parent_id="a",
        messages=(question, reply, *results),
        completion_ids=(1,),
        rollout_logprobs=(float("-inf"),),
        started=3,
        ended=4,
    )
    failure = Failure(boundary=Boundary.TOOL, kind="X", message="\x1b[2J boom", traceback="\x1b")
    return Trajectory(
        id="000003.000/0",
        group_id="000003.000",
        task_id="0",
        task={"question": {"a": [float("inf")]}, "answer": 7},
        interactions=(first, second),
        reward_parts={"part": float("nan")},
        failure=failure,
    )


def test_what_nobody_expects_is_exported_all_the_same(folder: RunFolder, tmp_path: Path) -> None:
    hostile = make_hostile()
    empty = replace(hostile, id="000003.000/1", sample_index=1, interactions=(), task={})
    same_task = replace(hostile, id="000003.001/0", group_id="000003.001")
    folder.write_trajectories(3, [hostile, empty, same_task])
    folder.flush()
    chosen = ExportSelection(steps="3")
    assert export_jsonl(folder.path, tmp_path / "rows.jsonl", chosen, tokens=True) == 3
    assert len(read_lines(tmp_path / "rows.jsonl")) == 3
    assert export_atif(folder.path, tmp_path / "atif", chosen, tokens=True) == 3
    first, *_ = [check_atif(path) for path in sorted((tmp_path / "atif").rglob("*.json"))]
    assert first["steps"][0]["message"][1]["source"]["media_type"] == "image/webp"
    assert first["steps"][1]["tool_calls"][0]["extra"] == {"raw": "{not json"}

    log_api = pytest.importorskip("inspect_ai.log")
    assert export_inspect(folder.path, tmp_path / "logs", chosen) == 3
    log = log_api.read_eval_log(str(tmp_path / "logs" / "step-000003.eval"))
    names = {(sample.id, sample.epoch) for sample in log.samples}
    assert names == {("0", 1), ("0", 2), ("0 (000003.001)", 1)}
    assert "\x1b" not in log.samples[0].error.message


def test_large_steps_become_several_logs(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("inspect_ai.log")
    monkeypatch.setattr(inspect_logs, "_SAMPLES_PER_LOG", 3)
    export_inspect(folder.path, tmp_path / "logs", ExportSelection(steps="2"))
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["step-000002-part-2.eval", "step-000002.eval"]


def get(url: str) -> Any:
    """What the server answers, once it is up."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.loads(answer.read())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_inspect_view_shows_a_step(folder: RunFolder, tmp_path: Path) -> None:
    log_api = pytest.importorskip("inspect_ai.log")
    logs = tmp_path / "logs"
    export_inspect(folder.path, logs, ExportSelection(steps="1"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "inspect_ai", "view", "start", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--log-dir", str(logs)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        listed = get(f"http://127.0.0.1:{port}/api/log-files")["files"]
        assert [Path(file["name"]).name for file in listed] == ["step-000001.eval"]
        shown = get(f"http://127.0.0.1:{port}/api/logs/{quote(listed[0]['name'], safe='')}")
    finally:
        server.terminate()
        server.wait(20)
    sample = shown["samples"][0]
    assert (sample["id"], sample["epoch"], sample["target"]) == ("5", 1, "391")
    assert sample["scores"]["reward"]["value"] == 1.0
    assert sample["scores"]["exact"]["value"] == 1.0
    assert [m["role"] for m in sample["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert sample["messages"][2]["function"] == "calculate"
    assert [event["event"] for event in sample["events"]] == ["model"] * 4
    assert sample["events"][3]["error"] == "failed: the engine died"
    assert sample["metadata"]["prefix_mismatches"]["num_replaying_turns"] == 2
    assert shown["eval"]["viewer"]["trust_content"] is False
    assert log_api.read_eval_log(str(logs / "step-000001.eval")).results.total_samples == 2
