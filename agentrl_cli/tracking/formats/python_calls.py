"""The reader of calls that are written as Python: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import functools
import itertools
import keyword
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.tracking.formats.call_scanner import (
    CallReader,
    Cursor,
    Reading,
    Unfinished,
    Unreadable,
    build_call,
)

_STRINGS = r""""{3}(?:[^\\]|\\.)*?"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"{3}|'{3}"""
_SHORT_STRINGS = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'|["']"""
_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
#: Strings that do not end.
_OPEN_STRINGS = frozenset(("'", '"', "'''", '"""'))


#: What a list of calls begins with, as far as the text goes.
_LIST_BEGIN = re.compile(r"\s*(?:\[\s*(?:[^\W\d][\w.]*\s*(?:\(|\Z)|\Z)|\Z)")
_QUOTES = re.compile("[\"']")
#: So many marks that may end calls are tried.
_MAX_ENDS = 32


@dataclass(slots=True, kw_only=True)
class PythonCalls(CallReader):
    """A list of calls, between two marks or, where there are none, at a reply's beginning."""

    start: str
    """The mark before it; empty: the list's own bracket."""
    end: str
    """The mark after it."""
    is_listed: bool
    """False: the calls stand on lines of their own, without brackets."""
    starts: tuple[str, ...]
    closers: tuple[str, ...]
    first_starts: tuple[str, ...]

    def read_calls(self, cursor: Cursor) -> Reading:
        """The calls that the text begins with."""
        text = cursor.text
        begin = len(self.start) if text.startswith(self.start) else 0
        if self.is_listed and _LIST_BEGIN.match(text, begin) is None:
            raise Unreadable
        span = self._find_span(text, begin, cursor.at_end)
        if span is not None:
            end, length = span
            if calls := self._build(text[begin:end]):
                return Reading(length, calls)
            if not _QUOTES.search(text, begin, end):
                raise Unreadable
        # Where a quote in a string is not escaped, only the whole text tells the string's end.
        if not cursor.at_end:
            raise Unfinished
        for end, length in itertools.islice(self._list_last_spans(text, begin), _MAX_ENDS):
            if calls := self._build(text[begin:end]):
                return Reading(length, calls)
        raise Unfinished

    def _find_span(self, text: str, begin: int, at_end: bool) -> tuple[int, int] | None:
        """Where the calls end, and what belongs to them, if all quotes mean strings; None: they
        have no end yet."""
        if self.is_listed:
            end = _find_end(text, begin, self.start)
            return None if end is None else (end, end)
        mark = _find_mark(text, begin, (self.start, self.end))
        if mark is None:
            return (len(text), len(text)) if at_end else None
        if mark.group() == self.start:
            raise Unreadable
        return mark.span()

    def _list_last_spans(self, text: str, begin: int) -> Iterator[tuple[int, int]]:
        """Where the calls may end by the marks alone, or with the text."""
        end = re.escape(self.end)
        last = rf"(\])\s*(?:{end}|$)" if self.is_listed else f"(){end}"
        for found in re.compile(last).finditer(text, begin):
            yield found.end(1), found.end(1) if self.is_listed else found.end()

    def _build(self, text: str) -> list[dict[str, Any]]:
        """The calls of a list, or of lines; empty: it is none."""
        marks = tuple(filter(None, (self.start, self.end)))
        read = read_python_calls(text if self.is_listed else f"[{text}]", marks)
        calls = [build_call(name, arguments) for name, arguments in read or ()]
        built = [call for call in calls if call is not None]
        return built if len(built) == len(calls) else []


def _find_end(text: str, begin: int, start: str) -> int | None:
    """Where the list ends: with its bracket, or where the mark of another one stands; None: it
    has no end yet."""
    depth = 0
    for part in _list_parts(text, begin, (start,) if start else ()):
        if part.group() == start:
            return part.start()
        depth += 1 if part.group() in "([{" else -1
        if depth == 0:
            return part.end()
    return None


def _find_mark(text: str, begin: int, marks: tuple[str, ...]) -> re.Match[str] | None:
    """The first of ``marks`` outside of strings."""
    return next((p for p in _list_parts(text, begin, marks) if p.group() in marks), None)


def _list_parts(text: str, begin: int, marks: tuple[str, ...]) -> Iterator[re.Match[str]]:
    """Marks and brackets outside of strings, up to a string that does not end."""
    for part in _compile_parts(marks).finditer(text, begin):
        found = part.group()
        if found in _OPEN_STRINGS:
            return
        if found[0] not in "'\"":
            yield part


@functools.cache
def _compile_parts(marks: tuple[str, ...]) -> re.Pattern[str]:
    escaped = [re.escape(mark) for mark in marks]
    return re.compile("|".join((*escaped, _STRINGS, _SHORT_STRINGS, r"[][(){}]")), re.DOTALL)


#: What reading text that is no Python may raise.
_FAILURES = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)

_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


