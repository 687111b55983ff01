"""Trajectories in the Agent Trajectory Interchange Format, version 1.7, that Harbor reads
(https://github.com/harbor-framework/harbor, RFC 0001).

A document of it is one conversation. The one with the final answer is the root; branches,
sub-agents and what came before a handoff are embedded in it, each whole, with what the root or an
earlier one has already marked as copied: no token that was sampled is there twice to train on.
"""

from __future__ import annotations

import math
import mimetypes
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl_cli import __version__
from agentrl_cli.inspector.exports.conversation_paths import (
    list_paths,
    list_tool_calls,
    read_reasoning,
)
from agentrl_cli.inspector.exports.export_selection import (
    ExportSelection,
    read_model_name,
    select_for_export,
)
from agentrl_cli.inspector.json_view import describe_outcome, format_line, locate
from agentrl_cli.inspector.safe_text import read_text
from agentrl_cli.inspector.trajectory_query import Source
from agentrl_cli.records import (
    Interaction,
    InteractionStatus,
    Message,
    Trajectory,
    find_new_messages,
)
from agentrl_cli.store.atomic_files import atomic_file
from agentrl_cli.store.run_folder import RunFolder

_VERSION = "ATIF-v1.7"
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}

Step = dict[str, Any]


def export_atif(run: str | Path, to: Path, selection: ExportSelection, *, tokens: bool) -> int:
    """Writes ``to``, a folder with a folder for each step or evaluation, and in it a file for each
    trajectory; gives the number of trajectories.

    Raises:
        UserInputError: no such run, step or evaluation, or nothing to export.
        StoreError: a file cannot be read or written.
    """
    folder, num_written = RunFolder.open(run), 0
    model = read_model_name(folder)
    for exported in select_for_export(folder, selection):
        place = to / exported.source.name.replace(" ", "-")
        for number, trajectory in exported.read():
            document = build_document(exported.source, trajectory, model, tokens=tokens)
            # Ids that differ in other characters alone would have one name.
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", trajectory.id).strip("-.")[:100]
            with atomic_file(place / f"{number:05d}-{name}.json") as file:
                file.write(format_line(document))
            num_written += 1
    return num_written


def build_document(
    source: Source, trajectory: Trajectory, model: str, *, tokens: bool
) -> dict[str, Any]:
    """The trajectory as one document; with ``tokens`` the ids and logprobs of its calls too."""
    root, *others = list_paths(trajectory) or [[]]
    seen: set[str] = set()
    steps = _Steps(seen, tokens=tokens)
    steps.add_path(root)
    if not steps.all:
        # Nothing was replied: what was asked is all there is.
        asked = trajectory.interactions[-1].messages if trajectory.interactions else ()
        steps.add_messages(asked or [{"role": "user", "content": trajectory.question}])
    embedded = []
    for number, path in enumerate(others, start=1):
        name = f"{trajectory.id}#{number}"
        _refer(steps, path, name)
        branch = _Steps(seen, tokens=tokens)
        branch.add_path(path)
        embedded.append(_build_conversation(trajectory, name, path, branch.all, model))
    document = _build_conversation(trajectory, trajectory.id, root, steps.all, model)
    document["final_metrics"]["extra"] = {
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
    }
    document["extra"] = {
        **locate(source),
        **{n: getattr(trajectory, n) for n in ("group_id", "task_id", "sample_index")},
        "task": dict(trajectory.task),
        **describe_outcome(trajectory),
        "calls_not_completed": [
            {"id": i.id, "status": i.status, "error": i.error}
            for i in trajectory.interactions
            if i.status is not InteractionStatus.COMPLETED
        ],
    }
    return document | ({"subagent_trajectories": embedded} if embedded else {})


def _build_conversation(
    trajectory: Trajectory, name: str, path: Sequence[Interaction], steps: list[Step], model: str
) -> dict[str, Any]:
    agent: dict[str, Any] = {
        "name": trajectory.agent_name or "agent",
        "version": f"agentrl {__version__}",
        "model_name": model,
    }
    tools = next((call.tools for call in path if call.tools), ())
    if tools:
        agent["tool_definitions"] = [*tools]
    return {
        "schema_version": _VERSION,
        "session_id": trajectory.id,
        "trajectory_id": name,
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_ids) for call in path),
            "total_completion_tokens": sum(call.num_completion_tokens for call in path),
            "total_steps": len(steps),
        },
    }


