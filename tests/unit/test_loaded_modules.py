"""What a process does not load: every start waits for what it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers"}
SERVING = {"uvicorn", "starlette", "jinja2", "tokenizers"}


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        # A mistake in the input is found before torch is loaded.
        ("agentrl_cli.launch.local_run", HEAVY),
        ("agentrl_cli.launch.rollout_workers.rollout_program", HEAVY),
        ("agentrl_cli.rollout.workers.worker_program", HEAVY | SERVING),
        (
            "agentrl_cli.rollout.reward_process",
            HEAVY | SERVING | {"openai", "pydantic", "numpy", "pyarrow"},
        ),
    ],
)
def test_a_fresh_process_loads_little(module: str, unused: set[str]) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint(unused)
