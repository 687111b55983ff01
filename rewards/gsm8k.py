"""The reward of grade-school mathematics: is the final number the right one?"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[-−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
#: In running text commas belong to a number only between groups of three digits, and a
#: minus only where nothing stands before it that could be subtracted from.
_SIGN = r"(?:(?<![0-9A-Za-z)\]])[-−])?\$?"
_NUMBER_IN_TEXT = re.compile(
    rf"{_SIGN}(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|{_SIGN}\.[0-9]+"
)
#: A boxed number may have a name before it and a unit after it, and nothing to calculate.
_BOXED_NUMBER = re.compile(rf"[^0-9.\\/^*+\-−]*({_NUMBER.pattern})[^0-9\\/^*+=\-−]*")
_BRACE = re.compile(r"\\boxed\{|[{}]")


def gsm8k_reward_fn(completions: Any, answer: Any, **kwargs: Any) -> float:
    """1.0 when the completion's final number equals the answer's as exact decimals, else 0.0.

    The final number is the one after the last ``####``, else the content of the last
    ``\\boxed{}``, else the last number in the text. ``$``, ``,``, ``%``, spaces and a final
    dot do not count. Never raises, whatever the texts.
    """
    del kwargs
    found, wanted = extract_number(_as_text(completions)), extract_number(_as_text(answer))
    return float(found is not None and found == wanted)


def extract_number(text: str) -> Decimal | None:
    """The final number of a solution; None: there is none."""
    _, marker, tail = text.rpartition("####")
    if marker:
        found = _NUMBER.search(_clean(tail.strip().partition("\n")[0]))
        if found:
            return _to_decimal(found.group())
    content = _find_last_boxed(text)
    if content is not None and re.search("[0-9]", content):
        found = _BOXED_NUMBER.fullmatch(_clean(content))
        return _to_decimal(found.group(1)) if found else None
    numbers = _NUMBER_IN_TEXT.findall(text)
    return _to_decimal(_clean(numbers[-1])) if numbers else None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _clean(text: str) -> str:
    """The text without what does not count in a number."""
    text = re.sub(r"\\text\{[^{}]*\}|\\[!,;: ]|\\(?=[$%])|[{}$,%\s]", "", text)
    return text.removesuffix(".")


def _find_last_boxed(text: str) -> str | None:
    """What stands between the braces of the last complete ``\\boxed{...}``."""
    open_braces: list[tuple[bool, int]] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            open_braces.append((brace.group() != "{", brace.end()))
        elif open_braces:
            is_boxed, start = open_braces.pop()
            if is_boxed and (last is None or start > last[0]):
                last = (start, brace.start())
    return text[last[0] : last[1]] if last else None


def _to_decimal(text: str) -> Decimal:
    return Decimal(text.replace("−", "-"))
