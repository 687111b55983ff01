from __future__ import annotations

from typing import Any

import pytest

from agentrl_cli.records import MismatchCause
from agentrl_cli.tracking.tree import diagnose_edit, fingerprint, replays_reasoning


def call(arguments: Any = '{"a": 1, "b": 2}', call_id: str = "c1", **extra: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function, **extra}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


SAME = [
    (assistant(content=None), assistant(content="")),
    (assistant(content=None), assistant()),
    (assistant(content="x", refusal=None), assistant(content="x")),
    (assistant(content="x"), assistant(content=[{"type": "text", "text": "x"}])),
    (assistant(content="x", tool_calls=[]), assistant(content="x", tool_calls=None)),
    (assistant(tool_calls=[call()]), assistant(tool_calls=[call('{"b":2,"a":1}')])),
    (assistant(tool_calls=[call()]), assistant(content="", tool_calls=[call(index=0)])),
    (assistant(content="x", reasoning_content="hm"), assistant(content="x")),
    (assistant(content="x", reasoning="hm"), assistant(content="x", reasoning_content="hm")),
    (assistant(content="x", reasoning="hm"), assistant(content="<think>\nhm\n</think>\n\nx")),
    (assistant(content="hm\n</think>\n\nx"), assistant(content="x")),
    (assistant(content="\n\nx"), assistant(content="x")),
    ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
    ({"content": "x", "role": "user"}, {"role": "user", "content": "x"}),
]
DIFFERENT = [
    (assistant(content="x"), assistant(content="x ")),
    (assistant(content="x"), {"role": "user", "content": "x"}),
    (assistant(tool_calls=[call()]), assistant(tool_calls=[call(call_id="c2")])),
    (assistant(tool_calls=[call()]), assistant(tool_calls=[call('{"a": 1, "b": 3}')])),
    (assistant(tool_calls=[call()]), assistant(tool_calls=[call(), call(call_id="c2")])),
    (assistant(content="x"), assistant(content="x", mood="good")),
    ({"role": "tool", "tool_call_id": "1", "content": "x"}, {"role": "tool", "content": "x"}),
    ({"role": "user", "content": "x", "reasoning": "a"}, {"role": "user", "content": "x"}),
    ({"role": "user", "content": "<think>a</think>x"}, {"role": "user", "content": "x"}),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same_meaning_is_the_same_turn(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_meaning_is_another_turn(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("replayed", "same"),
    [
        (assistant(content="x"), True),
        (assistant(content="x", reasoning=" hm\n"), True),
        (assistant(content="<think>\nhm</think>x"), True),
        (assistant(content="x", reasoning_content=None), True),
        (assistant(content="x", reasoning_content="ha"), False),
        (assistant(content="<think>ha</think>x"), False),
    ],
)
def test_thought_may_be_missing_but_not_another(replayed: dict[str, Any], same: bool) -> None:
    assert replays_reasoning(replayed, "hm") is same


def test_fingerprint_depends_on_what_came_before() -> None:
    message = assistant(content="x")
    assert fingerprint(message, fingerprint(message)) != fingerprint(message)


def test_text_with_lone_surrogates_has_a_fingerprint() -> None:
    assert fingerprint(assistant(content="\ud800")) != fingerprint(assistant(content="x"))


@pytest.mark.parametrize(
    ("sampled", "replayed", "cause"),
    [
        (assistant(content="a"), assistant(content="b"), MismatchCause.HISTORY_EDITED),
        (
            assistant(content="<think>hm</think>\n\na"),
            assistant(content="a"),
            MismatchCause.THINKING_STRIPPED,
        ),
        (
            assistant(content="<think>hm</think>a"),
            assistant(content="b"),
            MismatchCause.HISTORY_EDITED,
        ),
        (
            assistant(tool_calls=[call()]),
            assistant(tool_calls=[call('{"a": 9}')]),
            MismatchCause.TOOL_ARGUMENTS_CHANGED,
        ),
        (
            assistant(content="a", tool_calls=[call()]),
            assistant(content="b", tool_calls=[call('{"a": 9}')]),
            MismatchCause.HISTORY_EDITED,
        ),
    ],
)
def test_edit_is_named(
    sampled: dict[str, Any], replayed: dict[str, Any], cause: MismatchCause
) -> None:
    assert diagnose_edit(sampled, replayed) is cause
