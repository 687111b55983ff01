"""JSON schemas that sampling can be constrained to.

jsonschema judges whether a schema is one. xgrammar, which makes a grammar of it, silently ignores
what it cannot express: a schema that says more than a grammar is refused here, so that what is
sampled always validates. Measured on xgrammar 0.2.8.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NoReturn

from agentrl_cli.engine.grammar import require_jsonschema

#: The same as vLLM's.
MAX_NESTING = 64
#: xgrammar's masks for a pattern that repeats a part more often allow tokens that it then refuses.
_MAX_REPEATS = 128
#: xgrammar ignores a ``multipleOf`` above it.
_MAX_FACTOR = 1024
#: One character of a string with bounds, which are written as a pattern: into a string with
#: ``minLength`` or ``maxLength`` xgrammar lets control characters through. Not those that JSON
#: writes with a backslash (as an alternative they make a mask ten times as slow), and not the
#: halves of surrogate pairs, whose bytes a decoder takes for three characters each.
_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
#: Where a schema holds further schemas: directly, in lists, and by name.
_PARTS = ("items", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ALL = (*_PARTS, *_LISTS, *_MAPS)
#: Keywords that only say something about values of one type.
_TYPED = (
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
)
#: What xgrammar ignores beside a keyword. Of the first, it reads one and nothing beside it.
_IGNORED_BESIDE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("$ref", "anyOf", "oneOf", "allOf"), ("const", "enum", "type", *_TYPED)),
    **dict.fromkeys(("const", "enum"), ("$ref", "anyOf", "oneOf", "allOf", *_TYPED)),
    "pattern": ("format", "minLength", "maxLength"),
    "format": ("minLength", "maxLength"),
    "multipleOf": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "patternProperties": ("properties", "propertyNames", "additionalProperties"),
    "propertyNames": ("properties",),
    # Names that come twice would count twice.
    "minProperties": ("additionalProperties",),
}
#: What xgrammar always ignores.
_IGNORED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "additionalItems"),
    *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
)
#: Values that ask for nothing, or for what xgrammar does in any case.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("patternProperties", "properties"), ({},)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "uniqueItems"), (False,)),
    "additionalProperties": (False,),
    "propertyNames": (True,),
    "minProperties": (0, 1),
}
#: Formats that xgrammar writes; every other one is a remark, as the standard has it.
_FORMATS = (
    *("date", "date-time", "time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
#: What JSON writes with a backslash, and xgrammar, in a pattern, without.
_UNSAFE_PATTERN = re.compile(
    r'["\x00-\x1f]|\\[\\nrtfv0c]|\\x([01]|22|5[cC])|\\u\{?0*([01]?[0-9a-fA-F]\b|22|5[cC])'
)
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")


class SchemaError(Exception):
    """A schema that sampling cannot be constrained to.

    Attributes:
        is_unsupported: True: the schema is sound, but says more than a grammar can.
    """

    def __init__(self, at: str, problem: str, *, is_unsupported: bool = False) -> None:
        super().__init__(f"at {at}: {problem}")
        self.is_unsupported = is_unsupported


def prepare_schema(schema: Any) -> Any:
    """The schema as xgrammar gets it, if there is nothing in it that xgrammar gets wrong.

    Raises:
        SchemaError: names the place in the schema.
        MissingExtraError: jsonschema is not installed.
    """
    level = [schema]
    for _ in range(MAX_NESTING):
        nodes = (list(one.values()) if isinstance(one, dict) else one for one in level)
        level = [part for node in nodes for part in node if isinstance(part, dict | list)]
        if not level:
            return _prepare(json.dumps(schema))
    raise SchemaError("#", f"objects and lists are nested deeper than {MAX_NESTING} levels")


@functools.lru_cache(maxsize=1024)
def _prepare(text: str) -> Any:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise SchemaError("#", f"a schema is a JSON object, found {text:.60}")
    if "\\u0000" in text:
        # xgrammar has crashed on it.
        raise SchemaError("#", "a text in it holds a NUL character")
    jsonschema = require_jsonschema()
    try:
        # Patterns are xgrammar's to judge.
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=None)
    except jsonschema.SchemaError as error:
        at = "/".join(["#", *map(str, error.absolute_path)])
        causes = [cause.message for cause in error.context or [error]]
        raise SchemaError(at, "; or ".join(causes)) from None
    return _prepare_part(schema, "#", schema)


def _prepare_part(schema: Any, at: str, root: dict[str, Any]) -> Any:
    """A copy of a schema in ``root``, bounds of length written as patterns, once it is checked."""
    if isinstance(schema, bool):
        return schema
    _check_keywords(schema, at)
    _check_values(schema, at)
    _check_choices(schema, at, root)
    copy = dict(schema)
    for key in _PARTS:
        if key in schema:
            is_name = key == "propertyNames" and isinstance(schema[key], dict)
            part = {"type": "string", **schema[key]} if is_name else schema[key]
            copy[key] = _prepare_part(part, f"{at}/{key}", root)
    for key in _LISTS:
        if key in schema:
            parts = enumerate(schema[key])
            copy[key] = [_prepare_part(part, f"{at}/{key}/{i}", root) for i, part in parts]
    for key in _MAPS:
        if key in schema:
            named = schema[key].items()
            copy[key] = {name: _prepare_part(p, f"{at}/{key}/{name}", root) for name, p in named}
    bounds = [copy[key] for key in ("minLength", "maxLength") if key in copy]
    if bounds and max(bounds) <= _MAX_REPEATS:
        least, most = copy.pop("minLength", 0), copy.pop("maxLength", "")
        copy["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    return copy


def _check_keywords(schema: dict[str, Any], at: str) -> None:
    asked = [key for key in schema if schema[key] not in _NEUTRAL.get(key, ())]
    if "format" in asked and schema["format"] not in _FORMATS:
        asked.remove("format")
    for keyword in asked:
        if keyword in _IGNORED:
            _refuse(at, f"{keyword!r} cannot be expressed; leave it out")
        ignored = set(_IGNORED_BESIDE.get(keyword, ())).intersection(asked) - {keyword}
        if ignored:
            _refuse(at, f"{min(ignored)!r} beside {keyword!r} cannot be expressed")
        if keyword in _TYPED and keyword != "format" and "type" not in schema:
            _refuse(at, f"{keyword!r} needs a 'type' beside it")
    is_whole = "number" not in _list_types(schema) and schema.get("multipleOf", 0) <= _MAX_FACTOR
    if "multipleOf" in asked and not is_whole:
        _refuse(at, f"'multipleOf' can be expressed for integers only, and up to {_MAX_FACTOR}")
    missing = set(schema.get("required", ())).difference(schema.get("properties", ()))
    if missing and "additionalProperties" not in asked:
        raise SchemaError(at, f"'required' names {min(missing)!r}, which 'properties' lacks")
    if len(schema.get("patternProperties", ())) > 1:
        _refuse(at, "'patternProperties' can be expressed with one pattern")
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        _check_pattern(pattern, at)


def _check_pattern(pattern: str, at: str) -> None:
    counts = [int(n) for found in _REPEATS.findall(pattern) for n in found if n]
    if _LOOKAROUND.search(pattern):
        problem = "looks ahead or behind, which cannot be expressed"
    elif _UNSAFE_PATTERN.search(pattern):
        problem = "names a quote, a backslash or a control character, which cannot be expressed"
    elif max(counts, default=0) > _MAX_REPEATS:
        problem = f"repeats a part {max(counts)} times; at most {_MAX_REPEATS} can be expressed"
    else:
        return
    _refuse(at, f"the pattern {pattern!r:.60} {problem}")


def _check_values(schema: dict[str, Any], at: str) -> None:
    """Refuses values to choose from that are not of the type beside them, which is ignored."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    judge = require_jsonschema().Draft202012Validator({"type": schema.get("type", [])})
    wrong = [value for value in values if "type" in schema and not judge.is_valid(value)]
    if wrong:
        types = " or ".join(_list_types(schema))
        raise SchemaError(at, f"the value {wrong[0]!r:.60} is not of type {types}")


