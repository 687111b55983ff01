"""The configuration saved with a run, and whether another one may go on with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.store import layout
from agentrl_cli.store.files import store_errors, write_text
from agentrl_cli.store.secrets import mask_secrets, restore_secrets

#: Keys that may differ when a run goes on. A key ending in "." stands for all below it.
MAY_CHANGE_ON_RESUME: dict[str, str] = {
    "experiment_name": "says where the folder is; it may have been renamed",
    "trial_name": "says where the folder is; it may have been renamed",
    "output_dir": "says where the folder is; it may have been moved",
    "loggers": "copies of the metrics",
    "launcher.": "where processes run",
    "train.total_steps": "how long to go on",
    "train.eval_every_steps": "when to look, not what is learned",
    "train.save_every_steps": "when to save, not what is learned",
    "train.keep_last_checkpoints": "what is kept on disk",
    "train.keep_best_checkpoint": "what is kept on disk",
    "train.micro_batch_tokens": "memory: gradients are the same",
    "train.packing": "speed: gradients are the same",
    "train.gradient_checkpointing": "memory: gradients are the same",
    "train.compile": "speed: gradients are the same",
    "train.num_processes": "speed and memory: updates are the same",
    "train.num_threads": "speed",
    "train.alarms.": "what is watched, and what happens then",
    "train.probe_tolerance": "a check, not what is learned",
    "engine.kind": "which server samples, from the same distribution; another machine has another",
    "engine.num_servers": "speed",
    "engine.num_threads": "speed",
    "engine.python": "where servers run",
    "engine.device": "where servers run",
    "engine.tensor_parallel_size": "where servers run",
    "engine.gpu_memory_utilization": "memory",
    "engine.cpu_kv_cache_gib": "memory",
    "engine.first_port": "where servers listen",
    "engine.server_args": "how servers run; the weights they sample with are verified",
    "engine.weight_transfer.": "the way of the weights, which are verified",
    "engine.start_timeout_seconds": "deadline",
    "engine.max_restarts": "patience",
    "engine.max_num_seqs": "speed",
    "engine.generate_timeout_seconds": "deadline",
    "engine.publish_timeout_seconds": "deadline",
    "rollout.max_concurrent": "speed",
    "rollout.timeout_seconds": "deadline",
    "rollout.reward_timeout_seconds": "deadline",
    "rollout.reward_workers": "speed",
    "rollout.agent_mode": "where agents run",
    "rollout.external.": "where programs elsewhere knock, and patience with them",
    "rollout.num_workers": "speed",
    "rollout.worker_max_tasks": "speed, for agents that leave nothing behind",
    "rollout.worker_max_memory_gib": "memory",
}

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
    """Refuses to go on with a run that was begun with other settings.

    Raises:
        RunFolderError: with every differing key and the three ways out.
    """
    changes = _find_changes(_load_saved(run_dir), _dump(config))
    if not changes:
        return
    listed = "\n".join(f"  {k}: {_show(o)} -> {_show(n)}" for k, (o, n) in changes.items())
    old_values = " ".join(f"{k}={_as_argument(o)}" for k, (o, _) in changes.items())
    raise RunFolderError(
        f"{run_dir}: this run was begun with another configuration (old -> new):\n{listed}\n"
        "Nothing was started and nothing was changed. Three ways out:\n"
        f"  1. a new run beside it: add  trial_name={_free_trial(run_dir)}\n"
        f"  2. go on with the old run: add its values back:  {old_values}\n"
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
        if _may_change(key) or old.get(key, _ABSENT) == new.get(key, _ABSENT):
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
    """A clause for a run that failed before it had done anything."""
    folders = (run_dir / layout.TRAJECTORIES, run_dir / layout.CHECKPOINTS)
    has_results = (run_dir / layout.METRICS).is_file() or any(
        folder.is_dir() and any(folder.iterdir()) for folder in folders
    )
    return "" if has_results else ": nothing but logs, since it has done no step yet"


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
            f"{path}: is damaged ({error.__class__.__name__}): it cannot be told whether this run "
            f"may go on. Type trial_name={_free_trial(run_dir)}, or --overwrite to start over"
        ) from None
    return data if isinstance(data, dict) else {}


def _may_change(key: str) -> bool:
    return any(
        key == allowed or (allowed.endswith(".") and key.startswith(allowed))
        for allowed in MAY_CHANGE_ON_RESUME
    )


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
