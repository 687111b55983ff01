"""The README's commands in an empty folder, with nothing of the project but its wheel."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

#: Keeps the example small enough for a test, and its model off the hub.
SMALL = "model.path=tiny gconfig.max_tokens=8 train_dataset.batch_size=1 train.total_steps=1"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("agentrl_cli-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    tops = {name.split("/")[0] for name in names}
    # The page of agentrl report is made of these.
    assert "agentrl_cli/inspector/report/assets/report.css" in names
    assert tops == {"agentrl_cli", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    install = [str(programs / "pip"), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return programs


def run(program: Path, *words: str, folder: Path) -> str:
    """What a program of the environment printed, which ended well."""
    # Folders of PYTHONPATH have no .pth files read: nothing leads to the clone.
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(program), *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.openai_agents
@pytest.mark.timeout(900)
def test_the_users_own_agent_of_the_readme(installed: Path, tiny: Path, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text[text.index("## Your own agent") :]
    (tmp_path / "my_agent.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    (tmp_path / "lexicon.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    rows = re.findall(r"^`(\{\"question.*\})`", text, re.MULTILINE)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    commands = re.findall(r"^    agentrl (.*?)(?:  +#.*)?$", text, re.MULTILINE)[:5]
    names = [command.split()[0] for command in commands]
    assert names == ["train", "train", "inspect-trajectories", "eval", "export"]

    printed = []
    for command in commands:
        if command.startswith(("train", "eval")):
            command += f" {SMALL}"
        command = command.replace("step-000100", "step-000001")
        printed.append(run(installed / "agentrl", *shlex.split(command), folder=tmp_path))
    assert "agent_builder_path: my_agent.build_agent" in printed[0]
    assert "step 1/1" in printed[1]
    assert (tmp_path / "lexicon-model" / "config.json").is_file()


def make_project(installed: Path, folder: Path, framework: str) -> Path:
    """The folder of a new project, in which its own tests have passed."""
    words = ("init", "demo", "--framework", framework)
    printed = run(installed / "agentrl", *words, folder=folder)
    assert "agentrl train --config train.yaml" in printed
    assert "pip install" not in printed
    assert " passed" in run(installed / "python", "-m", "pytest", "-q", folder=folder / "demo")
    return folder / "demo"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_project_is_tested_and_trained(
    installed: Path, model_folder: Path, tmp_path: Path
) -> None:
    project = make_project(installed, tmp_path, "plain")
    small = [word.replace("tiny", str(model_folder)) for word in SMALL.split()]
    few = ("train.total_steps=2", "gconfig.n_samples=2", "valid_dataset.limit=2")
    words = ("train", "--config", "train.yaml", *small, *few)
    printed = run(installed / "agentrl", *words, folder=project)
    assert "step 2/2" in printed
    assert "time of its trajectories" in printed
    assert (project / "runs" / "demo" / "t0" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("openai-agents", marks=pytest.mark.openai_agents),
        pytest.param("langgraph", marks=pytest.mark.langgraph),
        pytest.param("camel", marks=pytest.mark.camel),
        pytest.param("anthropic", marks=pytest.mark.anthropic),
    ],
)
def test_a_new_project_of_each_framework_is_tested_and_tried(
    installed: Path, model_folder: Path, framework: str, tmp_path: Path
) -> None:
    project = make_project(installed, tmp_path, framework)
    words = ("train", "--config", "train.yaml", "--dry-run", f"model.path={model_folder}")
    printed = run(installed / "agentrl", *words, folder=project)
    assert "nothing was started" in printed
