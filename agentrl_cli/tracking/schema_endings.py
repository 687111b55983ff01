"""Whether a JSON schema has a value that ends: one that refers to itself may have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def find_ending(definitions: Mapping[str, Any]) -> set[str]:
    """Pointers of the definitions that have a value which ends."""
    ending: set[str] = set()
    while True:
        found = {
            pointer
            for pointer, schema in definitions.items()
            if pointer not in ending and has_end(schema, ending)
        }
        if not found:
            return ending
        ending |= found


def has_end(schema: Any, ending: set[str]) -> bool:
    """Whether a checked schema has a value that ends, if those in ``ending`` have."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"] in ending
    for head in ("anyOf", "oneOf", "allOf"):
        if head in schema and "const" not in schema and "enum" not in schema:
            return any(has_end(part, ending) for part in schema[head])
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    if any(kind not in ("object", "array") for kind in listed):
        return True
    return any(
        _has_object_end(schema, ending) if kind == "object" else _has_array_end(schema, ending)
        for kind in listed
    )


def _has_object_end(schema: dict[str, Any], ending: set[str]) -> bool:
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    others = schema.get("additionalProperties", True)
    if not all(has_end(properties.get(name, others), ending) for name in required):
        return False
    optional = [part for name, part in properties.items() if name not in required]
    num_more = schema.get("minProperties", 0) - len(required)
    patterns = list(schema.get("patternProperties", {}).values())
    if num_more <= 0 or any(has_end(part, ending) for part in patterns or [others]):
        return True
    return sum(has_end(part, ending) for part in optional) >= num_more


def _has_array_end(schema: dict[str, Any], ending: set[str]) -> bool:
    min_items = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])
    if not all(has_end(part, ending) for part in prefix[:min_items]):
        return False
    return min_items <= len(prefix) or has_end(schema.get("items", True), ending)
