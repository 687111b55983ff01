"""The models that ``agentrl compare`` is given names of, and the evaluation of each."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.config_schema import is_resume_safe
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.errors import ConfigError, RunFolderError, UserInputError, format_nearest
from agentrl_cli.launch.completion_sources import CompletionSource, EndpointSource, EngineSource
from agentrl_cli.launch.local_run import run_evaluation
from agentrl_cli.launch.run_resolution import resolve_run_here
from agentrl_cli.launch.trainer import take_rows
from agentrl_cli.log import Observer
from agentrl_cli.secret_masking import MASK, mask_secrets, mask_text
from agentrl_cli.store import layout
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import find_best_checkpoint

_ALLOWED_NAMES = (
    "Allowed: a run folder or its URL, a checkpoint's folder, RUN/NAME for a stored evaluation, "
    "base, and api:URL#MODEL"
)
_MODEL_FILES = ("config.json", "adapter_config.json")
#: What two runs must have in common to be compared, beside the rows and the sampling.
_AGENT_KEYS = (
    *("agent_builder_path", "agent_builder_kwargs", "agents"),
    *("workflow_path", "workflow_kwargs", "reward_fn_path"),
)
#: Sections that decide how a model is trained; what an evaluation takes of them is added.
_TRAINING_KEYS = ("train", "train_dataset", "valid_dataset", "gconfig", "eval_gconfig")
_MAX_LABEL = 60
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class BaseModel:
    """``base``: the ``model.path`` of the configuration."""

    name: str
    run: RunFolder | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``api:URL#MODEL``: a model behind an OpenAI-compatible endpoint."""

    name: str
    base_url: str
    model: str
    run: RunFolder | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's folder; of a run, if ``run`` is one."""

    name: str
    folder: Path
    run: RunFolder | None = None


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """An evaluation that was made: of those that training makes, ``label`` is None."""

    name: str
    run: RunFolder
    step: int
    label: str | None

    def list_inspect_words(self, task_id: str) -> list[str]:
        """The command that shows its trajectories of a task."""
        words = ["agentrl", "inspect-trajectories", self.run.location, "--evals"]
        words += [self.label] if self.label else ["training", "--step", str(self.step)]
        return [*words, "--task", task_id]


ComparedModel = BaseModel | Endpoint | Checkpoint | StoredEvaluation


def find_model(name: str, *, best: bool) -> ComparedModel:
    """What ``name`` stands for; of a run, its newest checkpoint, or the ``best`` evaluated one.

    Raises:
        UserInputError: there is no such model.
    """
    if name == "base":
        return BaseModel(name)
    if name.startswith("api:"):
        return _parse_endpoint(name)
    path, is_url = Path(name), layout.is_url(name)
    is_evaluation = not (is_url or path.exists()) and layout.is_run_folder(path.parent)
    try:
        run = RunFolder.open(path.parent if is_evaluation else name)
    except RunFolderError as error:
        if not is_url and any((path / file).is_file() for file in _MODEL_FILES):
            return Checkpoint(name, path)
        raise UserInputError(f"{error}\n{_ALLOWED_NAMES}") from None
    place = run.find_inside(name)
    if place == run.path:
        return _choose_checkpoint(name, run, best=best)
    if place in (folder for _, folder in run.list_checkpoints()):
        return Checkpoint(name, place, run)
    return _find_evaluation(name, run, place.name)


def _parse_endpoint(name: str) -> Endpoint:
    base_url, separator, model = name.removeprefix("api:").rpartition("#")
    if not (separator and model and base_url.startswith(("http://", "https://"))):
        raise UserInputError(
            f"{name}: names no model of an endpoint. Type api:URL#MODEL, like "
            "api:https://api.openai.com/v1#gpt-5-mini"
        )
    return Endpoint(name, base_url, model)


def _choose_checkpoint(name: str, run: RunFolder, *, best: bool) -> Checkpoint:
    latest = run.latest_checkpoint()
    if latest is None:
        stored = ", ".join(f"{name.rstrip('/')}/{n}" for n in _name_evaluations(run))
        advice = f" Its evaluations can be compared: {stored}" if stored else ""
        raise UserInputError(
            f"{name}: this run has no checkpoint yet, which is saved every train.save_every_steps "
            f"and after the last step.{advice}"
        )
    if not best:
        return Checkpoint(name, latest[1], run)
    found = find_best_checkpoint(run, run.load_config().train.keep_best_checkpoint or "mean_reward")
    if found is None:
        raise UserInputError(
            f"--best: none of the checkpoints of {name} was evaluated. Leave --best out for the "
            "newest one"
        )
    return Checkpoint(name, found[1], run)


