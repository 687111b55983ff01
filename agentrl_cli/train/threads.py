"""The CPU threads that torch computes with."""

from __future__ import annotations

import os

import torch

from agentrl_cli.config.cores import count_usable_cores


def use_threads(num_threads: int | None, num_processes: int) -> None:
    """Sets the CPU threads of the calling thread, which OpenMP keeps apart.

    Without ``num_threads`` and OMP_NUM_THREADS, this process's part of the usable cores.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_usable_cores() // num_processes))
