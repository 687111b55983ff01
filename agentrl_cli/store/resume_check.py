"""The configuration saved with a run, and whether the run may be resumed with another one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl_cli.config.config_schema import is_resume_safe
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import store_errors, write_text
from agentrl_cli.store.config_secrets import mask_secrets, restore_secrets

_ABSENT = "(not set)"


def save_config(config: ExperimentConfig, run_dir: Path) -> None:
    """Writes the resolved configuration, secrets masked."""
    text = yaml.safe_dump(_dump(config), sort_keys=False, allow_unicode=True)
    write_text(run_dir / layout.CONFIG, text)


def load_saved_config(run_dir: Path, secrets: Sequence[Sequence[Any]] = ()) -> ExperimentConfig:
    """The configuration that was saved with a run, its masked secrets put back.

    Raises:
        StoreError: it is damaged.
    """
    data = restore_secrets(_read_saved(run_dir), secrets)
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as error:
        raise StoreError(f"{run_dir / layout.CONFIG}: is damaged ({error})") from None


def check_same_config(config: ExperimentConfig, run_dir: Path) -> None:
    """Refuses to resume a run that was started with other settings.

    Raises:
        RunFolderError: with every differing key and the three ways out.
    """
    changes = _find_changes(_load_saved(run_dir), _dump(config))
    if not changes:
        return
    listed = "\n".join(f"  {k}: {_show(o)} -> {_show(n)}" for k, (o, n) in changes.items())
    old_values = " ".join(f"{k}={_as_argument(o)}" for k, (o, _) in changes.items())
    raise RunFolderError(
        f"{run_dir}: this run was started with another configuration (old -> new):\n{listed}\n"
        "Nothing was started and nothing was changed. Three ways out:\n"
        f"  1. a new run beside it: add  trial_name={_free_trial(run_dir)}\n"
        f"  2. resume the old run: add its values back:  {old_values}\n"
        f"  3. start over: add  --overwrite  (deletes what is in {run_dir}"
        f"{_describe_loss(run_dir)})"
    )


def _find_changes(
    old_data: Mapping[str, Any], new_data: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Key -> old and new value, for every key that differs and must not."""
    old, new = flatten(old_data), flatten(new_data)
    changes = {}
    for key in [*new, *(k for k in old if k not in new)]:
        if is_resume_safe(ExperimentConfig, key.split(".")) or old.get(key, _ABSENT) == new.get(
            key, _ABSENT
        ):
            continue
        # A section that is null on one side is one difference, and is typed as one.
        parts = key.split(".")
        starts = (".".join(parts[: end + 1]) for end in range(len(parts)))
        whole = next(start for start in starts if start in old or start in new)
        changes[whole] = (_read(old_data, whole), _read(new_data, whole))
    return changes


def _read(data: Mapping[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _describe_loss(run_dir: Path) -> str:
    """A clause about a run that failed before it did anything."""
    folders = (run_dir / layout.TRAJECTORIES, run_dir / layout.CHECKPOINTS)
    has_results = (run_dir / layout.METRICS).is_file() or any(
        folder.is_dir() and any(folder.iterdir()) for folder in folders
    )
    return "" if has_results else ": nothing but logs: no step was finished"


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted keys; lists and empty mappings stay values."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def _dump(config: ExperimentConfig) -> dict[str, Any]:
    masked = mask_secrets(config.model_dump(mode="json"))
    assert isinstance(masked, dict)
    return masked


def _load_saved(run_dir: Path) -> dict[str, Any]:
    data = _read_saved(run_dir)
    try:
        # Keys that a later version added get their defaults.
        return _dump(ExperimentConfig.model_validate(data))
    except ValidationError:
        return data


def _read_saved(run_dir: Path) -> dict[str, Any]:
    path = run_dir / layout.CONFIG
    try:
        with store_errors(path, "read"):
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path}: is damaged ({error.__class__.__name__}): whether this run may be "
            f"resumed is unknown. Type trial_name={_free_trial(run_dir)}, or --overwrite to start "
            "over"
        ) from None
    return data if isinstance(data, dict) else {}


def _free_trial(run_dir: Path) -> str:
    taken = {p.name for p in run_dir.parent.iterdir()} if run_dir.parent.is_dir() else set()
    base = re.sub(r"\d+$", "", run_dir.name) or "t"
    number = 1
    while f"{base}{number}" in taken:
        number += 1
    return f"{base}{number}"


def _show(value: Any) -> str:
    return value if value is _ABSENT else _as_yaml(value)


def _as_argument(value: Any) -> str:
    text = "null" if value is _ABSENT else _as_yaml(value)
    return text if re.fullmatch(r"[\w./:@+\-]+", text) else "'" + text.replace("'", "'\\''") + "'"


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
