from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.exact_answer import exact_answer_reward_fn


@pytest.mark.parametrize(
    "text",
    ["85", "85.", "The answer is 85.", "47 + 38 = 85", "85.0", "$85", "<b>85</b>", 85, "40, 85"],
)
def test_right_answers(text: object) -> None:
    assert exact_answer_reward_fn(completions=text, answer="85") == 1.0


@pytest.mark.parametrize(
    "text", ["", None, "no idea", "-85", "85 or 86", "850", "8 5", "85.5", ["86"], "1,085"]
)
def test_wrong_answers(text: object) -> None:
    assert exact_answer_reward_fn(completions=text, answer="85") == 0.0


def test_minus_signs_and_thousands() -> None:
    assert exact_answer_reward_fn("it is -3", "-3") == 1.0
    assert exact_answer_reward_fn("10-3", "3") == 1.0
    assert exact_answer_reward_fn("1,234,567", "1234567") == 1.0
    assert exact_answer_reward_fn("7", 7, question="ignored") == 1.0


def test_an_answer_without_a_number_never_matches() -> None:
    assert exact_answer_reward_fn("nothing", "nothing") == 0.0


@pytest.mark.slow
@given(st.text(), st.text())
def test_never_raises(text: str, answer: str) -> None:
    assert exact_answer_reward_fn(text, answer) in (0.0, 1.0)
