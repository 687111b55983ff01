"""Steps and evaluations as logs of Inspect (https://inspect.aisi.org.uk), for ``inspect view``."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli import __version__
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.inspector.exports.conversation_paths import (
    list_paths,
    list_tool_calls,
    read_reasoning,
)
from agentrl_cli.inspector.exports.export_selection import (
    ExportedSource,
    ExportSelection,
    read_model_name,
    select_for_export,
)
from agentrl_cli.inspector.json_view import describe_outcome, locate, to_strict
from agentrl_cli.inspector.safe_text import read_text
from agentrl_cli.inspector.trajectory_query import Source
from agentrl_cli.log import clean
from agentrl_cli.records import ANSWER_FIELDS, Interaction, InteractionStatus, Trajectory
from agentrl_cli.store.atomic_files import store_errors
from agentrl_cli.store.layout import eval_name, step_name
from agentrl_cli.store.run_folder import RunFolder

if TYPE_CHECKING:
    from inspect_ai.event import ModelEvent
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage, ModelOutput, ModelUsage
    from inspect_ai.tool import ToolInfo

#: Inspect holds all samples of a log that it writes.
_SAMPLES_PER_LOG = 1000
_STOP_REASONS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}


def export_inspect(run: str | Path, to: Path, selection: ExportSelection) -> int:
    """Writes ``to``, a folder with a log for each step or evaluation, or several where it has more
    than 1,000 trajectories; gives the number of trajectories.

    Raises:
        MissingExtraError: Inspect is not installed.
        UserInputError: no such run, step or evaluation, or nothing to export.
        StoreError: a file cannot be read or written.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError as error:
        raise MissingExtraError(
            f"--format inspect needs the package inspect-ai, which does not import ({error}). "
            "Type: pip install 'agentrl-cli[inspect]'"
        ) from error
    folder, num_written = RunFolder.open(run), 0
    model = read_model_name(folder)
    for exported in select_for_export(folder, selection):
        for part, samples in enumerate(_batch(_build_samples(exported, model)), start=1):
            log = _build_log(folder, exported.source, samples, model)
            path = to / f"{_name(exported.source)}{'' if part == 1 else f'-part-{part}'}.eval"
            with store_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_eval_log(log, str(path))
            num_written += len(samples)
    return num_written


def _name(source: Source) -> str:
    return eval_name(source.step, source.label) if source.is_eval else step_name(source.step)


def _batch(samples: Iterator[EvalSample]) -> Iterator[list[EvalSample]]:
    while batch := [*itertools.islice(samples, _SAMPLES_PER_LOG)]:
        yield batch


def _build_log(
    folder: RunFolder, source: Source, samples: Sequence[EvalSample], model: str
) -> EvalLog:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec, EvalStats
    from inspect_ai.viewer import ViewerConfig

    times = sorted(s.started_at for s in samples if s.started_at is not None)
    ended = sorted(s.completed_at for s in samples if s.completed_at is not None)
    run = Path(folder.location)
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=times[0] if times else _format_time(0.0),
            task=f"{run.parent.name}/{run.name} {source.name}",
            dataset=EvalDataset(samples=len(samples)),
            model=model,
            config=EvalConfig(epochs=max(sample.epoch for sample in samples)),
            packages={"agentrl-cli": __version__},
            metadata={"run": folder.location, **locate(source)},
            # What models and tools have written is shown as it is, and not rendered.
            viewer=ViewerConfig(trust_content=False),
        ),
        results=_build_results(samples),
        stats=EvalStats(
            started_at=times[0] if times else "",
            completed_at=ended[-1] if ended else "",
            model_usage={model: _sum_usage(s.model_usage[model] for s in samples)},
        ),
        samples=[*samples],
    )


def _build_results(samples: Sequence[EvalSample]) -> Any:
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, score in (sample.scores or {}).items():
            values[name].append(score.as_float())
    return EvalResults(
        total_samples=len(samples),
        completed_samples=sum(sample.error is None for sample in samples),
        scores=[
            EvalScore(
                name=name,
                scorer=name,
                scored_samples=len(known),
                unscored_samples=len(samples) - len(known),
                metrics={"mean": EvalMetric(name="mean", value=math.fsum(known) / len(known))},
            )
            for name, known in values.items()
        ],
    )


