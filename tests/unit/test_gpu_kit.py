"""The kit for a GPU machine: what it imports there, and what a failing part costs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_kit

_BLOCKED = """
import sys
for name in ("pyarrow", "datasets"):
    sys.modules[name] = None
import agentrl_cli.engine.embedded.embedded_engine
import agentrl_cli.train.learner
"""


@pytest.mark.slow
def test_learner_and_embedded_engine_need_neither_pyarrow_nor_datasets():
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_part_past_its_deadline_costs_its_own_rows_alone():
    ((name, figure),) = gpu.run_part("updates-0.5b", 0.1, is_rehearsal=True)
    assert name == "updates-0.5b"
    assert figure.startswith("ENDED after")


@pytest.mark.slow
def test_a_rehearsed_part_gives_its_rows():
    ((name, figure),) = gpu.run_part("sharing", 120, is_rehearsal=True)
    assert name.startswith("prefix sharing")
    assert figure.endswith("x (goal 3 x)")


def test_a_shrunk_wheel_lists_what_it_holds(tmp_path: Path) -> None:
    wheel = tmp_path / "big-1-py3-none-any.whl"
    files = {"big/core.py": "x = 1", "big/tests/data.py": "y" * 1000}
    with zipfile.ZipFile(wheel, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
        record = "".join(f"{name},sha256=abc,1\n" for name in files)
        made.writestr("big-1.dist-info/RECORD", record + "big-1.dist-info/RECORD,,\n")
    gpu_kit.shrink_wheel(wheel, ("big/tests/*",))
    with zipfile.ZipFile(wheel) as shrunk:
        assert shrunk.namelist() == ["big/core.py", "big-1.dist-info/RECORD"]
        assert shrunk.read("big/core.py") == b"x = 1"
        record = shrunk.read("big-1.dist-info/RECORD").decode()
        assert record == "big/core.py,sha256=abc,1\nbig-1.dist-info/RECORD,,\n"
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
