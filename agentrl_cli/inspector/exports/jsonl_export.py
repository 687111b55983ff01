"""Trajectories as lines of JSON that any program reads; see docs/export.md for the fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.inspector.exports.export_selection import ExportSelection, select_for_export
from agentrl_cli.inspector.json_view import describe_outcome, format_line, locate
from agentrl_cli.inspector.trajectory_query import Source
from agentrl_cli.inspector.trajectory_view import find_parent
from agentrl_cli.records import InteractionStatus, Trajectory, find_new_messages
from agentrl_cli.store.atomic_files import atomic_file
from agentrl_cli.store.run_folder import RunFolder

_TASK_FIELDS = ("id", "group_id", "task_id", "sample_index", "agent_name", "replaced_by")
_CALL_FIELDS = (
    "id", "status", "error", "mismatch_cause", "finish_reason", "has_malformed_call",
    "temperature", "top_p", "started_at", "seconds", "reward", "turn_return",
)  # fmt: skip
_TOKEN_FIELDS = ("prompt_ids", "completion_ids", "rollout_logprobs", "versions")


def export_jsonl(run: str | Path, to: Path, selection: ExportSelection, *, tokens: bool) -> int:
    """Writes ``to``, with a line for each trajectory; gives their number.

    Raises:
        UserInputError: no such run, step or evaluation, or nothing to export.
        StoreError: a file cannot be read or written.
    """
    folder, num_written = RunFolder.open(run), 0
    chosen = select_for_export(folder, selection)
    with atomic_file(to) as file:
        for exported in chosen:
            for _, trajectory in exported.read():
                file.write(format_line(describe(exported.source, trajectory, tokens=tokens)))
                num_written += 1
    return num_written


def describe(source: Source, trajectory: Trajectory, *, tokens: bool) -> dict[str, Any]:
    """A trajectory as plain data, in which no message is written twice."""
    return {
        **locate(source),
        **{name: getattr(trajectory, name) for name in _TASK_FIELDS},
        "task": dict(trajectory.task),
        **describe_outcome(trajectory),
        "seconds": trajectory.seconds,
        "reward_seconds": trajectory.reward_seconds,
        "interactions": [*_describe_calls(trajectory, tokens=tokens)],
    }


def _describe_calls(trajectory: Trajectory, *, tokens: bool) -> Iterator[dict[str, Any]]:
    completed = {
        i.id: i for i in trajectory.interactions if i.status is InteractionStatus.COMPLETED
    }
    tools: tuple[dict[str, Any], ...] = ()
    for call in trajectory.interactions:
        parent = find_parent(call, completed)
        new_messages = find_new_messages(call, parent)
        continues = parent is not None and len(new_messages) < len(call.messages)
        row = {name: getattr(call, name) for name in _CALL_FIELDS} | {
            "parent_id": call.parent_id,
            "continues_parent": continues,
            "new_messages": [*new_messages],
            "reply": call.reply,
            "num_prompt_tokens": len(call.prompt_ids),
            "num_completion_tokens": call.num_completion_tokens,
        }
        # Mostly those of the call before: in long conversations they would be half of the file.
        if call.tools != tools:
            tools = call.tools
            row["tools"] = [*tools]
        yield row | ({name: [*getattr(call, name)] for name in _TOKEN_FIELDS} if tokens else {})
