"""Which failures the policy has brought about, by what it sampled and what was raised then.

A failure is the policy's only after a completed call: what fails before fails with any weights.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl_cli.records import Boundary, Failure, FailureCause, Interaction, InteractionStatus

if TYPE_CHECKING:
    from agentrl_cli.tracking.session import Session

#: What frameworks raise for a reply that they cannot use, or for too many turns; known by name,
#: not to load what nobody uses.
_RAISED_FOR_REPLIES = frozenset(
    {
        ("agents", "ModelBehaviorError"),
        ("agents", "ModelRefusalError"),
        ("agents", "MaxTurnsExceeded"),
        ("langgraph", "GraphRecursionError"),
        ("langgraph", "ToolInvocationError"),
        ("langchain_core", "OutputParserException"),
        ("openai", "LengthFinishReasonError"),
        ("openai", "ContentFilterFinishReasonError"),
        ("pydantic_ai", "UnexpectedModelBehavior"),
        ("pydantic_ai", "UsageLimitExceeded"),
    }
)
_NO_NUMBER = re.compile(
    r"(?:invalid literal for int\(\) with base \d+|could not convert string to float): (.+)",
    re.DOTALL,
)
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def walk_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and the members of exception groups."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.append(current.__cause__)
        if not current.__suppress_context__:
            waiting.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)


def is_raised_for_replies(error: BaseException) -> bool:
    """Whether a framework raises this class for what a model has said, and for nothing else."""
    return any(
        (t.__module__.partition(".")[0], t.__name__) in _RAISED_FOR_REPLIES
        for t in type(error).__mro__
    )


def list_refused(error: BaseException) -> list[str]:
    """The texts that a parser refused, by the error and its causes; other values as JSON."""
    refused: list[str] = []
    for one in walk_causes(error):
        if isinstance(one, json.JSONDecodeError):
            refused.append(one.doc)
        elif type(one).__name__ == "ValidationError" and hasattr(one, "errors"):
            # pydantic's, of whichever package. Its first version does not say what it refused.
            found = (e.get("input") for e in one.errors() if isinstance(e, Mapping))
            refused += [v if isinstance(v, str) else _to_json(v) for v in found if v is not None]
        elif isinstance(one, ValueError) and (match := _NO_NUMBER.fullmatch(str(one))):
            try:
                refused.append(str(ast.literal_eval(match[1])))
            except (SyntaxError, ValueError):
                continue
    return refused


def find_cause(
    failure: Failure, sessions: Sequence[Session], refused: Sequence[str]
) -> FailureCause:
    """Whose doing a failure is, decided once for its record.

    The policy's are: a budget or the context used up; what a framework raises for replies alone
    (``failure.cause``); and an exception of the agent or a tool after a budget refused a call,
    after a reply that called a tool that was not offered or with arguments that do not fit the
    tool's schema, or for a text that the policy wrote (``refused``).
    """
    completed = [
        i for s in sessions for i in s.interactions if i.status is InteractionStatus.COMPLETED
    ]
    if not completed:
        return FailureCause.SURROUNDINGS
    if failure.boundary is Boundary.BUDGET:
        return FailureCause.POLICY
    last = max(completed, key=lambda i: (i.started_at + i.seconds, i.ended or 0))
    is_policys = failure.boundary in (Boundary.AGENT, Boundary.TOOL) and (
        failure.cause is FailureCause.POLICY
        or any(s.is_used_up for s in sessions)
        or _has_wrong_call(last)
        or any(_wrote(i, text) for i in completed for text in refused)
    )
    return FailureCause.POLICY if is_policys else FailureCause.SURROUNDINGS


def _has_wrong_call(interaction: Interaction) -> bool:
    """Whether the reply calls a tool that was not offered, or with arguments that do not fit."""
    offered = [tool.get("function", tool) for tool in interaction.tools]
    schemas = {tool.get("name"): tool.get("parameters") or {} for tool in offered}
    return any(
        name not in schemas or not _fits(arguments, schemas[name])
        for name, arguments in _list_calls(interaction)
    )


def _list_calls(interaction: Interaction) -> list[tuple[str, str]]:
    """Name and arguments of every tool call of the reply."""
    calls = (interaction.reply or {}).get("tool_calls") or ()
    functions = [call.get("function") or {} for call in calls]
    return [(str(f.get("name")), str(f.get("arguments") or "{}")) for f in functions]


def _fits(arguments: str, schema: Mapping[str, Any]) -> bool:
    """Whether arguments have the required keys, no unknown ones, and values of the right types, as
    far as the schema, which nobody has checked, says so."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return False
    if not isinstance(given, dict):
        return False
    known, required = schema.get("properties"), _as_list(schema.get("required"))
    if not isinstance(known, Mapping) or any(str(key) not in given for key in required):
        return not required
    if not schema.get("additionalProperties") and not given.keys() <= known.keys():
        return False
    return all(_has_type(v, known[k]) for k, v in given.items() if isinstance(known.get(k), dict))


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = _as_list(schema.get("type"))
    allowed = [t for kind in kinds for t in _JSON_TYPES.get(str(kind), (object,))]
    if isinstance(value, bool):
        return not allowed or bool in allowed
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return not allowed or isinstance(value, tuple(allowed))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _wrote(interaction: Interaction, text: str) -> bool:
    """Whether ``text`` stands in the reply: in its content, in a call, or in their JSON."""
    content = (interaction.reply or {}).get("content")
    calls = [arguments for _, arguments in _list_calls(interaction)]
    said = [content if isinstance(content, str) else "", *calls]
    if not text.strip():
        # A reply that says nothing.
        return not any(one.strip() for one in said)
    return any(text in one or text in _normalize(one) for one in said)


def _normalize(text: str) -> str:
    """The JSON value that stands in a text, as :func:`list_refused` writes values."""
    try:
        return _to_json(json.loads(text))
    except ValueError:
        return ""


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        return repr(value)
