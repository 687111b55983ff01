"""The kit for a GPU machine: what it imports there, and what a failing part costs."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import gpu

_BLOCKED = """
import sys
for name in ("pyarrow", "datasets"):
    sys.modules[name] = None
import agentrl_cli.engine.embedded.embedded_engine
import agentrl_cli.train.learner
"""


def test_learner_and_embedded_engine_need_neither_pyarrow_nor_datasets():
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_part_past_its_deadline_costs_its_own_rows_alone():
    ((name, figure),) = gpu.run_part("updates-0.5b", 0.1, is_rehearsal=True)
    assert name == "updates-0.5b"
    assert figure.startswith("ENDED after")


def test_a_rehearsed_part_gives_its_rows():
    ((name, figure),) = gpu.run_part("sharing", 120, is_rehearsal=True)
    assert name.startswith("prefix sharing")
    assert figure.endswith("x (goal 3 x)")
