"""A trajectory as plain columns, in which nothing is written twice.

Every call of a conversation repeats what came before it. So each message and each list of tools is
written once a trajectory, as JSON text, and a call says what its request adds to its parent's: the
numbers of its new messages in that list, and the prompt's new token ids.

As one line of JSON such a row is what a finished trajectory is kept in until its step is complete,
and in which it goes from process to process.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal

from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    InteractionStatus,
    MismatchCause,
    SharedSequence,
    StopReason,
    Trajectory,
)

#: What a column holds: ``ints`` and ``floats`` are lists of numbers, ``texts`` of texts; ``json``
#: is a text; ``calls`` is a mapping from each of ``CALL_COLUMNS`` to the values of all calls.
Kind = Literal["text", "json", "int", "float", "bool", "ints", "floats", "texts", "calls"]

#: Of a model call. Those of the first group stand for what is shared.
CALL_COLUMNS: Mapping[str, Kind] = {
    # How many messages of the parent's request this one begins with, and what follows them.
    "num_parent_messages": "int", "new_messages": "ints",
    # Numbers in the trajectory's ``messages_json`` and ``tools_json``, from 0.
    "reply": "int", "tools": "int",
    # How many tokens of the parent (prompt, then completion) the prompt begins with.
    "num_parent_ids": "int", "new_prompt_ids": "ints",
    "id": "text", "parent_id": "text", "extends_parent": "bool", "mismatch_cause": "text",
    "completion_ids": "ints", "rollout_logprobs": "floats", "versions": "ints",
    "num_reported_tokens": "int", "has_malformed_call": "bool", "structural_tag": "text",
    "temperature": "float", "top_p": "float", "finish_reason": "text", "status": "text",
    "error": "text", "started": "int", "ended": "int", "started_at": "float", "seconds": "float",
    "reward": "float", "turn_return": "float",
}  # fmt: skip

COLUMNS: Mapping[str, Kind] = {
    "id": "text", "group_id": "text", "task_id": "text", "sample_index": "int", "step": "int",
    "replaced_by": "text", "agent_name": "text", "reward": "float", "reward_parts_json": "json",
    "export_style": "text", "final_answer": "text", "stop_reason": "text",
    "failure_boundary": "text", "failure_cause": "text", "failure_kind": "text",
    "failure_message": "text", "failure_traceback": "text", "started_at": "float",
    "seconds": "float", "reward_seconds": "float", "task_json": "json", "messages_json": "texts",
    "tools_json": "texts", "interactions": "calls",
}  # fmt: skip

#: What the name of a column ends with that holds JSON.
JSON_ENDING = "_json"

_SHARED = (
    "num_parent_messages", "new_messages", "reply", "tools", "num_parent_ids", "new_prompt_ids"
)  # fmt: skip
_FAILURE = ("boundary", "cause", "kind", "message", "traceback")
_ENUMS: Mapping[str, type[StrEnum]] = {
    "mismatch_cause": MismatchCause,
    "status": InteractionStatus,
}
#: The type of the numbers in a list, as :mod:`array` names it.
ARRAYS = {"ints": "i", "floats": "d"}
#: Of a call's, those that hold lists of numbers: of which type.
LIST_COLUMNS = {n: ARRAYS[kind] for n, kind in CALL_COLUMNS.items() if kind in ARRAYS}


def format_record(trajectory: Trajectory) -> bytes:
    """The trajectory as one line of JSON; lists of numbers are little-endian in base64."""
    row = build_row(trajectory)
    calls = row["interactions"]
    calls |= {name: _pack(calls[name], typecode) for name, typecode in LIST_COLUMNS.items()}
    return write_json(row).encode()


def parse_record(record: bytes) -> Trajectory:
    """The trajectory of :func:`format_record`.

    Raises:
        KeyError, TypeError, ValueError: it was written by another version.
    """
    row = json.loads(record)
    calls = row["interactions"]
    calls |= {name: _unpack(calls[name], typecode) for name, typecode in LIST_COLUMNS.items()}
    return parse_row(row)


def _pack(lists: Sequence[Sequence[float]], typecode: str) -> list[Any]:
    numbers = array(typecode)
    for values in lists:
        numbers += as_array(values, typecode)
    return [[len(values) for values in lists], base64.b64encode(numbers).decode()]


def _unpack(packed: list[Any], typecode: str) -> list[Sequence[float]]:
    lengths, text = packed
    numbers = array(typecode, base64.b64decode(text))
    ends = [*accumulate(lengths)]
    return [numbers[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def build_row(trajectory: Trajectory) -> dict[str, Any]:
    """The value of each of ``COLUMNS``; texts may hold lone surrogates."""
    interactions = trajectory.interactions
    messages, tools = _Texts(), _Texts()
    known: dict[str, Interaction] = {}
    shared = []
    for interaction in interactions:
        parent = known.get(interaction.parent_id or "")
        shared.append(_build_shared(interaction, parent, messages, tools))
        known[interaction.id] = interaction
    calls = {name: [values[name] for values in shared] for name in _SHARED}
    for name in CALL_COLUMNS.keys() - calls.keys():
        calls[name] = [getattr(interaction, name) for interaction in interactions]
    given = {f"failure_{name}": getattr(trajectory.failure, name, None) for name in _FAILURE}
    given |= {"messages_json": messages.texts, "tools_json": tools.texts, "interactions": calls}
    return {
        name: given[name] if name in given else read_column(trajectory, name, kind)
        for name, kind in COLUMNS.items()
    }


def parse_row(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of :func:`build_row`, whose calls share what they repeat.

    Raises:
        KeyError, TypeError, ValueError: it is no such row.
    """
    values = {
        name.removesuffix(JSON_ENDING): json.loads(row[name]) if kind == "json" else row[name]
        for name, kind in COLUMNS.items()
        if kind not in ("texts", "calls") and not name.startswith("failure_")
    }
    values["stop_reason"] = row["stop_reason"] and StopReason(row["stop_reason"])
    failure = None
    if row["failure_boundary"] is not None:
        known = {name: row[f"failure_{name}"] for name in _FAILURE}
        kinds = {"boundary": Boundary(known["boundary"]), "cause": FailureCause(known["cause"])}
        failure = Failure(**known | kinds)
    return Trajectory(**values, failure=failure, interactions=_parse_calls(row))


