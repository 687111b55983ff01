"""YAML files and KEY=VALUE overrides to validated configuration, with line-numbered errors."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from agentrl_cli.config.config_schema import allowed_keys, is_list
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.key_names import describe_foreign_key
from agentrl_cli.errors import ConfigError, format_nearest
from agentrl_cli.secret_masking import hide_secrets, mask_secrets

ConfigT = TypeVar("ConfigT", bound=BaseModel)
KeyPath = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping (key: value lines)",
    "model_type": "a mapping (key: value lines)",
    "model_attributes_type": "a mapping (key: value lines)",
    "tuple_type": "a list",
}

#: Of a file, with aliases written out: more are a mistake, or made to fill the memory.
_MAX_KEYS = 100_000

#: What YAML makes of a plain word that is no text.
_SCALARS = (bool, int, float, datetime.date)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-6`` is a number, as in YAML 1.2 and in Python."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The configuration in ``path`` with ``KEY=VALUE`` overrides applied.

    Raises:
        ConfigError: the file, a key or a value cannot be used; lists every problem at once.
    """
    return load_config_as(ExperimentConfig, path, overrides)


def load_config_as(
    config_class: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()
) -> ConfigT:
    """As :func:`load_config`, for any configuration class."""
    path = Path(path)
    data, lines = _read_yaml(path)
    overridden: dict[KeyPath, str] = {}
    for text in overrides:
        parts, value = _parse_override(text)
        overridden[_set_key(config_class, data, parts, value, text)] = text
    hide_secrets(data)
    try:
        config_class.model_validate(data)
    except ValidationError as error:
        for item in error.errors():
            typed = overridden.get(item["loc"], "")
            is_text = item["type"] == "string_type" and isinstance(item["input"], _SCALARS)
            if typed and is_text:
                # trial_name=007 is a name: a key of text gets the text that was typed.
                parts, value = [*map(str, item["loc"])], typed.partition("=")[2].strip()
                _set_key(config_class, data, parts, value, typed)
    try:
        return config_class.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            key_path = _real_path(data, item["loc"])
            if item["type"] == "union_tag_invalid":
                key_path = (*key_path, "kind")
            where = _locate(path, lines, overridden, key_path)
            problems.append(f"  {where}: {_describe(config_class, key_path, item)}")
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        # The one command that has --dry-run reads this class.
        check = f" Check with: agentrl train --config {path} --dry-run"
        raise ConfigError(
            f"{path} has {count}:\n"
            + "\n".join(problems)
            + "\nNothing was started."
            + (check if config_class is ExperimentConfig else "")
        ) from None


def dump_config(config: BaseModel) -> str:
    """The resolved configuration as YAML, every default written out and secrets masked."""
    return yaml.safe_dump(
        mask_secrets(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True
    )


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The file's data, and the line (from 1) of every key in it."""
    if not path.is_file():
        problem = "no such file"
        if path.exists():
            problem = f"is a {'folder' if path.is_dir() else 'pipe or device'}, not a file"
        raise ConfigError(f"{path}: {problem}; {_format_nearest_file(path)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None
    try:
        data, lines = _parse_yaml(text, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply: write it with fewer levels") from None
    except ValueError as error:
        # Of what looks like a date or a number and is none.
        raise ConfigError(
            f"{path}: a value cannot be read: {error}. Put it in quotes if it is text"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}:1: a configuration is a mapping (key: value lines), "
            f"this file holds {_show(data)}"
        )
    return data, lines


def _parse_yaml(text: str, path: Path) -> tuple[Any, dict[KeyPath, int]]:
    """The data of a document, and the line of every key; aliases are not followed without end."""
    node = yaml.compose(text, Loader=_Loader)
    walked = _walk_lines(node, (), path) if node is not None else iter(())
    lines = dict(islice(walked, _MAX_KEYS + 1))
    if len(lines) > _MAX_KEYS:
        raise ConfigError(
            f"{path}: holds more than {_MAX_KEYS:,} keys and list entries, aliases (*name) written "
            "out. Allowed: fewer. Put rows into a file, and its path under train_dataset.path"
        )
    return yaml.load(text, Loader=_Loader), lines


def _format_nearest_file(path: Path) -> str:
    """The YAML files in or beside ``path``, and those in configs/."""
    folder = next((f for f in (path, path.parent) if f.is_dir()), Path())
    found = {str(p) for p in (*folder.glob("*.yaml"), *Path("configs").glob("*.yaml"))}
    return format_nearest(str(path), found) if found else "there is no .yaml file beside it"


def _walk_lines(
    node: yaml.Node, prefix: KeyPath, path: Path, inside: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[KeyPath, int]]:
    if node in inside:
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: {_format_path(prefix)}: this alias (*name) "
            "stands inside what it names: write the value out"
        )
    inside = (*inside, node)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value)
            if key in seen:
                raise ConfigError(
                    f"{path}:{line}: key {key!r} was given before, on line {seen[key]}: keep one"
                )
            seen[key] = line
            yield (*prefix, key), line
            yield from _walk_lines(value_node, (*prefix, key), path, inside)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*prefix, index), item.start_mark.line + 1
            yield from _walk_lines(item, (*prefix, index), path, inside)


