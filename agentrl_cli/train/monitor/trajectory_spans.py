"""A finished trajectory as spans: the attempt, its model calls, its tools, its reward.

Names and attributes are those of OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); what they have no name for begins with
``agentrl.``. Times are those of the record, which has the calls: a tool lasts from the reply that
asks for it to the call that brings its result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl_cli.records import (
    Interaction,
    InteractionStatus,
    Message,
    Trajectory,
    find_new_messages,
)

SpanKind = Literal["invoke_agent", "chat", "execute_tool", "evaluation"]
Attribute = str | bool | int | float | list[str] | list[int]

_NS = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class TrajectorySpan:
    """One of a trajectory's spans; each comes after its parent."""

    kind: SpanKind
    name: str
    start_ns: int
    """Unix time in nanoseconds."""
    end_ns: int
    parent: TrajectorySpan | None = None
    """None: it is the trajectory's own."""
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str | None = None
    inputs: Any = None
    """What was asked, as plain data; None: nobody asked for content."""
    outputs: Any = None


def choose_spread(trajectories: Sequence[Trajectory], limit: int | None) -> list[Trajectory]:
    """At most ``limit`` of them, evenly spaced in the order of their rewards: the lowest and the
    highest are among them. Those without a reward, mostly failures, come before the lowest."""
    if limit is None or len(trajectories) <= limit:
        return [*trajectories]
    ranked = sorted(trajectories, key=_rank)
    places = [round(n * (len(ranked) - 1) / max(limit - 1, 1)) for n in range(limit)]
    return [ranked[place] for place in places]


def _rank(trajectory: Trajectory) -> float:
    return -math.inf if trajectory.known_reward is None else trajectory.known_reward


def build_spans(trajectory: Trajectory, model: str, *, with_content: bool) -> list[TrajectorySpan]:
    """The spans of a trajectory, its own first; none where no call was made.

    Model calls and tools belong to the trajectory. Those of a conversation that begins while a tool
    runs, a sub-agent's, belong to that tool; where several run, to the trajectory.

    Args:
        trajectory: the record.
        model: the name of the model that was asked.
        with_content: whether messages, arguments and results of tools are wanted.
    """
    calls = sorted(trajectory.interactions, key=lambda call: (call.started_at, call.started))
    if not calls:
        return []
    by_id = {call.id: call for call in calls}
    root = _build_root(trajectory, calls, with_content=with_content)
    tools = _build_tools(calls, by_id, with_content=with_content)
    owners: dict[str, TrajectorySpan] = {}
    chats = []
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        if parent is not None and parent.id in owners:
            owners[call.id] = owners[parent.id]
        else:
            parent = None
            owners[call.id] = _find_caller(call, [*tools.values()]) or root
        chat = _build_chat(call, parent, model, with_content=with_content)
        chat.parent = owners[call.id]
        chats.append(chat)
    for (call_id, _), tool in tools.items():
        tool.parent = owners.get(call_id, root)
    spans = [*_sort_by_parent([root, *chats, *tools.values(), *_build_reward(trajectory, root)])]
    for span in spans:
        span.name, span.error = _fix(span.name), span.error and _fix(span.error)
        span.attributes = {
            _fix(name): _fix(value) if isinstance(value, str) else value
            for name, value in span.attributes.items()
        }
    return spans


def _fix(text: str) -> str:
    """The text without lone surrogates, which no protocol can send."""
    return text.encode("utf-8", "backslashreplace").decode()


def _sort_by_parent(spans: Sequence[TrajectorySpan]) -> Iterator[TrajectorySpan]:
    """Each after its parent, those of one parent in the order of time."""
    children: dict[int, list[TrajectorySpan]] = {}
    for span in spans:
        children.setdefault(id(span.parent), []).append(span)
    pending = children[id(None)]
    while pending:
        span = pending.pop(0)
        yield span
        pending = sorted(children.get(id(span), ()), key=lambda s: s.start_ns) + pending


def _find_caller(call: Interaction, tools: Sequence[TrajectorySpan]) -> TrajectorySpan | None:
    """The tool that a conversation began in; None: none, or which of several is unknown."""
    start = _to_ns(call.started_at)
    # Strictly: where times are unknown, all of them are equal.
    running = [tool for tool in tools if tool.start_ns < start <= tool.end_ns]
    running.sort(key=lambda tool: tool.end_ns - tool.start_ns)
    if len(running) > 1 and running[0].start_ns == running[1].start_ns:
        return None
    return running[0] if running else None


def _build_root(
    trajectory: Trajectory, calls: Sequence[Interaction], *, with_content: bool
) -> TrajectorySpan:
    start = trajectory.started_at or calls[0].started_at
    end = max(max(map(_find_end, calls)), start + trajectory.seconds - trajectory.reward_seconds)
    agent, failure = trajectory.agent_name or "agent", trajectory.failure
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": trajectory.id,
        "gen_ai.usage.input_tokens": sum(len(call.prompt_ids) for call in calls),
        "gen_ai.usage.output_tokens": trajectory.num_completion_tokens,
        "agentrl.step": trajectory.step,
        "agentrl.trajectory_id": trajectory.id,
        "agentrl.group_id": trajectory.group_id,
        "agentrl.task_id": trajectory.task_id,
        "agentrl.sample_index": trajectory.sample_index,
        "agentrl.stop_reason": trajectory.stop_reason and str(trajectory.stop_reason),
        **list_rewards(trajectory),
    }
    if failure is not None:
        attributes["error.type"] = failure.kind
        attributes["agentrl.failure.boundary"] = str(failure.boundary)
        attributes["agentrl.failure.cause"] = str(failure.cause)
    return TrajectorySpan(
        kind="invoke_agent",
        name=f"invoke_agent {agent}",
        start_ns=_to_ns(start),
        end_ns=_to_ns(end + trajectory.reward_seconds),
        attributes=_leave_out_none(attributes),
        error=None if failure is None else f"{failure.kind}: {failure.message}",
        inputs={"task": dict(trajectory.task)} if with_content else None,
        outputs=trajectory.final_answer if with_content else None,
    )