def _build_samples(exported: ExportedSource, model: str) -> Iterator[EvalSample]:
    first_groups: dict[str, str] = {}
    for _, trajectory in exported.read():
        # A step may have several groups of one task, and a log one sample of an id and epoch.
        first = first_groups.setdefault(trajectory.task_id, trajectory.group_id)
        name = trajectory.task_id
        if first != trajectory.group_id:
            name = f"{name} ({trajectory.group_id})"
        yield _build_sample(name, exported.source, trajectory, model)


def _build_sample(name: str, source: Source, trajectory: Trajectory, model: str) -> EvalSample:
    from inspect_ai.log import EvalSample

    writer = _Writer(model)
    path = next(iter(list_paths(trajectory)), [])
    last = path[-1] if path else None
    calls = trajectory.interactions
    started = min((c.started_at for c in calls if c.started_at), default=0.0)
    sample = EvalSample(
        id=name,
        epoch=trajectory.sample_index + 1,
        input=writer.convert(path[0].messages) if path else trajectory.question,
        target=_find_target(trajectory),
        scores=_build_scores(trajectory),
        metadata=_to_utf8(
            {
                "trajectory": trajectory.id,
                "group": trajectory.group_id,
                "replaced_by": trajectory.replaced_by,
                "agent": trajectory.agent_name,
                "task": dict(trajectory.task),
                **locate(source),
                **describe_outcome(trajectory),
            }
        ),
        model_usage={model: _sum_usage(map(_count_usage, calls))},
        total_time=trajectory.seconds,
        turn_count=trajectory.num_turns,
        uuid=f"{_name(source)}:{trajectory.id}",
        events=[writer.build_event(call, started) for call in calls],
    )
    if last is not None:
        sample.messages = writer.convert((*last.messages, last.reply or {"role": "assistant"}))
        sample.output = writer.build_output(last)
    if started:
        sample.started_at = _format_time(started)
        sample.completed_at = _format_time(started + trajectory.seconds)
    if trajectory.failure is not None:
        sample.error = _build_error(trajectory)
    return sample


def _find_target(trajectory: Trajectory) -> str:
    known = (trajectory.task.get(name) for name in ANSWER_FIELDS)
    return _fix(str(next((answer for answer in known if answer is not None), "")))


