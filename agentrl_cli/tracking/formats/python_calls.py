"""The reader of calls that are written as Python: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator
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
    only_first: bool

    def read_calls(self, cursor: Cursor) -> Reading:
        """The calls that the text begins with."""
        text, begin = cursor.text, len(self.start)
        if not self.is_listed:
            return self._read_lines(cursor, begin)
        listed = text[begin:].lstrip()
        inside = listed[1:].lstrip()
        if listed[:1] not in ("", "[") or (
            inside and not (inside[0].isalpha() or inside[0] == "_")
        ):
            raise Unreadable
        end = _find_end(text, begin, self.start)
        if end is None:
            raise Unfinished
        return _build(text[begin:end], end)

    def _read_lines(self, cursor: Cursor, begin: int) -> Reading:
        text = cursor.text
        mark = _find_mark(text, begin, (self.start, self.end))
        if mark is None and not cursor.at_end:
            raise Unfinished
        if mark is not None and mark.group() == self.start:
            raise Unreadable
        end, length = mark.span() if mark is not None else (len(text), len(text))
        lines = [line for line in text[begin:end].splitlines() if line.strip()]
        return _build(f"[{','.join(lines)}]", length)


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


def _build(text: str, length: int) -> Reading:
    calls = [build_call(name, arguments) for name, arguments in read_python_calls(text) or ()]
    built = [call for call in calls if call is not None]
    if not built or len(built) != len(calls):
        raise Unreadable
    return Reading(length, built)


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


def read_python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and keyword arguments of the calls in a list such as ``[f(a=1), g(b="x")]``.

    None: it is no such list, or an argument has no name or is no literal.
    """
    try:
        tree = _parse(text)
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
    arguments = {part.arg: _evaluate(part.value) for part in node.keywords if part.arg is not None}
    if _NAME.fullmatch(name := ast.unparse(node.func)) is None:
        raise ValueError("no name")
    return name, arguments


def _evaluate(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonLiterals().visit(node))