def _parse_override(text: str) -> tuple[list[str], Any]:
    """The parts of the key, and the value."""
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r}: expected KEY=VALUE, for example gconfig.n_samples=8")
    try:
        return parts, _parse_yaml(raw, Path(f"override {key}="))[0] if raw else ""
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"override {text!r:.200}: the value is not valid YAML: "
            f"{getattr(error, 'problem', None) or error}"
        ) from None


def _set_key(
    config_class: type[BaseModel], data: dict[str, Any], parts: Sequence[str], value: Any, text: str
) -> KeyPath:
    """Sets the value in ``data``; gives the key with its list positions as numbers."""
    target: Any = data
    key_path: KeyPath = ()
    for place, part in enumerate(parts):
        key: str | int = part
        if isinstance(target, list):
            if not part.isdigit() or int(part) > len(target):
                raise ConfigError(
                    f"override {text!r}: {_format_path(key_path)} is a list and has no entry "
                    f"{part!r}; allowed: 0 to {len(target)} (the last adds one)"
                )
            key = int(part)
            if key == len(target):
                target.append(None)
        elif isinstance(target, dict):
            target.setdefault(key, None)
        else:
            raise ConfigError(
                f"override {text!r}: {_format_path(key_path)} is {_show(target)}, so it has no "
                "keys of its own"
            )
        key_path = (*key_path, key)
        if place == len(parts) - 1:
            target[key] = value
        elif target[key] is None:
            target[key] = [] if is_list(config_class, key_path) else {}
        target = target[key]
    return key_path


def _real_path(data: Any, loc: Sequence[str | int]) -> KeyPath:
    """The part of pydantic's location that is keys, without its names of union members."""
    real: list[str | int] = []
    for part in loc:
        if isinstance(data, dict):
            if part in data:
                data = data[part]
            elif part != loc[-1]:
                continue
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        real.append(part)
    return tuple(real)


def _locate(
    path: Path, lines: Mapping[KeyPath, int], overridden: Mapping[KeyPath, str], key_path: KeyPath
) -> str:
    """Where the user wrote a key: an override, or the line of it or of its nearest parent."""
    key = _format_path(key_path)
    for length in range(len(key_path), 0, -1):
        prefix = key_path[:length]
        if prefix in lines and prefix not in overridden:
            return f"{path}:{lines[prefix]}: {key}"
        for typed_path, text in overridden.items():
            if typed_path[:length] == prefix:
                return f"override {text!r}: {key}"
    return f"{path}: {key}" if key else str(path)


def _describe(config_class: type[BaseModel], key_path: KeyPath, item: Any) -> str:
    """What is wrong with one value, what is allowed, in one line."""
    kind, found = item["type"], item.get("input")
    if kind == "extra_forbidden":
        allowed = allowed_keys(config_class, item["loc"][:-1])
        known = describe_foreign_key(_format_path(key_path), found)
        return f"unknown key; {known or format_nearest(str(key_path[-1]), allowed)}"
    if kind == "missing":
        return "this key is required and was not given"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind in ("literal_error", "union_tag_invalid"):
        expected = item["ctx"].get("expected") or item["ctx"].get("expected_tags")
        chosen = item["ctx"].get("tag", found)
        names = re.findall(r"'([^']+)'", str(expected))
        return f"{chosen!r} is not one of the choices; {format_nearest(str(chosen), names)}"
    quotes = "; put it in quotes" if kind == "string_type" and isinstance(found, _SCALARS) else ""
    message = f"{item['msg'][0].lower()}{item['msg'][1:]}"
    if kind in _EXPECTED:
        message = f"expected {_EXPECTED[kind]}"
    return f"{message}, found {_show(found)}{quotes}"


def _format_path(key_path: KeyPath) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key_path)
    return "".join(parts).removeprefix(".")


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    # Which YAML reads as the same value.
    return json.dumps(value, default=str, ensure_ascii=False)