def _check_choices(schema: dict[str, Any], at: str, root: dict[str, Any]) -> None:
    reference = schema.get("$ref", "#")
    if reference != "#" and reference.split("/")[:2] not in (["#", key] for key in _ALL):
        _refuse(at, f"$ref {reference!r:.60} is not in this schema; allowed: #/$defs/NAME")
    if len(schema.get("allOf", ())) > 1:
        _refuse(at, "'allOf' can be expressed with one schema in it")
    parts = [_resolve(part, root) for part in schema.get("oneOf", ())]
    if not all(_exclude(a, b) for a, b in combinations(parts, 2)):
        _refuse(
            at,
            "the schemas of 'oneOf' may overlap: type 'anyOf', or give each a required property "
            "with a 'const' of its own",
        )


def _resolve(schema: Any, root: dict[str, Any]) -> Any:
    """What a schema refers to; xgrammar itself refuses what leads nowhere."""
    if not isinstance(schema, dict) or "$ref" not in schema:
        return schema
    target: Any = root
    for part in schema["$ref"].split("/")[1:]:
        target = target.get(part) if isinstance(target, dict) else None
    return target


def _exclude(a: Any, b: Any) -> bool:
    """Whether no value fits both schemas, as far as types and constants of properties show."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    kinds = [{repr(v) for v in s.get("enum", [s["const"]] if "const" in s else ())} for s in (a, b)]
    if not all(kinds):
        # An integer is a number.
        kinds = [{t.replace("integer", "number") for t in _list_types(s)} for s in (a, b)]
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        return True
    shared = set(a.get("required", ())).intersection(b.get("required", ()))
    of_a, of_b = a.get("properties", {}), b.get("properties", {})
    return kinds == [{"object"}] * 2 and any(_exclude(of_a.get(n), of_b.get(n)) for n in shared)


def _list_types(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _refuse(at: str, problem: str) -> NoReturn:
    raise SchemaError(at, problem, is_unsupported=True)