class _Steps:
    """The steps of one conversation.

    Args:
        seen: ids of the calls that a conversation has already; those of this one are added.
        tokens: whether ids and logprobs are wanted.
    """

    def __init__(self, seen: set[str], *, tokens: bool) -> None:
        self.all: list[Step] = []
        self.calls: list[Interaction] = []
        self.by_call: dict[str, Step] = {}
        self._seen = seen
        self._tokens = tokens

    def add_path(self, path: Sequence[Interaction]) -> None:
        """Adds what each call was asked anew, and its reply."""
        parent: Interaction | None = None
        for call in path:
            new = find_new_messages(call, parent)
            is_copied = call.id in self._seen
            # What precedes the last reply in a history that was edited stands in other steps.
            replies = [n for n, m in enumerate(new) if m.get("role") == "assistant"]
            start = replies[-1] + 1 if replies else 0
            self.add_messages(new[:start], is_copied=True)
            self.add_messages(new[start:], is_copied=is_copied)
            self._add_reply(call, is_copied=is_copied)
            self._seen.add(call.id)
            self.calls.append(call)
            parent = call

    def add_messages(self, messages: Sequence[Message], *, is_copied: bool = False) -> None:
        """Adds a step for each message; results of tools belong to the step that called them."""
        for message in messages:
            role = message.get("role")
            last = self.all[-1] if self.all else None
            if role == "tool" and last is not None and last["source"] == "agent":
                _add_result(last, message)
                continue
            step = self._begin(_ROLES.get(str(role), "user"), message, is_copied=is_copied)
            if role not in _ROLES:
                step["extra"] = {"role": role}

    def _begin(self, source: str, message: Mapping[str, Any], *, is_copied: bool) -> Step:
        step: Step = {
            "step_id": len(self.all) + 1,
            "source": source,
            "message": _convert_content(message.get("content")),
        }
        if is_copied:
            step["is_copied_context"] = True
        if source == "agent":
            reasoning, calls = read_reasoning(message), [*list_tool_calls(message)]
            if reasoning:
                step["reasoning_content"] = reasoning
            if calls:
                step["tool_calls"] = [
                    {"tool_call_id": c.id, "function_name": c.name, "arguments": c.arguments}
                    | ({} if c.unread_arguments is None else {"extra": {"raw": c.unread_arguments}})
                    for c in calls
                ]
        self.all.append(step)
        return step

    def _add_reply(self, call: Interaction, *, is_copied: bool) -> None:
        step = self._begin("agent", call.reply or {}, is_copied=is_copied)
        self.by_call[call.id] = step
        if call.started_at:
            step["timestamp"] = datetime.fromtimestamp(call.started_at, UTC).isoformat()
        step["llm_call_count"] = 1
        step["metrics"] = _build_metrics(call, tokens=self._tokens)
        known = {
            "interaction_id": call.id,
            "finish_reason": call.finish_reason,
            "reward": call.reward,
            "return": call.turn_return,
            "seconds": call.seconds,
            "mismatch_cause": call.mismatch_cause,
        }
        step["extra"] = {name: value for name, value in known.items() if value is not None}


def _build_metrics(call: Interaction, *, tokens: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": call.num_completion_tokens,
    }
    if call.versions:
        metrics["extra"] = {"policy_versions": sorted(set(call.versions))}
    if tokens and call.completion_ids:
        metrics["prompt_token_ids"] = [*call.prompt_ids]
        metrics["completion_token_ids"] = [*call.completion_ids]
        # The format has numbers alone.
        if all(map(math.isfinite, call.rollout_logprobs)):
            metrics["logprobs"] = [*call.rollout_logprobs]
        metrics.setdefault("extra", {})["token_policy_versions"] = [*call.versions]
    return metrics


def _add_result(step: Step, message: Message) -> None:
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    result: dict[str, Any] = {"content": _convert_content(message.get("content"))}
    call_id = message.get("tool_call_id")
    if call_id in known:
        result["source_call_id"] = call_id
    elif call_id is not None:
        result["extra"] = {"tool_call_id": call_id}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _refer(steps: _Steps, path: Sequence[Interaction], name: str) -> None:
    """Names the conversation ``path`` where the root left it, or called it."""
    shared = [call for call in path if call.id in steps.by_call]
    began = next((call.started for call in path if call.id not in steps.by_call), 0)
    step = None
    if shared:
        step = steps.by_call[shared[-1].id]
    else:
        for other in steps.calls:
            if (other.ended or 0) <= began:
                step = steps.by_call[other.id]
    if step is None:
        return
    results = step.setdefault("observation", {"results": []})["results"]
    reference = {"trajectory_id": name}
    calls = step.get("tool_calls", ())
    if not shared and len(calls) == 1 and results:
        # The one tool that ran meanwhile is the agent that it speaks of.
        results[0].setdefault("subagent_trajectory_ref", []).append(reference)
    else:
        results.append({"subagent_trajectory_ref": [reference]})


def _convert_content(content: Any) -> str | list[dict[str, Any]]:
    """A message's content: text, or parts where some are images that have an address."""
    parts = content if isinstance(content, list) else []
    converted = [
        _convert_image(part) or {"type": "text", "text": read_text([part])} for part in parts
    ]
    if any(part["type"] == "image" for part in converted):
        return converted
    return read_text(content)


def _convert_image(part: Any) -> dict[str, Any] | None:
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not url.startswith(("https://", "http://")):
        return None
    media_type = mimetypes.guess_type(url.partition("?")[0])[0]
    source = {"path": url, "media_type": media_type if media_type in _IMAGES else "image/png"}
    return {"type": "image", "source": source}
