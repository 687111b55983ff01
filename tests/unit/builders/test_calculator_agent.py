from __future__ import annotations

import pytest

from builders.calculator_agent import calculate


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("47+38", "85"),
        (" 9 * 45 ", "405"),
        ("92-15", "77"),
        ("10/4", "2.5"),
        ("8/2", "4"),
        ("(3+4)*-2", "-14"),
        ("7//2", "3"),
        ("2**10", "1024"),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "47+",
        "1/0",
        "9**9**9",
        "2**1000",
        "(-1)**0.5",
        "1" * 300,
        "(" * 150 + "1" + ")" * 150,
        "True+1",
        "'a'*3",
        "1j",
        "x",
        "__import__('os').getcwd()",
        "[1][0]",
        "1e400",
        "1\x00",
    ],
)
def test_what_is_not_arithmetic_comes_back_as_text(expression: str) -> None:
    assert calculate(expression).startswith("error: ")
