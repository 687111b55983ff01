"""The columns of a trajectory file, and rows to and from records.

Ids, log-probabilities and versions are lists of numbers; what has a free form
(messages, tools, dataset rows) is JSON text; floats are float64, so that they
come back bit for bit. Texts lose nothing but lone surrogates, which no UTF-8 holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from agentrl_cli.breaks import BreakSummary, summarize_breaks
from agentrl_cli.records import (
    Boundary,
    BreakCause,
    Failure,
    Interaction,
    InteractionStatus,
    StopReason,
    Trajectory,
)
from agentrl_cli.scores import compute_score

FORMAT_VERSION = "1"

_INTERACTION = pa.struct(
    [
        ("id", pa.string()),
        ("parent_id", pa.string()),
        ("extends_parent", pa.bool_()),
        ("break_cause", pa.string()),
        ("messages_json", pa.string()),
        ("tools_json", pa.string()),
        ("reply_json", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("num_reported_tokens", pa.int64()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("structural_tag", pa.string()),
        ("finish_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("started", pa.int64()),
        ("ended", pa.int64()),
        ("started_at", pa.float64()),
        ("seconds", pa.float64()),
        ("reward", pa.float64()),
        ("turn_return", pa.float64()),
    ]
)

#: Columns that a list of trajectories needs; the tokens are not read for it.
SUMMARY_COLUMNS = (
    "id",
    "group_id",
    "task_id",
    "sample_index",
    "step",
    "replaced_by",
    "agent_name",
    "reward",
    "score",
    "final_answer",
    "failure_boundary",
    "failure_kind",
    "failure_message",
    "seconds",
    "num_turns",
    "num_prompt_tokens",
    "num_completion_tokens",
    "num_tool_calls",
    "breaks_json",
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("sample_index", pa.int64()),
        ("step", pa.int64()),
        ("replaced_by", pa.string()),
        ("agent_name", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.float64()),
        ("reward_parts_json", pa.string()),
        ("final_answer", pa.string()),
        ("stop_reason", pa.string()),
        ("failure_boundary", pa.string()),
        ("failure_kind", pa.string()),
        ("failure_message", pa.string()),
        ("failure_traceback", pa.string()),
        ("seconds", pa.float64()),
        ("reward_seconds", pa.float64()),
        ("num_turns", pa.int64()),
        ("num_prompt_tokens", pa.int64()),
        ("num_completion_tokens", pa.int64()),
        ("num_tool_calls", pa.int64()),
        ("breaks_json", pa.string()),
        ("task_json", pa.string()),
        ("interactions", pa.list_(_INTERACTION)),
    ],
    metadata={"agentrl_format": FORMAT_VERSION},
)


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """One row of the file."""
    failure = trajectory.failure
    return {
        "id": _text(trajectory.id),
        "group_id": _text(trajectory.group_id),
        "task_id": _text(trajectory.task_id),
        "sample_index": trajectory.sample_index,
        "step": trajectory.step,
        "replaced_by": _text(trajectory.replaced_by),
        "agent_name": _text(trajectory.agent_name),
        "reward": _number(trajectory.reward),
        "score": _number(compute_score(trajectory)),
        "reward_parts_json": _to_json(dict(trajectory.reward_parts)),
        "final_answer": _text(trajectory.final_answer),
        "stop_reason": trajectory.stop_reason.value if trajectory.stop_reason else None,
        "failure_boundary": failure.boundary.value if failure else None,
        "failure_kind": _text(failure.kind) if failure else None,
        "failure_message": _text(failure.message) if failure else None,
        "failure_traceback": _text(failure.traceback) if failure else None,
        "seconds": float(trajectory.seconds),
        "reward_seconds": float(trajectory.reward_seconds),
        "num_turns": trajectory.num_turns,
        "num_prompt_tokens": sum(len(i.prompt_ids) for i in trajectory.interactions),
        "num_completion_tokens": trajectory.num_completion_tokens,
        "num_tool_calls": trajectory.num_tool_calls,
        "breaks_json": _to_json(summarize_breaks([trajectory]).to_dict()),
        "task_json": _to_json(dict(trajectory.task)),
        "interactions": [_to_struct(i) for i in trajectory.interactions],
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of one row."""
    failure = None
    if row["failure_boundary"] is not None:
        failure = Failure(
            boundary=Boundary(row["failure_boundary"]),
            kind=row["failure_kind"],
            message=row["failure_message"],
            traceback=row["failure_traceback"],
        )
    return Trajectory(
        id=row["id"],
        group_id=row["group_id"],
        task_id=row["task_id"],
        sample_index=row["sample_index"],
        step=row["step"],
        # Files of the first versions have neither this column nor that of the stop reason.
        replaced_by=row.get("replaced_by"),
        task=_from_json(row["task_json"]),
        agent_name=row["agent_name"],
        interactions=tuple(_from_struct(s) for s in row["interactions"]),
        reward=row["reward"],
        reward_parts=_from_json(row["reward_parts_json"]),
        final_answer=row["final_answer"],
        stop_reason=StopReason(row["stop_reason"]) if row.get("stop_reason") else None,
        failure=failure,
        seconds=row["seconds"],
        reward_seconds=row["reward_seconds"],
    )


