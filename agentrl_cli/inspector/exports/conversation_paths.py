"""A trajectory's tree as the conversations that it holds, for formats that know no tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl_cli.inspector.trajectory_view import find_parent
from agentrl_cli.records import Interaction, InteractionStatus, Trajectory


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call of a reply."""

    id: str
    name: str
    arguments: dict[str, Any]
    unread_arguments: Any = None
    """What the arguments are, where they are no JSON object; ``arguments`` is then empty."""


def list_paths(trajectory: Trajectory) -> list[list[Interaction]]:
    """From the first call to the last, the calls of each conversation that no other continues.

    The one that ended last comes first: it holds the final answer. Further ones are branches,
    sub-agents, and what came before a handoff.
    """
    completed = {
        i.id: i for i in trajectory.interactions if i.status is InteractionStatus.COMPLETED
    }
    parents = {i.id: find_parent(i, completed) for i in completed.values()}
    continued = {parent.id for parent in parents.values() if parent is not None}
    leaves = [i for i in completed.values() if i.id not in continued]
    leaves.sort(key=lambda leaf: -(leaf.ended or leaf.started))
    paths = []
    for leaf in leaves:
        path = [leaf]
        while (parent := parents[path[-1].id]) is not None:
            path.append(parent)
        paths.append(path[::-1])
    return paths


def list_tool_calls(message: Mapping[str, Any] | None) -> Iterator[RequestedCall]:
    """The tool calls of a reply; of one without an id, its place in the reply stands for it."""
    calls = (message or {}).get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        raw = function.get("arguments")
        arguments = _read_arguments(raw)
        yield RequestedCall(
            id=str(call.get("id") or f"call-{number}"),
            name=str(function.get("name") or ""),
            arguments=arguments if isinstance(arguments, dict) else {},
            unread_arguments=None if isinstance(arguments, dict) else raw,
        )


def _read_arguments(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def read_reasoning(message: Mapping[str, Any] | None) -> str | None:
    """The reasoning of a reply, under whichever of its names."""
    found = (message or {}).get("reasoning_content") or (message or {}).get("reasoning")
    return found if isinstance(found, str) else None
