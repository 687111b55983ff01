"""Lengths of strings as patterns, which xgrammar holds to without breaking JSON.

xgrammar 0.2.8 lets control characters into a string that has ``minLength`` or ``maxLength``, and
no JSON reader takes those.
"""

from __future__ import annotations

from typing import Any

#: One character of such a string. Not those that JSON writes with a backslash (xgrammar's own
#: bounds leave them out too; as an alternative they make a mask ten times as slow), and not the
#: halves of surrogate pairs, whose bytes a decoder takes for three characters each.
_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
#: Of a pattern that repeats more often, xgrammar's masks allow tokens that it then refuses (those
#: that end the string and go on). Its own bounds of length are right there.
MAX_REPEATS = 128
_BOUNDS = ("minLength", "maxLength")
_PARTS = ("items", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def write_lengths(schema: Any) -> Any:
    """A copy of a checked schema whose bounds of length, up to ``MAX_REPEATS``, are patterns."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in _PARTS:
        if key in copy:
            copy[key] = write_lengths(copy[key])
    for key in _LISTS:
        if isinstance(copy.get(key), list):
            copy[key] = [write_lengths(part) for part in copy[key]]
    for key in _MAPS:
        if isinstance(copy.get(key), dict):
            copy[key] = {name: write_lengths(part) for name, part in copy[key].items()}
    if "pattern" in copy or not any(bound in copy for bound in _BOUNDS):
        return copy
    if max(copy.get(bound, 0) for bound in _BOUNDS) > MAX_REPEATS:
        return copy
    least, most = copy.pop("minLength", 0), copy.pop("maxLength", "")
    return copy | {"pattern": f"^{_CHARACTER}{{{least},{most}}}$"}
