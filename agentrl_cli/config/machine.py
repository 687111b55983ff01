"""The machine that a run is placed on, as far as its configuration depends on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware that processes are placed on."""

    gpu_ids: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; those that a process started now would see."""
    num_cores: int = 1
    """CPU cores that this process may use."""
    python_path: str = ""
    """PYTHONPATH as it is."""

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Self:
        """This machine, without loading torch."""
        return cls(
            gpu_ids=list_visible_gpus(env),
            num_cores=count_usable_cores(),
            python_path=env.get("PYTHONPATH", ""),
        )

    @property
    def num_gpus(self) -> int:
        """How many GPUs there are to use."""
        return len(self.gpu_ids)


def list_visible_gpus(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """GPUs that a process started now would see, as CUDA_VISIBLE_DEVICES names them."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = [path.name[6:] for path in Path("/dev").glob("nvidia*")]
        return tuple(sorted((name for name in devices if name.isdigit()), key=int))
    # CUDA itself stops at the first name that is none.
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or name == "-1":
            break
        names.append(name)
    return tuple(names)


def count_usable_cores() -> int:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
