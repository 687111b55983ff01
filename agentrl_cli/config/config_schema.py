"""The base of all configuration classes, and what can be read from them."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from agentrl_cli.errors import format_nearest

_T = TypeVar("_T")

_RESUME_SAFE = "resume-safe"
#: The type of a key that may differ when a run is resumed: it decides where processes run, how
#: fast, how long or what is kept, not what is learned. For a section it holds for all its keys.
ResumeSafe = Annotated[_T, _RESUME_SAFE]

#: The largest numbers that clocks, schedulers and generators take, by name; the first name counts.
_LARGEST: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r".*_seconds"), 1_000_000),
    (re.compile(r"num_(threads|workers|processes|servers)|reward_workers"), 1024),
    (re.compile(r"seed"), 2**63 - 1),
    (re.compile(r".*"), 2**32 - 1),
)
_LOCAL_PATH = re.compile(r"path|.*_path|(?!output_dir).*dir|chat_template")
#: What URLs of object storage begin with: S3, Google Cloud Storage and Azure.
STORAGE_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")


class StrictConfig(BaseModel):
    """Frozen, no unknown keys, no silent conversions; attribute docstrings are the reference."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    @field_validator("*")
    @classmethod
    def _is_within_reach(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if isinstance(value, int | float):
            largest = next(limit for pattern, limit in _LARGEST if pattern.fullmatch(name))
            # A learning rate may be anything; the numbers that a machine counts with may not.
            if value > largest and (isinstance(value, int) or name.endswith("_seconds")):
                raise ValueError(f"{value} is too large. Allowed: up to {largest:,}")
        elif isinstance(value, str) and _LOCAL_PATH.fullmatch(name):
            check_local_path(value)
        return value


def check_local_path(path: str) -> None:
    """Refuses what is neither a path of this machine nor a name.

    Raises:
        ValueError: says what to type instead.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)://", path)
    if scheme or re.match(r"[A-Za-z]:[\\/]", path):
        kind = "an address" if scheme else "a Windows path"
        raise ValueError(
            f"{path!r} is {kind}, and this key takes names and paths of this machine. Copy it to "
            "a folder here (under WSL, C:\\ is /mnt/c/), and type that folder's path"
        )
    if "\0" in path:
        raise ValueError(f"{path!r} holds a NUL character, which no path may have. Remove it")


def check_storage_location(location: str) -> str:
    """Refuses what is neither a path of this machine nor a URL of object storage.

    Raises:
        ValueError: says what to type instead.
    """
    scheme, separator, _ = location.partition("://")
    if not separator:
        check_local_path(location)
    elif scheme not in STORAGE_SCHEMES:
        raise ValueError(
            f"{location!r}: object storage of the scheme {scheme!r} is unknown; "
            f"{format_nearest(scheme, STORAGE_SCHEMES)}. Type s3://BUCKET/FOLDER, or a folder of "
            "this machine"
        )
    return location


def is_resume_safe(config_class: type[BaseModel], key_path: Sequence[str]) -> bool:
    """True where the key, or a section that it is in, may differ when a run is resumed."""
    section: type[BaseModel] | None = config_class
    for part in key_path:
        field = section.model_fields.get(part) if section is not None else None
        if field is None:
            return False
        if _RESUME_SAFE in field.metadata:
            return True
        section = find_config_class(field.annotation)
    return False


def allowed_keys(config_class: type[BaseModel], key_path: Sequence[str | int]) -> list[str]:
    """The keys allowed in the section at ``key_path``; where a section is one of several kinds,
    the kind may follow it in the path."""
    section = find_config_class(functools.reduce(_find_annotation, key_path, config_class))
    return list(section.model_fields) if section is not None else []


def is_list(config_class: type[BaseModel], key_path: Sequence[str | int]) -> bool:
    """True where the value at ``key_path`` may be a list."""
    annotation = functools.reduce(_find_annotation, key_path, config_class)
    kinds = (annotation, *typing.get_args(annotation))
    return any(typing.get_origin(kind) is tuple for kind in kinds)


def _find_annotation(annotation: Any, part: str | int) -> Any:
    """The annotation of what is under ``part`` of a value with this annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return field.annotation if field else None
    kinds = find_config_kinds(annotation)
    if part in kinds:
        return kinds[str(part)]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (dict, tuple):
        return next((a for a in arguments if find_config_class(a) is not None), None)
    inner = (_find_annotation(a, part) for a in arguments)
    return next((a for a in inner if a is not None), None)


def find_config_class(annotation: Any) -> type[BaseModel] | None:
    """The configuration class inside an annotation such as ``tuple[X, ...]`` or ``X | None``."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    found = map(find_config_class, typing.get_args(annotation))
    return next((section for section in found if section is not None), None)


def find_config_kinds(annotation: Any) -> dict[str, type[BaseModel]]:
    """The classes of a section that is one of several kinds, by kind; of another one: none."""
    classes = [
        a for a in typing.get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)
    ]
    if len(classes) < 2:
        return {}
    # The tag of each has one value.
    return {typing.get_args(a.model_fields["kind"].annotation)[0]: a for a in classes}
