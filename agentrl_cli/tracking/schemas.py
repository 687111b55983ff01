"""JSON schemas that sampling can be held to: what a schema may say, and what nobody could obey.

xgrammar, which makes a grammar of a schema, ignores in silence what it cannot express. Here such
a schema is refused instead, so that what is sampled always validates. Measured on xgrammar 0.2.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NoReturn

from agentrl_cli.tracking.schema_endings import find_ending, has_end
from agentrl_cli.tracking.schema_lengths import MAX_REPEATS

#: The same as vLLM's.
MAX_NESTING = 64
#: A ``multipleOf`` above it xgrammar passes over.
_MAX_FACTOR = 1024
#: Keywords that speak of values of one type, and are nothing to others.
_KEYWORDS_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
}
#: In pairs.
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
#: Of these one stands alone: xgrammar reads the first it finds and nothing beside it.
_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_VALIDATORS = frozenset({"type", *_HEADS, *(k for ks in _KEYWORDS_OF_TYPE.values() for k in ks)})
#: Never expressed, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains", "minContains", "maxContains"), ()),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "additionalItems"), ()),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "uniqueItems"), (False,)),
}
#: Formats that xgrammar writes; every other one is a remark, as the standard has it.
_FORMATS = frozenset(
    {
        *("date", "date-time", "time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
#: What JSON writes with a backslash, and xgrammar, in a pattern, without.
_UNSAFE_PATTERN = re.compile(
    r'["\x00-\x1f]|\\[\\nrtfv0c]|\\x([01]|22|5[cC])|\\u\{?0*([01]?[0-9a-fA-F]\b|22|5[cC])'
)
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")
_JSON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


class SchemaError(Exception):
    """A schema that sampling cannot be held to.

    Attributes:
        is_unsupported: True: the schema is sound, but says more than can be held to.
    """

    def __init__(self, at: str, problem: str, *, is_unsupported: bool = False) -> None:
        super().__init__(f"at {at}: {problem}")
        self.is_unsupported = is_unsupported


def check_schema(schema: Any) -> None:
    """Refuses a schema that is malformed, cannot be held to, or has no value that ends.

    Raises:
        SchemaError: names the place in the schema.
    """
    if not isinstance(schema, dict):
        raise SchemaError("#", f"a schema is a JSON object, found {schema!r:.60}")
    _check_nesting(schema)
    definitions = _SchemaReader(schema).definitions
    if not has_end(schema, find_ending(definitions)):
        raise SchemaError(
            "#", "every value of this schema would be endless: a reference leads back to itself"
        )


def _check_nesting(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _list_children(node)]
        if not level:
            return
    raise SchemaError("#", f"objects and lists are nested deeper than {MAX_NESTING} levels")


def _list_children(node: Any) -> Iterator[Any]:
    children = list(node.values()) if isinstance(node, dict) else node
    for text in (*(node if isinstance(node, dict) else ()), *children):
        # xgrammar has crashed of it.
        if isinstance(text, str) and "\0" in text:
            raise SchemaError("#", f"{text!r:.60} holds a NUL character")
    yield from (child for child in children if isinstance(child, dict | list))


class _SchemaReader:
    """Reads a schema on construction, references included."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.definitions: dict[str, Any] = {"#": root}
        """What references point to, by pointer."""
        self._root = root
        self._read(root, "#")

    def _read(self, schema: Any, at: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise SchemaError(at, f"a schema is a JSON object, found {schema!r:.60}")
        for keyword, neutral in _UNSUPPORTED.items():
            if keyword in schema and schema[keyword] not in neutral:
                _refuse(at, f"{keyword!r} cannot be held to; leave it out")
        heads = [keyword for keyword in _HEADS if keyword in schema]
        if heads:
            self._read_head(schema, heads[0], at)
        else:
            self._read_types(schema, at)

    def _read_head(self, schema: dict[str, Any], head: str, at: str) -> None:
        beside = sorted(_VALIDATORS.intersection(schema) - {head})
        if head in ("const", "enum"):
            _check_values(schema, at)
            beside = [keyword for keyword in beside if keyword != "type"]
        if beside:
            _refuse(at, f"{beside[0]!r} beside {head!r} cannot be held to: {head!r} stands alone")
        if head == "$ref":
            self._follow(schema["$ref"], at)
        elif head in ("anyOf", "oneOf", "allOf"):
            self._read_list(schema, head, at)
            if head == "allOf" and len(schema[head]) > 1:
                _refuse(at, "'allOf' can be held to with one schema in it")
            if head == "oneOf" and not self._are_disjoint(schema[head]):
                _refuse(
                    at,
                    "the schemas of 'oneOf' may overlap: type 'anyOf', or give each a required "
                    "property with a 'const' of its own",
                )

    def _follow(self, reference: Any, at: str) -> None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            _refuse(at, f"$ref {reference!r:.60} is not in this schema; allowed: #/$defs/NAME")
        if reference in self.definitions:
            return
        target: Any = self._root
        for part in reference.split("/")[1:]:
            if not isinstance(target, dict) or part not in target:
                raise SchemaError(at, f"$ref {reference!r:.60} leads nowhere: there is no {part!r}")
            target = target[part]
        self.definitions[reference] = target
        self._read(target, reference)

    def _read_list(self, schema: dict[str, Any], keyword: str, at: str) -> None:
        parts = schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise SchemaError(at, f"{keyword!r} must be a list with at least one schema")
        for index, part in enumerate(parts):
            self._read(part, f"{at}/{keyword}/{index}")

    def _read_types(self, schema: dict[str, Any], at: str) -> None:
        types = _list_types(schema, at)
        if not types:
            spoken = sorted(_VALIDATORS.intersection(schema) - {"format"})
            if spoken:
                _refuse(at, f"{spoken[0]!r} needs a 'type' beside it")
            return
        for keyword in _COUNTS:
            count = schema.get(keyword, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise SchemaError(at, f"{keyword!r} must be 0 or more, found {count!r:.40}")
        for least, most in zip(_COUNTS[::2], _COUNTS[1::2], strict=True):
            if most in schema and schema[most] < schema.get(least, 0):
                raise SchemaError(at, f"{most!r} is below {least!r}")
        if "string" in types:
            _check_string(schema, at)
        if {"number", "integer"}.intersection(types) and "multipleOf" in schema:
            others = [k for k in _KEYWORDS_OF_TYPE["number"] if k in schema and k != "multipleOf"]
            if "number" in types or others:
                _refuse(at, "'multipleOf' can be held to of integers without bounds only")
            factor = schema["multipleOf"]
            if isinstance(factor, int | float) and factor > _MAX_FACTOR:
                _refuse(at, f"'multipleOf' can be held to up to {_MAX_FACTOR}, found {factor}")
        if "object" in types:
            self._read_object(schema, at)
        if "array" in types:
            self._read_array(schema, at)

    def _read_object(self, schema: dict[str, Any], at: str) -> None:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError(at, "'properties' must be an object of schemas by name")
        if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
            raise SchemaError(at, "'required' must be a list of names")
        is_open = schema.get("additionalProperties", False) is not False
        missing = [name for name in required if name not in properties]
        if missing and not is_open:
            raise SchemaError(at, f"'required' names {missing[0]!r}, which 'properties' lacks")
        if schema.get("minProperties", 0) not in (0, 1) and is_open:
            # Names that come twice would count twice.
            _refuse(at, "'minProperties' above 1 beside 'additionalProperties' cannot be held to")
        self._read_names(schema, bool(properties), is_open, at)
        for name, part in properties.items():
            self._read(part, f"{at}/properties/{name}")
        if isinstance(schema.get("additionalProperties"), dict):
            self._read(schema["additionalProperties"], f"{at}/additionalProperties")

    def _read_names(
        self, schema: dict[str, Any], has_properties: bool, is_open: bool, at: str
    ) -> None:
        """Patterns of properties' names, which stand alone."""
        patterns, names = schema.get("patternProperties", {}), schema.get("propertyNames", True)
        if not isinstance(patterns, dict):
            raise SchemaError(at, "'patternProperties' must be an object of schemas by pattern")
        if patterns and (len(patterns) > 1 or has_properties or is_open or names is not True):
            _refuse(
                at,
                "'patternProperties' can be held to with one pattern, and without 'properties', "
                "'propertyNames' and 'additionalProperties'",
            )
        if names is not True and has_properties:
            _refuse(at, "'propertyNames' beside 'properties' cannot be held to")
        if isinstance(names, dict):
            self._read({"type": "string", **names}, f"{at}/propertyNames")
        for pattern, part in patterns.items():
            _check_string({"pattern": pattern}, f"{at}/patternProperties")
            self._read(part, f"{at}/patternProperties/{pattern}")

    def _read_array(self, schema: dict[str, Any], at: str) -> None:
        if "prefixItems" in schema:
            self._read_list(schema, "prefixItems", at)
        if "items" in schema:
            self._read(schema["items"], f"{at}/items")
        elif schema.get("minItems", 0) > len(schema.get("prefixItems", [])):
            _refuse(at, "'minItems' needs 'items' beside it")

    def _are_disjoint(self, parts: list[Any]) -> bool:
        return all(_exclude(self._resolve(a), self._resolve(b)) for a, b in combinations(parts, 2))

    def _resolve(self, schema: Any) -> Any:
        for _ in self.definitions:
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.definitions[schema["$ref"]]
        return None


def _list_types(schema: dict[str, Any], at: str) -> list[str]:
    types = schema.get("type", [])
    listed = types if isinstance(types, list) else [types]
    for kind in listed:
        if not isinstance(kind, str) or kind not in _JSON_TYPES:
            allowed = ", ".join(_JSON_TYPES)
            raise SchemaError(at, f"type {kind!r:.40} is not known; allowed: {allowed}")
    return listed


def _check_values(schema: dict[str, Any], at: str) -> None:
    """That values to choose from are of the type that stands beside them."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise SchemaError(at, "'enum' must be a list with at least one value")
    types = _list_types(schema, at)
    for value in values if types else ():
        if not any(_is_of_type(value, kind) for kind in types):
            raise SchemaError(at, f"the value {value!r:.60} is not of type {' or '.join(types)}")


def _is_of_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _JSON_TYPES[kind])


def _check_string(schema: dict[str, Any], at: str) -> None:
    found = [k for k in ("pattern", "format", "minLength", "maxLength") if k in schema]
    has_format = schema.get("format") in _FORMATS
    if (has_format or "pattern" in found) and len(found) > 1 and found != ["pattern", "format"]:
        _refuse(at, f"{found[1]!r} beside {found[0]!r} cannot be held to")
    if found[:2] == ["pattern", "format"] and has_format:
        _refuse(at, "'format' beside 'pattern' cannot be held to")
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str):
        raise SchemaError(at, f"'pattern' must be text, found {pattern!r:.60}")
    if _LOOKAROUND.search(pattern):
        _refuse(at, f"the pattern {pattern!r:.60} looks ahead or behind, which cannot be held to")
    counts = [int(n) for found in _REPEATS.findall(pattern) for n in found if n]
    if max(counts, default=0) > MAX_REPEATS:
        _refuse(
            at,
            f"the pattern {pattern!r:.60} repeats a part {max(counts)} times; at most "
            f"{MAX_REPEATS} can be held to",
        )
    if _UNSAFE_PATTERN.search(pattern):
        _refuse(
            at,
            f"the pattern {pattern!r:.60} names a quote, a backslash or a control character, "
            "which cannot be held to",
        )


def _exclude(a: Any, b: Any) -> bool:
    """Whether no value fits both, as far as types and constants of properties show."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values = [_list_constants(schema) for schema in (a, b)]
    if all(values):
        return not values[0] & values[1]
    types = [_list_plain_types(schema) for schema in (a, b)]
    if all(types) and not types[0] & types[1]:
        return True
    if types != [{"object"}, {"object"}]:
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    of_a, of_b = a.get("properties", {}), b.get("properties", {})
    return any(_exclude(of_a.get(name), of_b.get(name)) for name in shared)


def _list_constants(schema: dict[str, Any]) -> set[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {repr(value) for value in values}


def _list_plain_types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema without a head allows; nothing: not known."""
    if any(head in schema for head in _HEADS):
        return set()
    types = schema.get("type", [])
    listed = set(types if isinstance(types, list) else [types])
    # An integer is a number.
    return listed | {"number"} if "integer" in listed else listed


def _refuse(at: str, problem: str) -> NoReturn:
    raise SchemaError(at, problem, is_unsupported=True)
