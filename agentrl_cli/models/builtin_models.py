"""From ``model.path`` to a folder: ``builtin:calculator`` is made on its first use.

It has under a million parameters, is made by supervised training on generated demonstrations, by
the code that ``agentrl sft`` runs, and is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from importlib import metadata, resources
from pathlib import Path

from filelock import FileLock, Timeout

from agentrl_cli.config.sft_config import (
    NewModelConfig,
    SftConfig,
    SftDatasetConfig,
    SftModelConfig,
    SftTrainConfig,
)
from agentrl_cli.errors import ModelError, RunError, format_nearest
from agentrl_cli.log import CheckStop, Observer, SilentObserver, never_stop

#: Another process that makes the model is waited for this long: ten times what it takes.
_LOCK_TIMEOUT_SECONDS = 1200.0
_LOCK_POLL_SECONDS = 0.2

_CALCULATOR = "builtin:calculator"


def resolve_model_folder(path: str, observer: Observer, check_stop: CheckStop = never_stop) -> str:
    """A folder or hub id for ``path``; a ``builtin:`` model is made on its first use.

    What ``check_stop`` raises ends the making, and nothing of it is kept.

    Raises:
        ModelError: there is no such built-in model or folder, or the cache cannot be written.
        RunError: another process has been making the model for too long.
    """
    if path == _CALCULATOR:
        return str(_make_calculator_model(observer, check_stop))
    if path.startswith("builtin:"):
        raise ModelError(
            f"model.path: {path!r} is not a built-in model; {format_nearest(path, [_CALCULATOR])}"
        )
    # A hub id is ``name`` or ``owner/name``.
    is_folder = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
    if is_folder and not Path(path).exists():
        raise ModelError(
            f"model.path: there is no folder {path!r} (from the current folder, "
            f"{Path.cwd().name}/). Allowed: a folder with a model in Hugging Face format, a hub id "
            "such as Qwen/Qwen2.5-1.5B-Instruct, or builtin:calculator. "
            "Type model.path=builtin:calculator to try without a download"
        )
    return path


def find_model_folder(path: str) -> str | None:
    """The folder of a model; None: it would have to be made or fetched first.

    Raises:
        ModelError: as of :func:`resolve_model_folder`.
    """
    folder = path
    if path == _CALCULATOR:
        folder = str(_locate_calculator_model())
    else:
        resolve_model_folder(path, SilentObserver())
    return folder if Path(folder).is_dir() else None


def _locate_calculator_model() -> Path:
    return resolve_cache_folder() / f"calculator-{compute_digest()}"


def _make_calculator_model(observer: Observer, check_stop: CheckStop) -> Path:
    """The model's folder, made in about a minute if it is not in the cache.

    Processes that want it at the same time take turns.
    """
    folder = _locate_calculator_model()
    if folder.is_dir():
        return folder
    # Here, since it loads torch: seconds that who finds the model does without.
    from agentrl_cli.models.sft_training import train_and_save

    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _wait_for_lock(cache / f"{folder.name}.lock", observer, check_stop):
            if not folder.is_dir():
                train_and_save(build_calculator_config(str(folder)), None, observer, check_stop)
    except OSError as error:
        raise ModelError(
            f"the cache folder {cache} cannot be written: {error}. Type "
            "AGENTRL_CACHE=SOME_FOLDER before the command"
        ) from error
    return folder


def resolve_cache_folder() -> Path:
    """``AGENTRL_CACHE``, else ``XDG_CACHE_HOME/agentrl``, else ``~/.cache/agentrl``."""
    if own := os.environ.get("AGENTRL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentrl"


def _wait_for_lock(path: Path, observer: Observer, check_stop: CheckStop) -> FileLock:
    """The lock, held; a process that dies lets go of it."""
    lock = FileLock(path)
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    message = f"another process is making {path.stem}: waiting for it"
    while True:
        try:
            return lock.acquire(timeout=_LOCK_POLL_SECONDS).lock
        except Timeout:
            if message:
                observer.on_message(message)
                message = ""
        check_stop()
        if time.monotonic() > deadline:
            raise RunError(
                f"another process has held {path} for {_LOCK_TIMEOUT_SECONDS:.0f} seconds. End "
                "it, or type AGENTRL_CACHE=ANOTHER_FOLDER before the command"
            )


def build_calculator_config(output_path: str) -> SftConfig:
    """The warm start of the built-in model; ``configs/sft-calculator.yaml`` says the same."""
    return SftConfig(
        output_path=output_path,
        model=SftModelConfig(
            new=NewModelConfig(num_layers=3, initializer_range=0.06), dtype="float32"
        ),
        dataset=SftDatasetConfig(
            path="agentrl_cli.models.calculator_tasks:build_demonstrations", shuffle=False
        ),
        train=SftTrainConfig(
            batch_tokens=1024,
            learning_rate=2.0e-3,
            min_learning_rate=1.0e-4,
            warmup_steps=20,
            device="cpu",
            num_threads=2,
        ),
    )


def compute_digest() -> str:
    """Twelve hex digits of all that the model is made from: a change makes another model."""
    digest = hashlib.sha256()
    recipe = build_calculator_config("").model_dump(mode="json")
    digest.update(json.dumps(recipe, sort_keys=True).encode())
    for name in ("torch", "transformers", "tokenizers"):
        digest.update(f"{name} {metadata.version(name)}\n".encode())
    room = resources.files("agentrl_cli.models")
    for source in sorted(room.iterdir(), key=lambda source: source.name):
        if source.is_file():
            digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:12]
