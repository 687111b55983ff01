from __future__ import annotations

import random
import re

import pytest

from agentrl_cli.errors import DatasetError
from agentrl_cli.models.calculator_tasks import build_rows, draw_question
from builders.calculator_agent import calculate


def pairs(split: str) -> set[tuple[int, ...]]:
    return {tuple(sorted(map(int, re.findall(r"\d+", r["question"])))) for r in build_rows(split)}


def test_rows_are_distinct_and_the_same_every_time() -> None:
    rows = build_rows("train")
    assert rows == build_rows("train") == build_rows()
    assert len({row["question"] for row in rows}) == len(rows) == 4096
    assert len(build_rows("test")) == 512
    assert all(set(row) == {"question", "answer"} for row in rows)


def test_held_out_pairs_of_numbers_never_occur_in_training() -> None:
    assert pairs("train").isdisjoint(pairs("test"))


def test_the_expression_solves_the_question() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        question = draw_question(rng, "train")
        assert calculate(question.expression) == str(question.answer)
        assert question.answer > 0
        assert re.split(r"[-+*]", question.expression) == re.findall(r"\d+", question.text)
        assert list(question.numbers) == re.findall(r"\d+", question.text)


def test_unknown_split() -> None:
    with pytest.raises(DatasetError, match=r"'tests'.*did you mean 'test'"):
        build_rows("tests")