def list_rewards(trajectory: Trajectory) -> dict[str, float]:
    """``agentrl.reward`` and ``agentrl.reward.<part>``, what of them is finite."""
    parts = {f"agentrl.reward.{name}": value for name, value in trajectory.reward_parts.items()}
    known = {"agentrl.reward": trajectory.reward, **parts}
    return {n: float(v) for n, v in known.items() if v is not None and math.isfinite(v)}


def _build_chat(
    call: Interaction, parent: Interaction | None, model: str, *, with_content: bool
) -> TrajectorySpan:
    is_completed = call.status is InteractionStatus.COMPLETED
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentrl",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.request.top_p": call.top_p,
        "gen_ai.response.id": call.id,
        "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": call.num_completion_tokens,
        "agentrl.policy_versions": sorted(set(call.versions)) or None,
        "agentrl.parent_id": call.parent_id,
        "agentrl.prefix_mismatch": call.mismatch_cause and str(call.mismatch_cause),
        "agentrl.reward": call.reward,
        "agentrl.return": call.turn_return,
        "error.type": None if is_completed else str(call.status),
    }
    return TrajectorySpan(
        kind="chat",
        name=f"chat {model}",
        start_ns=_to_ns(call.started_at),
        end_ns=_to_ns(_find_end(call)),
        attributes=_leave_out_none(attributes),
        error=None if is_completed else call.error or str(call.status),
        # What the calls before it have shown is left out: it would grow with their square.
        inputs=[*find_new_messages(call, parent)] if with_content else None,
        outputs=[call.reply] if with_content and call.reply is not None else None,
    )


def _build_tools(
    calls: Sequence[Interaction], by_id: dict[str, Interaction], *, with_content: bool
) -> dict[tuple[str, str], TrajectorySpan]:
    """The tools that ran, by the call whose reply asks for one and the id of the tool call."""
    tools: dict[tuple[str, str], TrajectorySpan] = {}
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        if parent is None:
            continue
        results = {
            message.get("tool_call_id"): message
            for message in call.messages[len(parent.messages) :]
            if message.get("role") == "tool"
        }
        for requested in (parent.reply or {}).get("tool_calls") or ():
            key = (parent.id, str(requested.get("id")))
            # Of branches, the first has waited for the tool.
            if requested.get("id") in results and key not in tools:
                result = results[requested.get("id")]
                tools[key] = _build_tool(requested, result, parent, call, with_content=with_content)
    return tools


def _build_tool(
    requested: Message,
    result: Message,
    asking: Interaction,
    told: Interaction,
    *,
    with_content: bool,
) -> TrajectorySpan:
    function = requested.get("function") or {}
    name = str(function.get("name") or "tool")
    start = _to_ns(_find_end(asking))
    return TrajectorySpan(
        kind="execute_tool",
        name=f"execute_tool {name}",
        start_ns=start,
        end_ns=max(_to_ns(told.started_at), start),
        attributes={
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": str(requested.get("id")),
            "agentrl.interaction_id": asking.id,
        },
        inputs=function.get("arguments") if with_content else None,
        outputs=result.get("content") if with_content else None,
    )


def _build_reward(trajectory: Trajectory, root: TrajectorySpan) -> Iterator[TrajectorySpan]:
    rewards = list_rewards(trajectory)
    if not rewards:
        return
    score = rewards.get("agentrl.reward")
    given = {} if score is None else {"gen_ai.evaluation.score.value": score}
    yield TrajectorySpan(
        kind="evaluation",
        name="reward",
        start_ns=root.end_ns - int(trajectory.reward_seconds * _NS),
        end_ns=root.end_ns,
        parent=root,
        attributes={"gen_ai.evaluation.name": "reward", **given, **rewards},
    )


def list_content(span: TrajectorySpan) -> dict[str, Attribute]:
    """What was asked and answered, under the names that the conventions have for it."""
    if span.kind == "chat":
        given = {"gen_ai.input.messages": span.inputs, "gen_ai.output.messages": span.outputs}
        shown = {n: [*map(_convert_message, m)] for n, m in given.items() if m is not None}
        return {name: _to_json(messages) for name, messages in shown.items()}
    names = ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result")
    if span.kind == "invoke_agent":
        names = ("agentrl.task", "agentrl.final_answer")
    values = zip(names, (span.inputs, span.outputs), strict=True)
    return {n: _fix(v) if isinstance(v, str) else _to_json(v) for n, v in values if v is not None}


def _convert_message(message: Message) -> dict[str, Any]:
    """A message in the conventions' form: a role and parts."""
    content, parts = message.get("content"), []
    for one in content if isinstance(content, list) else [content]:
        text = one.get("text") if isinstance(one, dict) and one.get("type") == "text" else one
        if text not in (None, ""):
            parts.append({"type": "text", "content": text})
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        return {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": call_id, "response": content}],
        }
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        known = {"id": call.get("id"), "name": function.get("name")}
        parts.append({"type": "tool_call", **known, "arguments": function.get("arguments")})
    return {"role": message.get("role"), "parts": parts}


def _to_json(value: Any) -> str:
    # ASCII: lone surrogates, which no wire format takes, stay escapes.
    return json.dumps(value, default=repr)


def _find_end(call: Interaction) -> float:
    return call.started_at + call.seconds


def _to_ns(seconds: float) -> int:
    return int(seconds * _NS)


def _leave_out_none(attributes: dict[str, Attribute | None]) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}
