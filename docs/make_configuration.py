"""Writes docs/configuration.md from the classes: ``python docs/make_configuration.py``."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl_cli.config.config_schema import (
    find_config_class,
    find_config_kinds,
    is_resume_safe,
)
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.sft_config import SftConfig

PAGE = Path(__file__).with_name("configuration.md")

_HEAD = """# Configuration

Made by `python docs/make_configuration.py` from the classes in `agentrl_cli/config/`.

A file is YAML; `KEY=VALUE` arguments after the options override any key (`gconfig.n_samples=8`,
`loggers[0].kind=wandb` as `loggers.0.kind=wandb`, also where the list is empty), and their values
are YAML too. Unknown keys and values of the wrong type are refused with the file and line.
`agentrl train --config C --dry-run` prints the resolved configuration and tries all that it
names; keys of AReaL, verl and TRL are in [coming-from.md](coming-from.md).

Keys marked ↻ may differ when a run is resumed ([checkpoints](checkpoints.md)); a marked section
stands for all its keys.

"""


def format_page() -> str:
    """The whole page."""
    sections = [
        "## agentrl train, agentrl eval\n\n" + _format_table(ExperimentConfig, ""),
        "## agentrl sft\n\n" + _format_table(SftConfig, ""),
    ]
    return _HEAD + "\n".join(sections)


def _format_table(config_class: type[BaseModel], prefix: str) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += list(_format_rows(config_class, prefix))
    return "\n".join(rows) + "\n"


def _format_rows(config_class: type[BaseModel], prefix: str) -> typing.Iterator[str]:
    for name, field in config_class.model_fields.items():
        key = f"{prefix}{name}"
        mark = " ↻" if is_resume_safe(config_class, [name]) else ""
        meaning = _format_text(field.description)
        nested = find_config_class(field.annotation)
        if nested is None:
            yield (
                f"| `{key}`{mark} | {_format_type(field.annotation)} | {_format_default(field)} "
                f"| {meaning} |"
            )
            continue
        is_list = typing.get_origin(field.annotation) is tuple
        is_map = typing.get_origin(field.annotation) is dict
        inner = f"{key}[]." if is_list else f"{key}.NAME." if is_map else f"{key}."
        kinds = find_config_kinds(field.annotation)
        about = meaning if meaning or kinds else _format_text(nested.__doc__)
        default = _format_default(field, is_section=True)
        yield f"| **`{key}`**{mark} | section | {default} | {about} |"
        if name == "eval_gconfig":
            # Its keys are gconfig's, whose values are its defaults.
            continue
        yield from _format_kinds(kinds, inner, field) if kinds else _format_rows(nested, inner)


def _format_kinds(
    kinds: dict[str, type[BaseModel]], prefix: str, field: FieldInfo
) -> typing.Iterator[str]:
    """Which kinds a section may be of, and the keys of each."""
    names = ", ".join(f"`{kind}`" for kind in kinds)
    default = field.get_default(call_default_factory=True)
    yield f"| `{prefix}kind` | {names} | `{default.kind}` |  |"
    for kind, config_class in kinds.items():
        yield f"| with `kind: {kind}` | section |  | {_format_text(config_class.__doc__)} |"
        rows = _format_rows(config_class, prefix)
        yield from (row for row in rows if not row.startswith(f"| `{prefix}kind` "))


def _format_text(docstring: str | None) -> str:
    """A docstring as a cell: a bar would end it."""
    return " ".join((docstring or "").replace("``", "`").replace("|", r"\|").split())


def _format_type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        return _format_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return ", ".join(_format_type(part) for part in typing.get_args(annotation))
    names = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    names |= {type(None): "null"}
    if annotation in names:
        return names[annotation]
    return "mapping" if typing.get_origin(annotation) is dict else "list"


def _format_default(field: FieldInfo, *, is_section: bool = False) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if is_section:
        return "null" if default is None else ""
    if default is PydanticUndefined or default is None:
        return "null"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    PAGE.write_text(format_page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
