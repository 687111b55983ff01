"""A micro-batch that could not be trained on, kept to be looked at: safetensors and JSON.

Everything in it is numbers and text; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.store.files import atomic_file, store_errors, write_text

_TENSORS = "micro_batch.safetensors"
#: Written last: a folder without it was left half written.
_FACTS = "micro_batch.json"

#: Counts changes of the layout.
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredMicroBatch:
    """What :func:`write_micro_batch` wrote."""

    path: Path
    facts: dict[str, Any]
    """``step``, ``what``, ``samples`` (a mapping each)..."""
    tensors: dict[str, np.ndarray[Any, Any]]
    """``input_ids`` of all samples end to end; everything else has one value per target."""


def write_micro_batch(
    path: Path, facts: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Writes the folder ``path``, or replaces what is in it.

    Raises:
        StoreError: the disk is full, or the folder cannot be written to.
    """
    with store_errors(path):
        (path / _FACTS).unlink(missing_ok=True)
    with atomic_file(path / _TENSORS) as file:
        file.write(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))
    text = json.dumps({"format_version": FORMAT_VERSION, **facts}, indent=2, allow_nan=False)
    write_text(path / _FACTS, text + "\n")


def read_micro_batch(path: Path) -> StoredMicroBatch:
    """What is stored in the folder ``path``.

    Raises:
        RunFolderError: it is no such folder.
        StoreError: it is damaged.
    """
    if not (path / _FACTS).is_file():
        raise RunFolderError(
            f"{path} is no saved micro-batch ({_FACTS} is missing). Those of a run are "
            "RUN/micro-batches/step-*; agentrl inspect-trajectories RUN names them"
        )
    with store_errors(path, "read"):
        text, content = (path / _FACTS).read_bytes(), (path / _TENSORS).read_bytes()
    try:
        facts, tensors = json.loads(text), load(content)
        if facts["format_version"] != FORMAT_VERSION:
            raise StoreError(
                f"{path}: was saved by another version of agentrl (format "
                f"{facts['format_version']}, this one reads {FORMAT_VERSION})"
            )
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StoreError(f"{path}: is damaged ({error.__class__.__name__}: {error})") from None
    return StoredMicroBatch(path, facts, tensors)


def is_complete(path: Path) -> bool:
    """True where a micro-batch was written whole."""
    return (path / _FACTS).is_file()
