"""A checkpoint of a run becomes a folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError, UserInputError
from agentrl_cli.launch.model_card import MODEL_CARD_NAME, format_model_card
from agentrl_cli.store import layout
from agentrl_cli.store.best import EvalScore, find_best_checkpoint, find_best_eval
from agentrl_cli.store.config_check import load_saved_config
from agentrl_cli.store.files import is_full_disk, sync_folder, sync_tree
from agentrl_cli.store.run_folder import RunFolder

_ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
#: For going on with the run, not for using the model.
_NOT_EXPORTED = {layout.DATA_CURSOR, MODEL_CARD_NAME}
_DEFAULT_METRIC = "mean_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    kind: Literal["model", "adapter"]
    num_bytes: int
    score: EvalScore | None
    """The evaluation by which the checkpoint was the best, if that was asked for."""
    metric: str
    better_before: float | None
    """What the model before the training had in that evaluation, if it was more."""


def export_checkpoint(
    run: Path,
    to: Path,
    *,
    choice: int | Literal["last", "best"] | None = None,
    merge: bool = False,
) -> Exported:
    """Writes the model of a checkpoint into the new folder ``to``, whole or not at all.

    Args:
        run: a run's folder, or one of its checkpoints.
        to: a folder that is not there yet.
        choice: the checkpoint of this step, the last, or the one with the highest evaluation;
            None: the one that ``run`` names, else the last.
        merge: an adapter is added to the weights that it was trained on.

    Raises:
        UserInputError: no such run or checkpoint, or ``to`` cannot be taken.
        StoreError: the disk is full, or the checkpoint is damaged; nothing is left in ``to``.
    """
    folder = RunFolder.open(run)
    _check_target(to, folder.path)
    checkpoints = dict(folder.list_checkpoints())
    if not checkpoints:
        raise RunFolderError(_describe_none(folder))
    config = load_saved_config(folder.path)
    metric = config.train.keep_best_checkpoint or _DEFAULT_METRIC
    if choice is None:
        choice = _find_named_step(run, folder) or "last"
    score = None
    if choice == "best":
        score = _find_best(folder, metric)
        choice = score.step
    step = _resolve_step(choice, folder, checkpoints)
    source = checkpoints[step]
    base = _read_adapter_base(source)
    if merge and base is None:
        raise UserInputError(
            "--merge: this run trained the model's own weights, so there is no adapter to merge "
            "(model.lora was not set). Leave --merge out"
        )
    if merge:
        base = None
    with _new_folder(to, source) as temporary:
        _write_model(source, temporary, config, merge=merge)
        card = format_model_card(folder, config, step=step, name=to.name, base=base)
        (temporary / MODEL_CARD_NAME).write_text(card, encoding="utf-8")
        num_bytes = sum(path.stat().st_size for path in temporary.iterdir())
    return Exported(
        folder=to,
        step=step,
        kind="model" if base is None else "adapter",
        num_bytes=num_bytes,
        score=score,
        metric=metric,
        better_before=None if score is None else _find_better_before(folder, metric, score),
    )


def _check_target(to: Path, run_dir: Path) -> None:
    if to.exists() or to.is_symlink():
        what = "a folder" if to.is_dir() else "a file"
        raise UserInputError(
            f"--to {to}: {what} of that name exists, and nothing is overwritten. Type "
            f"--to {to}-2, or remove it first"
        )
    if to.resolve().is_relative_to(run_dir.resolve()):
        raise UserInputError(
            f"--to {to} lies inside of the run folder {run_dir}, which belongs to agentrl: "
            f"--overwrite empties it. Type --to {run_dir.name}-model"
        )


def _find_named_step(run: Path, folder: RunFolder) -> int | None:
    """The step, if ``run`` is one of the run's checkpoints and not the run."""
    parts = run.resolve().relative_to(folder.path.resolve()).parts
    is_checkpoint = len(parts) > 1 and parts[0] == layout.CHECKPOINTS
    return layout.parse_step(parts[1]) if is_checkpoint else None


