"""The configuration saved with a run: its secrets masked, and compared when the run is resumed."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl_cli.config.config_schema import is_resume_safe
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.secret_masking import hide_text, mask_secrets
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import store_errors, write_text

_ABSENT = "(not set)"


def _restore_secrets(masked: Any, secrets: Sequence[Sequence[Any]]) -> Any:
    restored = copy.deepcopy(masked)
    for *path, name, secret in secrets:
        place = restored
        for step in path:
            place = place[step]
        place[name] = secret
    return restored


def save_config(config: ExperimentConfig, run_dir: Path) -> None:
    """Writes the resolved configuration, secrets masked."""
    text = yaml.safe_dump(_dump(config), sort_keys=False, allow_unicode=True)
    write_text(run_dir / layout.CONFIG, text)


def load_saved_config(run_dir: Path, secrets: Sequence[Sequence[Any]] = ()) -> ExperimentConfig:
    """The configuration that was saved with a run, with what ``find_secrets`` found in it.

    Raises:
        StoreError: it is damaged.
    """
    data = _restore_secrets(_read_saved(run_dir), secrets)
    for *_, secret in secrets:
        hide_text(secret)
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as error:
        raise StoreError(f"{run_dir / layout.CONFIG}: is damaged ({error})") from None


def check_same_config(config: ExperimentConfig, run_dir: Path) -> None:
    """Refuses to resume a run that was started with other settings.

    Raises:
        RunFolderError: with every differing key and the three ways out.
    """
    old, new = _read_saved(run_dir), _dump(config)
    with suppress(ValidationError):
        # Keys that a later version added get their defaults; those that it dropped are listed.
        old = _dump(ExperimentConfig.model_validate(old))
    changes = dict(_find_changes(old, new))
    if not changes:
        return
    listed = "\n".join(f"  {k}: {_as_yaml(o)} -> {_as_yaml(n)}" for k, (o, n) in changes.items())
    old_values = " ".join(
        f"{key}={shlex.quote('null' if value is _ABSENT else _as_yaml(value))}"
        for key, (value, _) in changes.items()
    )
    folders = (run_dir / layout.TRAJECTORIES, run_dir / layout.CHECKPOINTS)
    has_results = (run_dir / layout.METRICS).is_file() or any(
        folder.is_dir() and any(folder.iterdir()) for folder in folders
    )
    loss = "" if has_results else ": nothing but logs: no step was finished"
    raise RunFolderError(
        f"{run_dir}: this run was started with another configuration (old -> new):\n{listed}\n"
        "Nothing was started and nothing was changed. Three ways out:\n"
        f"  1. a new run beside it: add  trial_name={_free_trial(run_dir)}\n"
        f"  2. resume the old run: add its values back:  {old_values}\n"
        f"  3. start over: add  --overwrite  (deletes what is in {run_dir}{loss})"
    )


def _find_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Key, old and new value of every difference that must not be; of a section that is there on
    one side only, the whole of it."""
    for name in [*new, *(name for name in old if name not in new)]:
        key, (before, after) = (
            (*prefix, str(name)),
            (old.get(name, _ABSENT), new.get(name, _ABSENT)),
        )
        if before == after or is_resume_safe(ExperimentConfig, key):
            continue
        if before and after and isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _find_changes(before, after, key)
        else:
            yield ".".join(key), (before, after)


def _dump(config: ExperimentConfig) -> dict[str, Any]:
    masked: dict[str, Any] = mask_secrets(config.model_dump(mode="json"))
    return masked


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
    base, number = run_dir.name.rstrip("0123456789") or "t", 1
    while (run_dir.parent / f"{base}{number}").exists():
        number += 1
    return f"{base}{number}"


def _as_yaml(value: Any) -> str:
    if value is _ABSENT:
        return _ABSENT
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