def _find_evaluation(name: str, run: RunFolder, typed: str) -> StoredEvaluation:
    """The evaluation called ``typed``: its label, or its file's name."""
    wanted = typed.removesuffix(".json").removesuffix(".parquet")
    # The newest, if several steps have one of that label.
    for step, label in reversed(run.list_evals()):
        if wanted in (label, layout.eval_name(step, label)):
            return StoredEvaluation(name, run, step, label)
    raise UserInputError(
        f"{name}: {run.location} has no evaluation {typed!r}; "
        f"{format_nearest(typed, _name_evaluations(run))}"
    )


def _name_evaluations(run: RunFolder) -> list[str]:
    return [label or layout.eval_name(step) for step, label in run.list_evals()]


def find_configured_run(models: Sequence[ComparedModel]) -> RunFolder | None:
    """The first run among the models with which a configuration was saved."""
    runs = (model.run for model in models if model.run is not None)
    return next((run for run in runs if run.fetch(layout.CONFIG).is_file()), None)


def load_shared_config(
    path: Path | None, overrides: Sequence[str], models: Sequence[ComparedModel]
) -> ExperimentConfig:
    """The configuration that all models are evaluated with, and whose run folder keeps that.

    Without ``path`` it is the one that was saved with the first run among the models.

    Raises:
        UserInputError: there is none, or it cannot be used.
    """
    if path is not None:
        return load_config(path, overrides)
    run = find_configured_run(models)
    if run is None:
        raise ConfigError(
            "--config: none of the models is a run with a configuration, which says what the "
            "agent, its tasks and its reward are. Add --config FILE"
        )
    config = load_config(run.config_path, overrides)
    if MASK in json.dumps(config.model_dump(mode="json")):
        raise ConfigError(
            f"--config: the configuration that is saved with {run.location} holds no secrets "
            f"(they are {MASK} there), and its agent needs some. Add --config FILE, with the file "
            "that it was trained with"
        )
    # It may have been moved, or be looked at from another folder.
    place = PurePosixPath(run.location)
    output_dir = str(place.parent.parent)
    if layout.is_url(run.location):
        output_dir = run.location.rstrip("/").rsplit("/", 2)[0]
    places = {
        "output_dir": output_dir,
        "experiment_name": place.parent.name,
        "trial_name": place.name,
    }
    return config.model_copy(update=places)


def list_differences(
    config: ExperimentConfig, models: Sequence[ComparedModel], owner: str
) -> list[str]:
    """One line for each setting of agent, rows, sampling or reward that a run has otherwise than
    ``owner``, whose configuration is given."""
    shared = _list_shared(config)
    lines = []
    for model in models:
        run = find_configured_run([model])
        if run is None:
            continue
        other = _list_shared(run.load_config())
        lines += [
            f"{mask_text(model.name)} has another {key} than {owner}: {_show(other[key])}, "
            f"not {_show(value)}"
            for key, value in shared.items()
            if other[key] != value
        ]
    return list(dict.fromkeys(lines))