def _resolve_step(
    choice: int | Literal["last"], folder: RunFolder, checkpoints: Mapping[int, Path]
) -> int:
    """The step of the checkpoint that was asked for, which is there."""
    step = max(checkpoints) if choice == "last" else choice
    if step not in checkpoints:
        known = ", ".join(map(str, checkpoints))
        raise RunFolderError(
            f"{folder.path}: there is no checkpoint of step {step}. There are those of steps "
            f"{known}. Type --step {max(checkpoints)}, --best or --last"
        )
    return step


def _find_better_before(folder: RunFolder, metric: str, best: EvalScore) -> float | None:
    """The score of the model before the training, if it is more than the ``best`` one."""
    before = find_best_eval(folder, metric, (0,))
    return before.value if before is not None and before.value > best.value else None


def _read_adapter_base(source: Path) -> str | None:
    """The model that an adapter in ``source`` was made for; None: it holds a whole model."""
    path = source / _ADAPTER_CONFIG
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error!r}). Type --step with another") from None


def _find_best(folder: RunFolder, metric: str) -> EvalScore:
    found = find_best_checkpoint(folder, metric)
    if found is not None:
        return found[0]
    saved = ", ".join(str(step) for step, _ in folder.list_checkpoints())
    evaluated = ", ".join(map(str, folder.eval_steps())) or "none"
    raise RunFolderError(
        f"{folder.path}: --best: no checkpoint has an evaluation that says {metric}. Checkpoints "
        f"of steps: {saved}; evaluations after steps: {evaluated}. Type --last or --step N. (Runs "
        "with valid_dataset and train.eval_every_steps evaluate, and keep the best one)"
    )


def _describe_none(folder: RunFolder) -> str:
    steps = folder.trajectory_steps()
    done = f"{steps[-1]} step(s) were begun" if steps else "no step was done"
    return (
        f"{folder.path}: has no checkpoint yet ({done}). One is saved every "
        "train.save_every_steps, after the last step, and when Ctrl-C stops the run"
    )


def _write_model(source: Path, target: Path, config: ExperimentConfig, *, merge: bool) -> None:
    """The model's files of the checkpoint; with ``merge`` whole weights instead of an adapter."""
    try:
        names = sorted(path.name for path in source.iterdir() if path.is_file())
    except FileNotFoundError:
        raise RunFolderError(_describe_deleted(source)) from None
    if not any(next(source.glob(pattern), None) for pattern in _WEIGHTS):
        raise StoreError(
            f"{source} is damaged: it holds no weights (*.safetensors). Type --step with another"
        )
    for name in names:
        if name in _NOT_EXPORTED or (merge and name.startswith("adapter_")):
            continue
        try:
            shutil.copyfile(source / name, target / name)
        except FileNotFoundError:
            raise RunFolderError(_describe_deleted(source)) from None
    if merge:
        _write_merged(source, target, config.model.dtype)


def _write_merged(source: Path, target: Path, dtype: str) -> None:
    # Only here: without it nothing of a model is loaded.
    import torch

    from agentrl_cli.models.lora import load_merged_model
    from agentrl_cli.models.pretrained import without_progress_bars

    with without_progress_bars():
        # Added up in float32, so that the sum is rounded once.
        merged = load_merged_model(source, torch.float32)
        merged.to(getattr(torch, dtype)).save_pretrained(target)


def _describe_deleted(source: Path) -> str:
    return (
        f"{source} was deleted while it was read: the run goes on and keeps its newest "
        "checkpoints only (train.keep_last_checkpoints). Type the command again with --last"
    )


@contextmanager
def _new_folder(to: Path, source: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``to`` when the block ends well, else is gone."""
    temporary = layout.temporary_path(to.absolute())
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_tree(temporary)
        temporary.rename(to)
        sync_folder(to.absolute().parent)
    except Exception as error:
        if not is_full_disk(error):
            if isinstance(error, OSError):
                raise StoreError(
                    f"{to}: cannot be written: {error}. Nothing was left there. Type --to with a "
                    "folder that you may write to"
                ) from error
            raise
        raise StoreError(
            f"{to}: cannot be written: the disk (or your quota) is full. Nothing was left there, "
            f"and {source} is as it was. Free some space, or type --to with a folder on a larger "
            "disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