class _JsonLiterals(ast.NodeTransformer):
    """JSON's constants count as literals, and tuples as lists."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.List([self.visit(element) for element in node.elts])


def read_literal(text: str) -> Any:
    """The data that a literal stands for; None where there is none."""
    try:
        return _evaluate(_parse(text))
    except _FAILURES:
        return None


def read_python_calls(
    text: str, marks: Sequence[str] = ()
) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and keyword arguments of the calls in a list such as ``[f(a=1), g(b="x")]``.

    None: it is no such list, or an argument has no name or is no literal.

    Args:
        text: the list.
        marks: texts that stand around lists.
    """
    try:
        try:
            tree = _parse(text)
        except (SyntaxError, ValueError):
            tree = _parse(_mend(text, marks))
        return [_read_call(node) for node in tree.elts] if isinstance(tree, ast.List) else None
    except _FAILURES:
        return None


def _parse(text: str) -> ast.expr:
    # Models write backslashes into strings that Python warns of.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text.strip(), mode="eval").body


def _read_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    names = [part.arg for part in node.keywords] if isinstance(node, ast.Call) else [None]
    if not isinstance(node, ast.Call) or node.args or None in names:
        raise ValueError("no call with named arguments alone")
    arguments = {
        part.arg.removesuffix(_RESERVED): _evaluate(part.value)
        for part in node.keywords
        if part.arg is not None
    }
    if _NAME.fullmatch(name := ast.unparse(node.func)) is None:
        raise ValueError("no name")
    return name, arguments


def _evaluate(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonLiterals().visit(node))


#: Marks a parameter that is named as one of Python's keywords.
_RESERVED = "_is_reserved"
_KEYWORDS = "|".join(keyword.kwlist)
_IDENTIFIER = r"[^\W\d]\w*"
_MENDED = re.compile(
    rf"""{_STRINGS}|["']|[][(){{}}]|\b(?P<name>{_KEYWORDS})(?=\s*=[^=])"""
    r"|(?<![\w.])0+(?=\d)|(?<=\))[^\S\n]*\n\s*(?=[^\W\d])",
    re.DOTALL,
)
#: What follows a string, by the bracket that it stands in.
_FOLLOWERS = {
    "(": rf"\s*(?:,\s*{_IDENTIFIER}\s*=|,?\s*\)\s*(?:[],]|$|{_IDENTIFIER}[.\w]*\())",
    "[": r"\s*[],]",
    "{": r"\s*[:,}]",
}
_NEXT_ARGUMENT = re.compile(rf"\s*{_IDENTIFIER}\s*=")
_CLOSINGS = {
    (quote, bracket): re.compile(rf"\\.|{quote}(?={follower})", re.DOTALL)
    for quote in "\"'"
    for bracket, follower in _FOLLOWERS.items()
}
#: Escapes that are none, others, and what has to be escaped.
_IN_STRING = re.compile(
    r"(?P<broken>\\(?:U(?![\da-fA-F]{8})|u(?![\da-fA-F]{4})|x(?![\da-fA-F]{2})|N(?!\{)))"
    r"|\\.|[\"'\n\r\0]",
    re.DOTALL,
)
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}


def _mend(text: str, marks: Sequence[str]) -> str:
    """A list of calls as Python, where a model wrote strings as they are: with line breaks, quotes
    and backslashes that are not escaped; or wrote numbers as ``07``, or parameters such as
    ``from``. Calls on lines of their own get commas between them.

    A quote ends a string only where what follows it can follow a string. Other quotes in it must be
    escaped if the string may be two, with one of ``marks`` or another argument between them.

    Raises:
        ValueError: a string has no certain end.
    """
    parts, at, brackets = list[str](), 0, [""]
    while (found := _MENDED.search(text, at)) is not None:
        parts.append(text[at : found.start()])
        token, at = found.group(), found.end()
        if token in _OPEN_STRINGS:
            closing = _CLOSINGS.get((token, brackets[-1]))
            ends = closing.finditer(text, at) if closing is not None else ()
            end = next((e.start() for e in ends if e.group() == token), None)
            string = text[at:end]
            quotes = [p.end() for p in _IN_STRING.finditer(string) if p.group() == token]
            joins = any(mark in string for mark in marks) or any(
                _NEXT_ARGUMENT.match(string, quote) for quote in quotes
            )
            if end is None or (quotes and joins):
                raise ValueError("a string has no certain end")
            parts += [token, _IN_STRING.sub(functools.partial(_escape, token), string), token]
            at = end + 1
            continue
        if token in "([{":
            brackets.append(token)
        elif token in ")]}" and len(brackets) > 1:
            brackets.pop()
        if found["name"]:
            token += _RESERVED
        elif token.startswith("0"):
            token = ""
        elif token.isspace():
            token = ","
        parts.append(token)
    return "".join([*parts, text[at:]])


def _escape(quote: str, found: re.Match[str]) -> str:
    token = found.group()
    if token in ("'", '"'):
        return f"\\{token}" if token == quote else token
    if token.startswith("\\"):
        return f"\\{token}" if found["broken"] else token
    return _ESCAPES[token]