def _build_scores(trajectory: Trajectory) -> dict[str, Any]:
    from inspect_ai.scorer import Score

    values = {"reward": trajectory.reward, **trajectory.reward_parts}
    answer = None if trajectory.final_answer is None else _fix(trajectory.final_answer)
    return {
        name: Score(value=float(value), answer=answer if name == "reward" else None)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _build_error(trajectory: Trajectory) -> Any:
    from inspect_ai.log import EvalError

    failure = trajectory.failure
    assert failure is not None
    text = f"{failure.boundary} ({failure.cause}): {failure.kind}: {failure.message}"
    lines = clean(failure.traceback)
    return EvalError(message=clean(_fix(text)), traceback=lines, traceback_ansi=lines)


class _Writer:
    """Messages and calls of one trajectory in Inspect's classes; equal messages are one object, of
    which a log holds one copy."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[int, Any] = {}
        self._functions: dict[str, str] = {}

    def convert(self, messages: Iterable[dict[str, Any]]) -> list[ChatMessage]:
        """The messages, in order."""
        return [*map(self._convert_one, messages)]

    def _convert_one(self, message: dict[str, Any]) -> Any:
        known = self._known.get(id(message))
        if known is None:
            known = self._known[id(message)] = self._build_message(_to_utf8(message))
        return known

    def _build_message(self, message: dict[str, Any]) -> ChatMessage:
        from inspect_ai.model import (
            ChatMessageAssistant,
            ChatMessageSystem,
            ChatMessageTool,
            ChatMessageUser,
            ContentReasoning,
            ContentText,
        )
        from inspect_ai.tool import ToolCall

        role, text = message.get("role"), read_text(message.get("content"))
        if role in ("system", "developer"):
            return ChatMessageSystem(content=text)
        if role == "tool":
            call_id = message.get("tool_call_id")
            name = self._functions.get(str(call_id))
            return ChatMessageTool(content=text, tool_call_id=call_id, function=name)
        if role != "assistant":
            other = None if role == "user" else {"role": role}
            return ChatMessageUser(content=text, metadata=other)
        calls = [*list_tool_calls(message)]
        self._functions |= {call.id: call.name for call in calls}
        reasoning = read_reasoning(message)
        parts = [ContentReasoning(reasoning=reasoning or ""), ContentText(text=text)]
        return ChatMessageAssistant(
            content=parts if reasoning else text,
            model=self._model,
            tool_calls=[
                ToolCall(
                    id=call.id,
                    function=call.name,
                    arguments=call.arguments,
                    parse_error=None
                    if call.unread_arguments is None
                    else f"no JSON object: {call.unread_arguments}",
                )
                for call in calls
            ]
            or None,
        )

    def build_output(self, call: Interaction) -> ModelOutput:
        """What the call gave."""
        from inspect_ai.model import ChatCompletionChoice, ModelOutput

        if call.reply is None:
            return ModelOutput(model=self._model, error=call.error and _fix(call.error))
        stop_reason: Any = _STOP_REASONS.get(call.finish_reason or "", "unknown")
        choice = ChatCompletionChoice.model_construct(
            message=self._convert_one(call.reply), stop_reason=stop_reason, logprobs=None
        )
        return ModelOutput(
            model=self._model, choices=[choice], usage=_count_usage(call), time=call.seconds
        )

    def build_event(self, call: Interaction, began: float) -> ModelEvent:
        """The call, of whatever conversation, for the transcript."""
        from inspect_ai.event import ModelEvent
        from inspect_ai.model import GenerateConfig

        return ModelEvent(
            model=self._model,
            input=self.convert(call.messages),
            tools=[*map(_build_tool, call.tools)],
            tool_choice="auto",
            config=GenerateConfig(temperature=call.temperature, top_p=call.top_p),
            output=self.build_output(call),
            error=None
            if call.status is InteractionStatus.COMPLETED
            else _fix(f"{call.status}: {call.error or 'no error is stored'}"),
            timestamp=datetime.fromtimestamp(call.started_at, UTC),
            completed=datetime.fromtimestamp(call.started_at + call.seconds, UTC),
            working_start=max(call.started_at - began, 0.0),
            working_time=call.seconds,
            uuid=call.id,
            metadata={
                "parent": call.parent_id,
                "mismatch_cause": call.mismatch_cause,
                "reward": call.reward,
                "return": call.turn_return,
            },
        )


def _build_tool(schema: dict[str, Any]) -> ToolInfo:
    from inspect_ai.tool import ToolInfo
    from pydantic import ValidationError

    function = _to_utf8(schema.get("function") or schema)
    name, description = str(function.get("name")), str(function.get("description") or "")
    try:
        parameters = {"parameters": function["parameters"]} if function.get("parameters") else {}
        return ToolInfo(name=name, description=description, **parameters)
    except ValidationError:
        # It knows a part of JSON Schema.
        text = json.dumps(function.get("parameters"))
        return ToolInfo(name=name, description=f"{description}\n{text}".strip())


def _count_usage(call: Interaction) -> ModelUsage:
    from inspect_ai.model import ModelUsage

    num_in, num_out = len(call.prompt_ids), call.num_completion_tokens
    return ModelUsage(input_tokens=num_in, output_tokens=num_out, total_tokens=num_in + num_out)


def _sum_usage(usages: Iterable[ModelUsage]) -> ModelUsage:
    from inspect_ai.model import ModelUsage

    return sum(usages, ModelUsage())


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _fix(text: str) -> str:
    """The text without lone surrogates, which no log can hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _to_utf8(value: Any) -> Any:
    """Plain data without them, nor numbers that are not finite."""
    text = json.dumps(to_strict(value), ensure_ascii=False, default=repr)
    return json.loads(text.encode("utf-8", "replace"))