def parse_breaks(text: str) -> BreakSummary:
    """From the column ``breaks_json``."""
    return BreakSummary.from_dict(_from_json(text))


def _to_struct(interaction: Interaction) -> dict[str, Any]:
    cause = interaction.break_cause
    return {
        "id": _text(interaction.id),
        "parent_id": _text(interaction.parent_id),
        "extends_parent": interaction.extends_parent,
        "break_cause": cause.value if cause else None,
        "messages_json": _to_json(interaction.messages),
        "tools_json": _to_json(interaction.tools),
        "reply_json": None if interaction.reply is None else _to_json(interaction.reply),
        "prompt_ids": interaction.prompt_ids,
        "completion_ids": interaction.completion_ids,
        "rollout_logprobs": interaction.rollout_logprobs,
        "versions": interaction.versions,
        "num_reported_tokens": interaction.num_reported_tokens,
        "temperature": float(interaction.temperature),
        "top_p": float(interaction.top_p),
        "structural_tag": _text(interaction.structural_tag),
        "finish_reason": _text(interaction.finish_reason),
        "status": interaction.status.value,
        "error": _text(interaction.error),
        "started": interaction.started,
        "ended": interaction.ended,
        "started_at": float(interaction.started_at),
        "seconds": float(interaction.seconds),
        "reward": _number(interaction.reward),
        "turn_return": _number(interaction.turn_return),
    }


def _from_struct(struct: Mapping[str, Any]) -> Interaction:
    cause, reply = struct["break_cause"], struct["reply_json"]
    return Interaction(
        id=struct["id"],
        parent_id=struct["parent_id"],
        extends_parent=struct["extends_parent"],
        break_cause=BreakCause(cause) if cause is not None else None,
        messages=tuple(_from_json(struct["messages_json"])),
        tools=tuple(_from_json(struct["tools_json"])),
        reply=_from_json(reply) if reply is not None else None,
        prompt_ids=tuple(struct["prompt_ids"]),
        completion_ids=tuple(struct["completion_ids"]),
        rollout_logprobs=tuple(struct["rollout_logprobs"]),
        versions=tuple(struct["versions"]),
        num_reported_tokens=struct["num_reported_tokens"],
        temperature=struct["temperature"],
        top_p=struct["top_p"],
        structural_tag=struct["structural_tag"],
        finish_reason=struct["finish_reason"],
        status=InteractionStatus(struct["status"]),
        error=struct["error"],
        started=struct["started"],
        ended=struct["ended"],
        started_at=struct["started_at"],
        seconds=struct["seconds"],
        reward=struct["reward"],
        turn_return=struct["turn_return"],
    )


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _text(text: str | None) -> str | None:
    if text is None:
        return None
    return text.encode("utf-8", "backslashreplace").decode()


def _to_json(value: Any) -> str:
    # ASCII, so that lone surrogates in messages are kept as escapes. A key that is no text
    # (a dataset row's number) becomes text, as JSON has no other keys.
    return json.dumps(value, default=_to_plain)


def _to_plain(value: Any) -> Any:
    """The nearest JSON value of something that a dataset row held: no row may fail to be saved."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)


def _from_json(text: str) -> Any:
    return json.loads(text)
