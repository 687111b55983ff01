from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl_cli.config.import_paths import import_object
from agentrl_cli.config.user_code import is_of_library
from agentrl_cli.errors import ImportPathError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch):
    """The current folder of a user, who never installed their code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("_agentrl_file_", "user_")):
            del sys.modules[name]


def refusal(path: str) -> str:
    with pytest.raises(ImportPathError) as caught:
        import_object(path, "agent_builder_path")
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("agent_builder_path: ")
    return str(caught.value)


def test_code_beside_the_yaml_is_found(folder: Path) -> None:
    (folder / "user_agents").mkdir()
    (folder / "user_agents" / "solver.py").write_text("def build(): return 1")
    assert import_object("user_agents.solver.build", "k")() == 1
    assert import_object("user_agents.solver:build", "k")() == 1


def test_a_file_is_found_and_loaded_once(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "agent.py").write_text("made = object()\ndef build(): return made")
    build = import_object("sub/agent.py:build", "k")
    assert import_object("sub/agent.py:build", "k") is build
    assert import_object(str(folder / "sub" / "agent.py:build"), "k") is build
    # Another one of the same name.
    (folder / "agent.py").write_text("1 / 0")
    refusal("agent.py:build")
    (folder / "agent.py").write_text("build = 'mended'")
    assert import_object("agent.py:build", "k") == "mended"


@pytest.mark.parametrize("path", ["", "x", "x:", ":x", ".x", "x.", "agent.py", "agent.py:"])
def test_what_is_no_import_path(folder: Path, path: str) -> None:
    assert "path/to/file.py:name" in refusal(path)


def test_missing_modules_and_files(folder: Path) -> None:
    text = refusal("user_nowhere.solver.build")
    assert "there is no module 'user_nowhere'" in text
    assert folder.name in text
    (folder / "user_pack").mkdir()
    (folder / "user_pack" / "__init__.py").write_text("")
    (folder / "user_pack" / "other.py").write_text("")
    assert "user_pack.other is a module: add the name" in refusal("user_pack.other")
    assert "there is no module 'user_pack.solver'" in refusal("user_pack.solver.build")
    assert "no such file: nowhere.py" in refusal("nowhere.py:build")


def test_missing_names_offer_the_nearest(folder: Path) -> None:
    (folder / "user_names.py").write_text("def build_agent(): ...\n_hidden = 1")
    text = refusal("user_names.build_agnet")
    assert "user_names has no 'build_agnet'; did you mean 'build_agent'?" in text
    assert "_hidden" not in text
    text = refusal("user_names.py:build_agnet")
    assert "user_names.py has no 'build_agnet'; did you mean 'build_agent'?" in text


def test_names_that_a_module_only_imports_are_not_offered(folder: Path) -> None:
    (folder / "user_own.py").write_text(
        "from __future__ import annotations\nimport json\nfrom collections import Counter\n"
        "from pathlib import Path\nLIMIT = 3\nclass Solver: ...\ndef make(n): ...\n"
    )
    allowed = "allowed: Solver, make"
    assert refusal("user_own.xyzzy").endswith(f"user_own has no 'xyzzy'; {allowed}")
    assert refusal("user_own.py:xyzzy").endswith(f"user_own.py has no 'xyzzy'; {allowed}")
    # A package may pass on what its modules define, and define nothing itself.
    (folder / "user_front.py").write_text("from user_own import Solver, make\n")
    assert refusal("user_front.xyzzy").endswith("allowed: Solver, make")
    (folder / "user_bare.py").write_text("import json\nLIMIT = 3\n")
    assert refusal("user_bare.xyzzy").endswith("no 'xyzzy'; it has no function and no class")


@pytest.mark.parametrize("form", ["user_broken.build", "user_broken.py:build"])
@pytest.mark.parametrize(
    ("source", "error", "place"),
    [
        ("import json\n\nx = json.loads('{')\n", "JSONDecodeError", "user_broken.py:3: x = json"),
        ("x = 1 / 0\n", "ZeroDivisionError: division by zero", "user_broken.py:1: x = 1 / 0"),
        ("import no_such_package\n", "No module named 'no_such_package'", "user_broken.py:1:"),
        ("x = 1\ndef f(:\n", "SyntaxError", "user_broken.py:2"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", "user_broken.py:2: sys.exit(3)"),
        ("from user_other import y\n", "cannot import name 'y'", "user_broken.py:1:"),
    ],
)
def test_a_module_that_fails_shows_its_own_error_and_line(
    folder: Path, form: str, source: str, error: str, place: str
) -> None:
    (folder / "user_broken.py").write_text(source)
    (folder / "user_other.py").write_text("")
    text = refusal(form)
    assert "does not import" in text
    assert error in text
    assert place in text


def test_what_was_installed_is_no_code_of_the_users(tmp_path, monkeypatch):
    """Also in a folder of its own, as ``pip install --target`` does it."""
    target, project = tmp_path / "target", tmp_path / "project"
    (target / "litellm-1.0.dist-info").mkdir(parents=True)
    project.mkdir()
    monkeypatch.setattr(sys, "path", [str(project), str(target), *sys.path])
    assert is_of_library(str(target / "litellm" / "main.py"))
    assert is_of_library(pytest.__file__)
    assert not is_of_library(str(project / "agent.py"))
    assert not is_of_library(str(tmp_path / "elsewhere.py"))
