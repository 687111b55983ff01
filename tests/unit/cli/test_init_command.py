"""A project is there as a whole or not at all, and its files fit each other and its model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from agentrl_cli.cli.new_project import init_command as init
from agentrl_cli.cli.new_project.init_command import FRAMEWORKS, Framework, init_command
from agentrl_cli.cli.new_project.templates import calculator, make_rows
from agentrl_cli.config.config_file import load_config
from agentrl_cli.errors import UserInputError
from agentrl_cli.models import calculator_tasks


@pytest.fixture(autouse=True)
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command is typed in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_project_of_every_framework(framework: str, current: Path):
    init_command("demo", framework)
    folder = current / "demo"
    assert sorted(path.name for path in current.iterdir()) == ["demo"]
    names = {path.name for path in folder.iterdir()}
    assert {"agent.py", "reward.py", "train.yaml", "test_project.py", ".gitignore"} <= names
    for path in folder.glob("*.py"):
        compile(path.read_text(encoding="utf-8"), path.name, "exec")

    config = load_config(folder / "train.yaml")
    config.check_trainable()
    assert config.experiment_name == "demo"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "$" not in text + (folder / "train.yaml").read_text(encoding="utf-8")
    installs = re.findall(r"agentrl-cli\[(.*?)\]", text)
    assert {extra for typed in installs for extra in typed.split(",")} == (
        {"vllm"} if framework == "plain" else {"vllm", framework}
    )
    # What it says to type for a real model are keys that exist.
    [command] = re.findall(r"agentrl (train [^\n]*\\\n(?:.*\\\n)*.*)", text)
    overrides = [word for word in shlex.split(command) if "=" in word]
    assert load_config(folder / "train.yaml", overrides).engine.kind == "vllm"
    real = dict(
        re.findall(r"real: (\{.*\})\n(?:\w+: \{.*\n)*?(\w+):", (folder / "train.yaml").read_text())
    )
    assert {"model", "engine", "train"} <= set(real.values())
    for value, key in real.items():
        load_config(folder / "train.yaml", [f"{key}={value}"])


def test_its_rows_are_made_by_a_seed_and_share_no_numbers(current: Path):
    init_command("demo")
    rows = make_rows.build_rows(1)
    for split, lines in rows.items():
        text = (current / "demo" / "data" / f"{split}.jsonl").read_text(encoding="utf-8")
        assert [json.loads(line) for line in text.splitlines()] == lines
    assert rows != make_rows.build_rows(2)
    numbers = [frozenset(re.findall(r"\d+", row["question"])) for s in rows.values() for row in s]
    assert len(set(numbers)) == len(numbers) == 192


def test_the_built_in_model_knows_prompt_tool_and_questions():
    assert calculator.SYSTEM_PROMPT == calculator_tasks.SYSTEM_PROMPT
    assert calculator_tasks.CALCULATE_TOOL["function"] == calculator.SCHEMA
    for operator, questions in make_rows.QUESTIONS.items():
        assert set(questions) <= set(calculator_tasks._TEMPLATES[operator])


def test_what_is_missing_and_what_to_type_next(
    current: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    missing = Framework("LangGraph", ("no_such_module_at_all",))
    monkeypatch.setitem(FRAMEWORKS, "langgraph", missing)
    (current / "a b").mkdir()
    init_command("a b/demo", "langgraph")
    printed = capsys.readouterr().out
    assert "pip install 'agentrl-cli[langgraph]'" in printed
    assert "cd 'a b/demo'\n" in printed
    assert "agentrl train --config train.yaml" in printed
    assert (current / "a b" / "demo" / "agent.py").is_file()
    init_command("other")
    assert "pip install" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "framework", "message"),
    [
        ("a b", "plain", "'a b' cannot name a project"),
        ("", "plain", "cannot name a project"),
        (".", "plain", "cannot name a project"),
        ("..", "plain", "cannot name a project"),
        ("-x", "plain", "cannot name a project"),
        ("x" * 121, "plain", "cannot name a project"),
        ("demo", "langraph", "did you mean 'langgraph'"),
        ("no/demo", "plain", "Type: mkdir -p no"),
        ("file", "plain", "there is a file"),
        (f"{'x' * 300}/demo", "plain", "cannot be written: File name too long"),
        ("full", "plain", "it holds .env, f0, f1, f2, f3, f4, f5, f6 and 3 more"),
    ],
)
def test_what_it_refuses_it_does_not_touch(name: str, framework: str, message: str, current: Path):
    (current / "file").write_text("mine")
    (current / "full").mkdir()
    for file in (".env", *(f"f{n}" for n in range(10))):
        (current / "full" / file).touch()
    with pytest.raises(UserInputError, match=re.escape(message)):
        init_command(name, framework)
    assert sorted(path.name for path in current.iterdir()) == ["file", "full"]
    assert (current / "file").read_text() == "mine"
    assert len(list((current / "full").iterdir())) == 11


def test_an_empty_folder_becomes_the_project(current: Path):
    (current / "demo").mkdir()
    init_command("demo")
    assert (current / "demo" / "train.yaml").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_project_is_not_there(
    error: BaseException, current: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(folder: Path, seed: int = 1) -> None:
        folder.mkdir()
        raise error

    monkeypatch.setattr(make_rows, "write_rows", fail)
    with pytest.raises((KeyboardInterrupt, UserInputError)):
        init_command("demo")
    assert list(current.iterdir()) == []


def test_the_templates_are_all_used():
    folder = Path(init.__file__).parent / "templates"
    agents = {f"agent_{name.replace('-', '_')}.py" for name in FRAMEWORKS}
    found = {path.name for path in folder.iterdir() if path.is_file()}
    assert found == agents | set(init._FILES)
