"""What can be tested of the agent without a model: python -m pytest"""

import json
from pathlib import Path

import pytest
from agent import build_agent
from calculator import calculate, call_tool
from reward import score

DATA = Path(__file__).parent / "data"


def read_rows(split):
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_there_is_an_agent_to_build():
    assert callable(build_agent)


@pytest.mark.parametrize(
    ("expression", "result"), [("12+30", "42"), (" 7 * -6 ", "-42"), ("51-50", "1")]
)
def test_the_tool_calculates(expression, result):
    assert calculate(expression) == result
    assert call_tool("calculate", {"expression": expression}) == result


@pytest.mark.parametrize("expression", ["", "12", "1+2+3", "__import__('os')", "9" * 99 + "+1"])
def test_the_tool_tells_the_model_what_is_wrong(expression):
    assert calculate(expression).startswith("error: ")


@pytest.mark.parametrize("call", [("search", {}), ("calculate", {}), ("calculate", None)])
def test_calls_that_make_no_sense_are_answered_too(call):
    assert call_tool(*call).startswith("error: ")


@pytest.mark.parametrize(
    ("completions", "reward"), [("42", 1.0), ("12 + 30 is 42.", 1.0), ("42, or 43", 0.0), ("", 0.0)]
)
def test_the_reward_is_for_the_last_number(completions, reward):
    assert score(completions, "42") == reward


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_right_answer_is_worth_all(split):
    rows = read_rows(split)
    assert rows
    assert all(score(row["answer"], row["answer"]) == 1.0 for row in rows)


def test_no_question_is_trained_on_and_held_out():
    held_out = {row["question"] for row in read_rows("test")}
    assert not held_out & {row["question"] for row in read_rows("train")}
