"""A checkpoint of a run becomes a folder that transformers and vLLM load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from agentrl_cli import __version__
from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError, UserInputError
from agentrl_cli.launch.plan import find_vllm_lora_rank
from agentrl_cli.log import format_failures
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import is_full_disk, sync_folder, sync_tree
from agentrl_cli.store.checksums import check_checksums
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import (
    EvalScore,
    find_best_checkpoint,
    find_best_eval,
    read_metric,
)

_MODEL_CARD_NAME = "README.md"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*/[\w.\-]+$")
_DATASET_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet"}
_ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
#: For going on with the run, not for using the model.
_NOT_EXPORTED = {layout.DATA_CURSOR, layout.CHECKSUMS, _MODEL_CARD_NAME}


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
    run: str | Path,
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
    config = folder.load_config()
    metric = config.train.keep_best_checkpoint or "mean_reward"
    score = None
    if choice is None:
        choice = _find_named_step(run, folder) or "last"
    if choice == "best":
        score = _find_best(folder, metric)
        choice = score.step
    step, source = _find_checkpoint(folder, choice)
    folder.fetch(source)
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
        (temporary / _MODEL_CARD_NAME).write_text(card, encoding="utf-8")
        num_bytes = sum(path.stat().st_size for path in temporary.iterdir())
    before = None if score is None else find_best_eval(folder, metric, (0,))
    return Exported(
        folder=to,
        step=step,
        kind="model" if base is None else "adapter",
        num_bytes=num_bytes,
        metric=metric,
        score=score,
        better_before=before.value if before and score and before.value > score.value else None,
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


def _find_named_step(run: str | Path, folder: RunFolder) -> int | None:
    """The step, if ``run`` is one of the run's checkpoints and not the run."""
    parts = folder.find_inside(run).relative_to(folder.path).parts
    is_checkpoint = len(parts) > 1 and parts[0] == layout.CHECKPOINTS
    return layout.parse_step(parts[1]) if is_checkpoint else None


def _find_checkpoint(folder: RunFolder, choice: int | Literal["last"]) -> tuple[int, Path]:
    """Step and folder of the checkpoint that was asked for."""
    checkpoints = dict(folder.list_checkpoints())
    if not checkpoints:
        raise RunFolderError(
            f"{folder.location}: has no checkpoint yet. One is saved every train.save_every_steps, "
            "after the last step, and when Ctrl-C stops the run"
        )
    step = max(checkpoints) if choice == "last" else choice
    if step not in checkpoints:
        known = ", ".join(map(str, checkpoints))
        raise RunFolderError(
            f"{folder.location}: there is no checkpoint of step {step}. There are those of steps "
            f"{known}. Type --step {max(checkpoints)}, --best or --last"
        )
    return step, checkpoints[step]


def _read_adapter_base(source: Path) -> str | None:
    """The model that an adapter in ``source`` was made for; None: it holds a whole model."""
    path = source / _ADAPTER_CONFIG
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{layout.describe(path)} is damaged ({error!r}). Type --step with another"
        ) from None


def _find_best(folder: RunFolder, metric: str) -> EvalScore:
    found = find_best_checkpoint(folder, metric)
    if found is not None:
        return found[0]
    saved = ", ".join(str(step) for step, _ in folder.list_checkpoints()) or "none"
    evaluated = ", ".join(map(str, folder.eval_steps())) or "none"
    raise RunFolderError(
        f"{folder.location}: --best: no checkpoint has an evaluation that says {metric}. "
        "Checkpoints "
        f"of steps: {saved}; evaluations after steps: {evaluated}. Type --last or --step N. (Runs "
        "with valid_dataset and train.eval_every_steps evaluate, and keep the best one)"
    )


