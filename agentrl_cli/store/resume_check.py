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
from agentrl_cli.store.working_copy import LocalFolder

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


def load_saved_config(
    place: LocalFolder, secrets: Sequence[Sequence[Any]] = ()
) -> ExperimentConfig:
    """The configuration that was saved with a run, with what ``find_secrets`` found in it.

    Raises:
        StoreError: it is damaged.
    """
    data = _restore_secrets(_read_saved(place), secrets)
    for *_, secret in secrets:
        hide_text(secret)
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as error:
        path = layout.describe(place.path / layout.CONFIG)
        raise StoreError(f"{path}: is damaged ({error})") from None


def check_same_config(config: ExperimentConfig, place: LocalFolder) -> None:
    """Refuses to resume a run that was started with other settings; what there is none of, may be
    started.

    Raises:
        RunFolderError: with every differing key and the three ways out.
    """
    if not place.has(place.path / layout.CONFIG):
        return
    old, new = _read_saved(place), _dump(config)
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
    results = (layout.TRAJECTORIES, layout.CHECKPOINTS, layout.METRICS)
    has_results = any(place.has(place.path / name) for name in results)
    loss = "" if has_results else ": nothing but logs: no step was finished"
    raise RunFolderError(
        f"{place.location}: this run was started with another configuration (old -> "
        f"new):\n{listed}\nNothing was started and nothing was changed. Three ways out:\n"
        f"  1. a new run beside it: add  trial_name={_free_trial(place)}\n"
        f"  2. resume the old run: add its values back:  {old_values}\n"
        f"  3. start over: add  --overwrite  (deletes what is in {place.location}{loss})"
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


def _read_saved(place: LocalFolder) -> dict[str, Any]:
    path = place.path / layout.CONFIG
    place.fetch(path)
    try:
        with store_errors(path, "read"):
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{layout.describe(path)}: is damaged ({error.__class__.__name__}): whether this run "
            f"may be resumed is unknown. Type trial_name={_free_trial(place)}, or --overwrite to "
            "start over"
        ) from None
    return data if isinstance(data, dict) else {}


def _free_trial(place: LocalFolder) -> str:
    base, number = Path(place.location).name.rstrip("0123456789") or "t", 1
    while place.has_sibling(f"{base}{number}"):
        number += 1
    return f"{base}{number}"


def _as_yaml(value: Any) -> str:
    if value is _ABSENT:
        return _ABSENT
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