def _list_shared(config: ExperimentConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json", include=set(_AGENT_KEYS))
    data["dataset of evaluations"] = config.resolve_eval_dataset()[1].model_dump(mode="json")
    data["sampling of evaluations"] = config.resolve_eval_gconfig().model_dump(mode="json")
    masked: dict[str, Any] = mask_secrets(data)
    return masked


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def evaluate_models(
    config: ExperimentConfig,
    models: Sequence[ComparedModel],
    *,
    limit: int | None,
    again: bool,
    observer: Observer,
) -> Iterator[StoredEvaluation]:
    """The evaluation of each model, as soon as it is there.

    Those that were made with the same configuration, rows, code of the agent and model are not
    made again, unless ``again`` says so: a command that was interrupted makes the missing ones.

    Raises:
        UserInputError: something in the input is wrong.
        RunError: an evaluation could not be finished; those before it are stored.
    """
    unknown = [model for model in models if not isinstance(model, StoredEvaluation)]
    settings = _describe_settings(config, limit) if unknown else {}
    for endpoint in (model for model in unknown if isinstance(model, Endpoint)):
        # Before the others have taken their time.
        EndpointSource(config, endpoint.base_url, endpoint.model).prepare()
    for number, model in enumerate(models, 1):
        if isinstance(model, StoredEvaluation):
            yield model
            continue
        label = _name_evaluation(config, model, settings)
        # Closed at once: an evaluation opens the folder by itself.
        with RunFolder.for_evaluation(config) as run:
            found = None if again else _find_finished(run, label)
        shown = mask_text(model.name)
        if found is not None:
            observer.on_message(f"{shown} was evaluated before, as {found} (--again: once more)")
        else:
            observer.on_message(f"model {number} of {len(models)}: {shown}")
            found = _evaluate(config, model, label, limit, observer)
        yield StoredEvaluation(model.name, RunFolder.for_evaluation(config), 0, found)


def _evaluate(
    config: ExperimentConfig,
    model: BaseModel | Endpoint | Checkpoint,
    label: str,
    limit: int | None,
    observer: Observer,
) -> str:
    source: CompletionSource
    if isinstance(model, Endpoint):
        source = EndpointSource(config, model.base_url, model.model)
    else:
        folder = None
        if isinstance(model, Checkpoint):
            folder = model.folder
            if model.run is not None:
                model.run.fetch(folder)
        source = EngineSource(config, resolve_run_here(config, "eval"), observer, folder)
    return run_evaluation(config, source, limit=limit, observer=observer, name=label)[0]


def _describe_settings(config: ExperimentConfig, limit: int | None) -> dict[str, Any]:
    """All that an evaluation comes from but the model, as plain data.

    The user's code is the files of the agent and of the reward function, not what those import.
    """
    key, dataset = config.resolve_eval_dataset()
    data = config.model_dump(mode="json", exclude=set(_TRAINING_KEYS))
    settings = {
        "config": _drop_resume_safe(mask_secrets(data)),
        "gconfig": config.resolve_eval_gconfig().model_dump(mode="json"),
        "rows": take_rows(None, dataset, key)[:limit],
    }
    paths = {name: data[name] for name in _AGENT_KEYS if name.endswith("_path")}
    for name, agent in config.agents.items():
        paths[f"agents.{name}.agent_builder_path"] = agent.agent_builder_path
    code = {name: _read_code(path, name) for name, path in paths.items() if path is not None}
    return {**settings, "code": code}


def _drop_resume_safe(data: Any, prefix: tuple[str, ...] = ()) -> Any:
    """Without what decides where or how fast it runs."""
    if not isinstance(data, dict):
        return data
    return {
        name: _drop_resume_safe(value, (*prefix, name))
        for name, value in data.items()
        if not is_resume_safe(ExperimentConfig, (*prefix, name))
    }


def _read_code(import_path: str, key: str) -> str:
    """The text of the file that the object is from; empty where there is none."""
    name = getattr(import_object(import_path, key), "__module__", "")
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return Path(file).read_text("utf-8", errors="replace") if file else ""


def _name_evaluation(
    config: ExperimentConfig,
    model: BaseModel | Endpoint | Checkpoint,
    settings: dict[str, Any],
) -> str:
    """A name that tells what was evaluated, and with a digest of all that it comes from."""
    shared = dict(settings["config"])
    if isinstance(model, Endpoint):
        # The engine and the model that agentrl runs have no part in it.
        for key in ("model", "tokenizer_path", "engine"):
            shared.pop(key, None)
        what, identity = model.model, [model.base_url, model.model]
    elif isinstance(model, BaseModel):
        what, identity = "base", _identify_folder(Path(config.model.path).expanduser())
    else:
        trial = "" if model.run is None else f"{Path(model.run.location).name}-"
        what = trial + model.folder.name
        if model.run is not None:
            model.run.fetch(model.folder / layout.CHECKSUMS)
        identity = _identify_folder(model.folder)
        shared["model"] = {**shared["model"], "path": None}
    text = json.dumps([{**settings, "config": shared}, identity], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{layout.parse_label(what)[:_MAX_LABEL]}-{digest}"


def _identify_folder(folder: Path) -> list[Any]:
    """What changes when a model's files do; of a name on the hub, the name."""
    checksums = folder / layout.CHECKSUMS
    if checksums.is_file():
        return [checksums.read_text(encoding="utf-8")]
    if not folder.is_dir():
        return [str(folder)]
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return [
        str(folder.resolve()),
        *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats),
    ]


def _find_finished(run: RunFolder, label: str) -> str | None:
    """The newest evaluation of that name: one that is made again has a number appended."""
    numbered = re.compile(rf"{re.escape(label)}(?:-(\d+))?")
    matches = [match for _, name in run.list_evals() if (match := numbered.fullmatch(name or ""))]
    newest = max(matches, key=lambda match: int(match[1] or 1), default=None)
    return None if newest is None else newest[0]
