"""The reward of GSM8K: which number is read, and how numbers are compared."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rewards.gsm8k import extract_number, gsm8k_reward_fn


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # After the last ####, whatever else is there.
        ("#### 72", "72"),
        ("48/2 = <<48/2=24>>24\n#### 1\nno:\n#### 72", "72"),
        ("\\boxed{5}\n#### 6\nand 7", "6"),
        ("#### $1,234.50.", "1234.5"),
        ("#### 1 000 000", "1000000"),
        ("#### -3%", "-3"),
        ("#### 42 apples", "42"),
        ("####\n42", "42"),
        ("#### .5", "0.5"),
        # Else the last \boxed{}.
        ("\\boxed{3} or \\boxed{\\$4,000.}", "4000"),
        ("\\boxed{1{,}234}, so 9", "1234"),
        ("$\\boxed{x = 12\\text{ cm}}$", "12"),
        ("\\boxed{7} and \\boxed{ unclosed 8", "7"),
        ("#### none, but \\boxed{7}", "7"),
        # Else the last number.
        ("From 10 to 20 there are 10.", "10"),
        ("It costs $1,234.50.", "1234.5"),
        ("5, 6 and 7,8", "8"),
        ("10-5", "5"),
        ("it fell to -5", "-5"),
        ("it fell to −5", "-5"),
        ("100%", "100"),
    ],
)
def test_reads_the_final_number(text, number):
    assert extract_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no digits", "####", "\\boxed{}", "\\boxed{1/2}", "٣"])
def test_nothing_to_read(text):
    assert extract_number(text) is None
    assert gsm8k_reward_fn(text, "#### 1") == 0.0


def test_compares_exact_decimals():
    assert gsm8k_reward_fn("#### 72.00", "work\n#### 72") == 1.0
    assert gsm8k_reward_fn("#### 0.30", "#### .3") == 1.0
    # As floats these two are equal.
    assert gsm8k_reward_fn("#### 9007199254740993", "#### 9007199254740992") == 0.0
    assert gsm8k_reward_fn("#### 0.1000000000000000000001", "#### 0.1") == 0.0


def test_takes_other_fields_and_other_types():
    assert gsm8k_reward_fn("it is 4", 4, question="2+2", messages=[]) == 1.0
    assert gsm8k_reward_fn(None, "#### 4") == 0.0


_PIECES = st.sampled_from(
    [
        "####",
        "\\boxed{",
        "}",
        "{",
        "$",
        ",",
        "%",
        ".",
        "-",
        "−",
        " ",
        "\n",
        "1",
        "23",
        "٣",
        "²",
        "é",
    ]
)


@given(st.one_of(st.text(), st.lists(_PIECES, max_size=40).map("".join)), st.text())
@example("\\boxed{" * 20_000, "}" * 20_000)
@example("1," * 50_000, "-" * 50_000)
@example("#### " + "9" * 50_000, "$" * 50_000)
def test_never_raises_on_any_text(completions, answer):
    assert gsm8k_reward_fn(completions, answer) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_every_way_of_writing_a_number_is_read_back(number, zeros):
    decimals = "." + "0" * zeros if zeros else ""
    for text in (
        f"#### {number:,}{decimals}",
        f"so ${number}{decimals}.",
        f"\\boxed{{{number}{decimals}\\%}}",
    ):
        assert gsm8k_reward_fn(text, f"#### {number}") == 1.0, text