def _write_model(source: Path, target: Path, config: ExperimentConfig, *, merge: bool) -> None:
    """The model's files of the checkpoint; with ``merge`` whole weights instead of an adapter."""
    try:
        names = [path.name for path in source.iterdir() if path.is_file()]
        if not any(next(source.glob(pattern), None) for pattern in _WEIGHTS):
            raise StoreError(
                f"{layout.describe(source)} is damaged: it holds no weights (*.safetensors). "
                "Type --step with another"
            )
        check_checksums(source)
        for name in names:
            if name not in _NOT_EXPORTED and not (merge and name.startswith("adapter_")):
                shutil.copyfile(source / name, target / name)
    except FileNotFoundError:
        raise RunFolderError(
            f"{layout.describe(source)} was deleted while it was read: the run goes on and keeps "
            "its newest "
            "checkpoints only (train.keep_last_checkpoints). Type the command again with --last"
        ) from None
    if not merge:
        return
    # Only here: otherwise nothing of a model is loaded.
    import torch

    from agentrl_cli.models.pretrained import load_merged_model, without_progress_bars

    with without_progress_bars():
        # Added up in float32, so that the sum is rounded once.
        merged = load_merged_model(source, torch.float32)
        merged.to(getattr(torch, config.model.dtype)).save_pretrained(target)


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
        if is_full_disk(error):
            hint = (
                f"the disk (or your quota) is full. Nothing was left there, and "
                f"{layout.describe(source)} is "
                "as it was. Free some space, or type --to with a folder on a larger disk"
            )
        elif isinstance(error, OSError):
            hint = f"{error}. Nothing was left there. Type --to with a folder that you may write to"
        else:
            raise
        raise StoreError(f"{to}: cannot be written: {hint}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def format_model_card(
    folder: RunFolder, config: ExperimentConfig, *, step: int, name: str, base: str | None
) -> str:
    """The card of the checkpoint of ``step``, in the form that the hub reads.

    ``base`` is the folder or hub id of the model that it needs, where it holds an adapter alone.
    """
    run = f"{config.experiment_name}/{config.trial_name}"
    facts = [
        ("run", run),
        ("step", f"{step} of {config.train.total_steps}"),
        ("trained from", f"`{config.model.path}`"),
        ("trained", _describe_weights(config)),
        ("algorithm", f"`{config.train.algorithm.kind}`"),
        ("tasks", _describe_dataset(config.train_dataset)),
        ("reward", f"`{config.reward_fn_path or 'the agent gives it'}`"),
        *_list_evaluations(folder, config, step),
        ("seed", str(config.seed)),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in facts)
    note, served = "", name
    if base is not None:
        rank = find_vllm_lora_rank(config.model.lora.rank) if config.model.lora is not None else 0
        note = _ADAPTER_NOTE
        served = f"{base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={name}"
    return (
        f"---\n{_format_front_matter(config, is_adapter=base is not None)}---\n\n# {name}\n\n"
        f"Trained by reinforcement learning with agentrl {__version__}: step {step} of the run "
        f"{run}.\n\n|  |  |\n|---|---|\n{table}\n\n"
        + _USE.format(name=name, note=note, served=served)
    )


_USE = """## Use
{note}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

    vllm serve {served}
"""

_ADAPTER_NOTE = """
This is an adapter in peft's format: it needs peft, and the model that it was trained from.
`base_model_name_or_path` in `adapter_config.json` says where that was; correct it if it is
elsewhere now.
"""


def _format_front_matter(config: ExperimentConfig, *, is_adapter: bool) -> str:
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if _is_on_hub(config.model.path):
        front["base_model"] = config.model.path
    if _is_on_hub(config.train_dataset.path):
        front["datasets"] = [config.train_dataset.path]
    front |= {"pipeline_tag": "text-generation", "tags": ["agentrl", "reinforcement-learning"]}
    return yaml.safe_dump(front, sort_keys=False)


def _is_on_hub(path: str) -> bool:
    """False for what is, or can only be, a file or folder of some machine."""
    is_file = Path(path).suffix.lower() in _DATASET_SUFFIXES
    return bool(_HUB_ID.match(path)) and not is_file and not Path(path).exists()


def _describe_weights(config: ExperimentConfig) -> str:
    lora, frozen = config.model.lora, ", ".join(config.model.frozen)
    what = f"all weights but {frozen}" if frozen else "all weights"
    if lora is not None:
        what = f"an adapter of rank {lora.rank} (LoRA)"
    return f"{what}, in {config.model.dtype}"


def _describe_dataset(dataset: DatasetConfig) -> str:
    parts = [dataset.path, dataset.name, dataset.split]
    return "`" + " ".join(part for part in parts if part) + "`"


def _list_evaluations(
    folder: RunFolder, config: ExperimentConfig, step: int
) -> list[tuple[str, str]]:
    """What the evaluations before the training and after this step found."""
    if config.valid_dataset is None:
        return []
    on = f" on {_describe_dataset(config.valid_dataset)}"
    rows = [(f"evaluation after this step{on}", step), ("the same before the training", 0)]
    return [(label, _describe_eval(folder, at)) for label, at in rows if at in folder.eval_steps()]


def _describe_eval(folder: RunFolder, step: int) -> str:
    try:
        report = folder.read_eval_report(step)
    except StoreError:
        return "its report cannot be read"
    mean = read_metric(report, "mean_reward")
    if mean is None:
        return "no trajectory was scored"
    interval = report.get("interval")
    within = f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    counts = (report.get(f"num_{cause}_failures", 0) for cause in ("policy", "surroundings"))
    failed = format_failures(*counts)
    tasks = f"{report.get('num_tasks', '?')} tasks"
    return f"mean reward {mean:.3f}{within}, {tasks}" + (f", {failed}" if failed else "")
