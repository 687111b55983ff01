"""Arithmetic questions in words: the tasks of the quickstart, and demonstrations for its model.

Two whole numbers in every question, always written in the order in which the
answer uses them. Which pairs of numbers are held out is decided by a hash of the
pair, so that no pair of a test question occurs in training or in a demonstration.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from agentrl_cli.errors import DatasetError, format_nearest
from agentrl_cli.records import Message

#: The built-in model learns from demonstrations with exactly this prompt and this tool and knows no
#: others: a test holds them equal to what the OpenAI Agents SDK sends for
#: ``builders.calculator_agent``.
SYSTEM_PROMPT = "Answer with a number."

#: As the OpenAI Agents SDK 0.24 writes it.
CALCULATE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Does arithmetic.",
        "parameters": {
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "title": "calculate_args",
            "type": "object",
            "additionalProperties": False,
        },
        "strict": True,
    },
}

#: Rows that ``build_rows`` gives for each split.
NUM_ROWS = {"train": 4096, "test": 512}

#: One pair of numbers in this many is held out.
_HELD_OUT_ONE_IN = 8

_NAMES = ("Ana", "Ben", "Eva", "Ida", "Leo", "Mia", "Sam", "Tom")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "rolls", "stamps")

_PLUS = (
    "A baker has {a} rolls and bakes {b} more. How many rolls are there?",
    "{name} has {a} {thing} and finds {b} more. How many {thing} are there?",
    "{name} buys {a} {thing} and then {b} more. How many {thing} in all?",
    "There are {a} {thing} in a box and {b} in a bag. How many in all?",
    "{name} reads {a} pages today and {b} more at night. How many pages in all?",
    "A farmer picks {a} {thing}, then {b} more. How many in all?",
    "{name} has {a} {thing}. A friend adds {b}. How many are there?",
    "A bus carries {a} people and {b} more get on. How many people are there?",
    "A shop sells {a} {thing} and later {b} more. How many in all?",
    "{name} walks {a} miles, then {b} more. How many miles in all?",
    "What is {a} plus {b}?",
    "{a} {thing} and {b} more: how many in all?",
)
_MINUS = (
    "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
    "A baker has {a} rolls and sells {b}. How many rolls are left?",
    "{name} has {a} {thing} and loses {b}. How many are left?",
    "There are {a} {thing} in a box. {name} takes {b}. How many are left?",
    "A bus carries {a} people and {b} get off. How many people are left?",
    "A book has {a} pages. {name} has read {b}. How many pages are left?",
    "A farmer has {a} eggs and breaks {b}. How many eggs are left?",
    "{name} has {a} coins and spends {b}. How many coins are left?",
    "Of {a} {thing}, {b} are sold. How many are left?",
    "A shop has {a} {thing} and sells {b}. How many are left?",
    "What is {a} minus {b}?",
    "{a} {thing}, and {b} are lost: how many are left?",
)
_TIMES = (
    "There are {a} boxes with {b} {thing} each. How many {thing} in all?",
    "{name} buys {a} bags of {b} {thing} each. How many {thing} in all?",
    "A farmer fills {a} boxes with {b} eggs each. How many eggs in all?",
    "{name} reads {a} books of {b} pages each. How many pages in all?",
    "A bus makes {a} trips with {b} people each. How many people in all?",
    "{name} walks {b} miles on each of {a} days. How many miles in all?",
    "A baker fills {a} trays of {b} rolls each. How many rolls in all?",
    "{a} friends have {b} {thing} each. How many {thing} in all?",
    "A shop has {a} rows of {b} {thing} each. How many in all?",
    "{name} fills {a} pages with {b} stamps each. How many stamps in all?",
    "What is {a} times {b}?",
    "{a} bags, {b} {thing} each: how many in all?",
)
_TEMPLATES = {"+": _PLUS, "-": _MINUS, "*": _TIMES}


@dataclass(frozen=True, slots=True)
class Question:
    """One question, its numbers in order, the expression that solves it, and the answer."""

    text: str
    numbers: tuple[str, str]
    expression: str
    answer: int


def draw_question(rng: random.Random, split: str) -> Question:
    """A question whose pair of numbers belongs to ``split``."""
    operator = rng.choice(tuple(_TEMPLATES))
    first, second = _draw_pair(rng, operator)
    while _split_of(first, second) != split:
        first, second = _draw_pair(rng, operator)
    template = rng.choice(_TEMPLATES[operator])
    text = template.format(a=first, b=second, name=rng.choice(_NAMES), thing=rng.choice(_THINGS))
    in_order = template.index("{a}") < template.index("{b}")
    left, right = (first, second) if in_order else (second, first)
    answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
    return Question(text, (str(left), str(right)), f"{left}{operator}{right}", answer)


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """Rows ``{"question": ..., "answer": "85"}``, the same ones every time.

    Raises:
        DatasetError: there is no such split.
    """
    if split not in NUM_ROWS:
        raise DatasetError(f"split {split!r} does not exist; {format_nearest(split, NUM_ROWS)}")
    rng = random.Random(f"agentrl calculator tasks, {split}")
    questions: dict[str, Question] = {}
    while len(questions) < NUM_ROWS[split]:
        question = draw_question(rng, split)
        questions[question.text] = question
    return [{"question": q.text, "answer": str(q.answer)} for q in questions.values()]


def _draw_pair(rng: random.Random, operator: str) -> tuple[int, int]:
    """Two numbers in the order of the calculation; differences are positive."""
    if operator == "*":
        return rng.randint(2, 9), rng.randint(11, 60)
    first, second = rng.randint(11, 99), rng.randint(11, 99)
    if operator == "-":
        while first == second:
            second = rng.randint(11, 99)
        return max(first, second), min(first, second)
    return first, second


def _split_of(first: int, second: int) -> str:
    pair = f"{min(first, second)},{max(first, second)}"
    bucket = hashlib.sha256(pair.encode()).digest()[0] % _HELD_OUT_ONE_IN
    return "test" if bucket == 0 else "train"


def build_demonstrations(
    *,
    num_bare_rows: int = 7500,
    num_tool_rows: int = 3000,
    num_mixed_rows: int = 1000,
    tool_rate: float = 0.25,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Rows for ``agentrl sft``, to be trained on in this order: a curriculum of three parts.

    1. Tool calls without instructions and tools before them. Copying the numbers of a question
       into a call is what takes a small model long; the prompt, four fifths of a whole
       conversation, would make every lesson in it five times as expensive.
    2. Tool calls in whole conversations, as the agent sends them.
    3. Whole conversations, most of which answer at once with a number of the question, which is
       nearly always wrong; the others call the tool. The resulting model knows how to use the tool
       and seldom does: what is left to reinforcement is to use it more.

    The quick answers repeat a number rather than guess: random digits teach nothing, and their
    gradients undo what was learned of copying.
    """
    rng = random.Random(seed)
    bare = [{"messages": _draw_messages(rng, 1.0)[1:]} for _ in range(num_bare_rows)]
    rates = [1.0] * num_tool_rows + [tool_rate] * num_mixed_rows
    whole = [{"messages": _draw_messages(rng, rate), "tools": [CALCULATE_TOOL]} for rate in rates]
    return [*bare, *whole]


def _draw_messages(rng: random.Random, tool_rate: float) -> list[Message]:
    question = draw_question(rng, "train")
    asked: list[Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.text},
    ]
    if rng.random() >= tool_rate:
        return [*asked, {"role": "assistant", "content": question.numbers[-1]}]
    call_id = f"call_{rng.randrange(10**9):09d}"
    function = {"name": "calculate", "arguments": {"expression": question.expression}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": str(question.answer)},
        {"role": "assistant", "content": str(question.answer)},
    ]
