"""Python's literals and calls of literals, as text: read, never run."""

from __future__ import annotations

import ast
import warnings
from typing import Any

#: What reading text that is no Python may raise.
_FAILURES = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)

_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


def read_literal(text: str) -> Any:
    """The data that a literal stands for; None where there is none."""
    tree = _parse(text.strip())
    try:
        return None if tree is None else _evaluate(tree)
    except _FAILURES:
        return None


def read_python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and keyword arguments of the calls in a list such as ``[f(a=1), g(b="x")]``.

    None: it is no such list, or an argument has no name or is no literal.
    """
    tree = _parse(text.strip())
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    try:
        return [_read_call(node) for node in tree.elts]
    except _FAILURES:
        return None


def _parse(text: str) -> ast.expr | None:
    try:
        # Models write backslashes into strings that Python warns of.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode="eval").body
    except _FAILURES:
        return None


def _read_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments alone")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _evaluate(keyword.value)
    return _read_name(node.func), arguments


def _read_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_read_name(node.value)}.{node.attr}"
    raise ValueError("no name")


def _evaluate(node: ast.expr) -> Any:
    """A literal's data; JSON's ``true``, ``false`` and ``null`` count as literals."""
    if isinstance(node, ast.Name):
        if node.id not in _JSON_CONSTANTS:
            raise ValueError("a name is no literal")
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_evaluate_key(key): _evaluate(value) for key, value in pairs}
    return ast.literal_eval(node)


def _evaluate_key(node: ast.expr | None) -> Any:
    if node is None:
        raise ValueError("a dictionary is unpacked")
    return ast.literal_eval(node)