def read_column(record: object, name: str, kind: Kind) -> Any:
    """The value of a record's column: what its attribute of the same name holds."""
    value = getattr(record, name.removesuffix(JSON_ENDING))
    if kind == "json":
        return write_json(value)
    return float(value) if kind == "float" and value is not None else value


class _Texts:
    """JSON values, each written once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._by_text: dict[str, int] = {}
        self._by_identity: dict[int, int] = {}

    def find(self, value: Any) -> int:
        """The number of a value, which outlives this object, in ``texts``."""
        number = self._by_identity.get(id(value))
        if number is None:
            text = write_json(value)
            number = self._by_text.setdefault(text, len(self.texts))
            if number == len(self.texts):
                self.texts.append(text)
            self._by_identity[id(value)] = number
        return number


def _build_shared(
    interaction: Interaction, parent: Interaction | None, messages: _Texts, tools: _Texts
) -> dict[str, Any]:
    reply, num_messages, num_ids = interaction.reply, 0, 0
    if parent is not None:
        num_messages = _count_shared(interaction.messages, parent.messages)
        num_ids = _count_shared(interaction.prompt_ids, _find_ids(parent))
    return {
        "num_parent_messages": num_messages,
        "new_messages": [*map(messages.find, interaction.messages[num_messages:])],
        "reply": None if reply is None else messages.find(reply),
        "tools": tools.find(interaction.tools) if interaction.tools else None,
        "num_parent_ids": num_ids,
        "new_prompt_ids": interaction.prompt_ids[num_ids:],
    }


def _find_ids(interaction: Interaction) -> SharedSequence[int]:
    """The tokens up to the end of the reply."""
    prompt_ids = interaction.prompt_ids
    if not isinstance(prompt_ids, SharedSequence):
        prompt_ids = SharedSequence(prompt_ids)
    return SharedSequence(interaction.completion_ids, prompt_ids)


def _count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    if isinstance(one, SharedSequence) and isinstance(other, SharedSequence):
        return one.count_shared(other)
    return 0


def _parse_calls(row: Mapping[str, Any]) -> tuple[Interaction, ...]:
    messages = [json.loads(text) for text in row["messages_json"]]
    tools = [tuple(json.loads(text)) for text in row["tools_json"]]
    calls: Mapping[str, Any] = row["interactions"]
    own = [name for name in CALL_COLUMNS if name not in _SHARED]
    known: dict[str, Interaction] = {}
    interactions = []
    for number in range(len(calls["id"])):
        call = {name: values[number] for name, values in calls.items()}
        parent = known.get(call["parent_id"] or "")
        before, ids_before = (parent.messages, _find_ids(parent)) if parent else (None, None)
        new_messages = tuple(messages[number] for number in call["new_messages"])
        new_ids = as_array(call["new_prompt_ids"], "i")
        interaction = Interaction(
            messages=_extend(before, call["num_parent_messages"], new_messages),
            reply=None if call["reply"] is None else messages[call["reply"]],
            tools=() if call["tools"] is None else tools[call["tools"]],
            prompt_ids=_extend(ids_before, call["num_parent_ids"], new_ids),
            **{name: _parse(name, call[name]) for name in own},
        )
        known[interaction.id] = interaction
        interactions.append(interaction)
    return tuple(interactions)


def _parse(name: str, value: Any) -> Any:
    if name in LIST_COLUMNS:
        return SharedSequence(as_array(value, LIST_COLUMNS[name]))
    return _ENUMS[name](value) if name in _ENUMS and value is not None else value


def _extend(before: Any, num_shared: int, own: Sequence[Any]) -> SharedSequence[Any]:
    if not num_shared:
        return SharedSequence(own)
    if before is None or num_shared > len(before):
        raise ValueError(f"a call repeats {num_shared} items of a parent that has fewer")
    return SharedSequence(own, before, num_shared)


def as_array(values: Sequence[float], typecode: str) -> array[Any]:
    """The numbers as an array: mostly the one that they are held in."""
    if isinstance(values, SharedSequence) and values.parent is None:
        values = values.own
    if isinstance(values, array) and values.typecode == typecode:
        return values
    return array(typecode, values)


def write_json(value: Any) -> str:
    """JSON in ASCII, so that lone surrogates in messages are kept as escapes.

    A key that is no text (a dataset row's number) becomes text, as JSON has no other keys.
    """
    return _JSON.encode(value)


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
    return value.tolist() if hasattr(value, "tolist") else repr(value)


#: Made once: ``json.dumps`` with options makes an encoder for every call.
_JSON = json.JSONEncoder(default=_to_plain)
