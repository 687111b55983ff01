"""The rules of the house that a reader would otherwise have to keep in mind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "agentrl_cli"

#: Each room may import itself and those before it.
ORDER = (
    "base",
    "config",
    "store",
    "engine",
    "models",
    "tracking",
    "agents",
    "rollout",
    "train",
    "launch",
)
#: Files beside the rooms that everybody may import.
BASE_FILES = {"errors", "log", "records", "breaks", "scores", "guard"}
MAY_IMPORT: dict[str, set[str]] = {
    room: set(ORDER[: index + 1]) for index, room in enumerate(ORDER)
}
# A model is made without a run.
MAY_IMPORT["models"] -= {"store"}
# Training evaluates before, in between and after.
MAY_IMPORT["launch"] |= {"evaluate"}
MAY_IMPORT["evaluate"] = MAY_IMPORT["rollout"] | {"evaluate"}
MAY_IMPORT["inspector"] = {"base", "config", "store", "inspector"}
MAY_IMPORT["cli"] = {"base", "config", "cli"}
#: Inside function bodies commands may import anything; nobody else may.
MAY_DEFER = {"cli"}

TORCH_AT_MODULE_LEVEL = ("train/", "models/", "engine/embedded")
NOWHERE = {"vllm", "sglang"}
RAY_ALONE_IN = "launch/ray.py"
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
#: THE loop may be longer than other functions.
MAX_LOOP_LINES = 100
LOOP_FILES = ("train/loop.py", "launch/loop.py")


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    module: str
    line: int
    deferred: bool
    """True inside a function."""
    for_types: bool
    """True under ``if TYPE_CHECKING``."""


def find_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of_path(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "base"


def room_of_module(module: str) -> str | None:
    """The room of ``agentrl_cli.store.layout``; None for modules that are not ours."""
    parts = module.split(".")
    if parts[0] != "agentrl_cli":
        return None
    return "base" if len(parts) == 1 or parts[1] in BASE_FILES else parts[1]


def find_imports(tree: ast.AST) -> Iterator[Import]:
    def walk(node: ast.AST, deferred: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, deferred, for_types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield Import(node.module or "", node.lineno, deferred, for_types)
            for alias in node.names:
                # ``from agentrl_cli import store`` imports the room that it names.
                if node.module == "agentrl_cli":
                    yield Import(f"agentrl_cli.{alias.name}", node.lineno, deferred, for_types)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            under_types = (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Name)
                and node.test.id == "TYPE_CHECKING"
                and child in node.body
            )
            yield from walk(child, inside, for_types or under_types)

    yield from walk(tree, False, False)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


#: The doors of the package, lazy names and the command, lead to every room.
_DOORS = ("__init__.py", "__main__.py")


@pytest.mark.parametrize(
    "path", [path for path in find_files() if name_of(path) not in _DOORS], ids=name_of
)
def test_rooms_import_only_what_stands_to_their_left(path: Path) -> None:
    room = room_of_path(path)
    wrong = []
    for item in find_imports(parse(path)):
        target = room_of_module(item.module)
        if target is None or item.for_types or target in MAY_IMPORT[room]:
            continue
        if item.module == "agentrl_cli.__version__" or (item.deferred and room in MAY_DEFER):
            continue
        wrong.append(f"{name_of(path)}:{item.line}: {room} imports {item.module}")
    assert wrong == []


@pytest.mark.parametrize("path", find_files(), ids=name_of)
def test_no_import_inside_a_function_breaks_a_circle(path: Path) -> None:
    """Deferred imports are for heavy libraries; of our own modules only the commands defer."""
    if room_of_path(path) in MAY_DEFER:
        return
    wrong = [
        f"{name_of(path)}:{item.line}: {item.module}"
        for item in find_imports(parse(path))
        if item.deferred
        and room_of_module(item.module) is not None
        # Modules that load torch are heavy, whoever wrote them.
        and not loads_torch(item.module)
    ]
    assert wrong == []


def loads_torch(module: str) -> bool:
    path = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    return path.is_file() and name_of(path).startswith(TORCH_AT_MODULE_LEVEL)


@pytest.mark.parametrize("path", find_files(), ids=name_of)
def test_heavy_libraries_load_where_they_belong(path: Path) -> None:
    name, wrong = name_of(path), []
    for item in find_imports(parse(path)):
        library = item.module.split(".")[0]
        where = f"{name}:{item.line}: {item.module}"
        if library in NOWHERE or (library == "ray" and name != RAY_ALONE_IN):
            wrong.append(where)
        at_module_level = not item.deferred and not item.for_types
        if library == "torch" and at_module_level and not name.startswith(TORCH_AT_MODULE_LEVEL):
            wrong.append(where)
    assert wrong == []


@pytest.mark.parametrize("path", find_files(), ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    name, wrong = name_of(path), []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        wrong.append(f"{name} has {num_lines} lines, allowed are {MAX_FILE_LINES}")
    allowed = MAX_LOOP_LINES if name in LOOP_FILES else MAX_FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > allowed:
                wrong.append(f"{name}:{node.lineno}: {node.name} has {length} lines ({allowed})")
    assert wrong == []


@pytest.mark.parametrize("path", find_files(), ids=name_of)
def test_names_say_what_is_inside(path: Path) -> None:
    assert path.stem not in FORBIDDEN_NAMES


@pytest.mark.parametrize("path", find_files(), ids=name_of)
def test_no_error_is_swallowed(path: Path) -> None:
    """A handler of every error must do something; a bare one may not exist at all."""
    wrong = []
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        where = f"{name_of(path)}:{node.lineno}"
        if node.type is None:
            wrong.append(f"{where}: bare except")
        if is_broad(node.type) and all(is_nothing(s) for s in node.body):
            wrong.append(f"{where}: the error is swallowed")
    assert wrong == []


def is_broad(caught: ast.expr | None) -> bool:
    names = {n.id for n in ast.walk(caught) if isinstance(n, ast.Name)} if caught else {"Exception"}
    return bool(names & {"Exception", "BaseException"})


def is_nothing(statement: ast.stmt) -> bool:
    """``pass``, ``...`` or a lone string."""
    if isinstance(statement, ast.Pass):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize("path", find_files(), ids=name_of)
def test_configs_are_read_by_attribute(path: Path) -> None:
    """``config.get("x")``, ``config["x"]`` and ``getattr(config, "x", ...)`` hide typing errors."""
    wrong = []
    for node in ast.walk(parse(path)):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Subscript) and is_config(node.value):
            wrong.append(f"{where}: [...] on a config")
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "get":
            if is_config(function.value):
                wrong.append(f"{where}: .get on a config")
        elif (
            isinstance(function, ast.Name) and function.id == "getattr" and is_config(node.args[0])
        ):
            wrong.append(f"{where}: getattr on a config")
    assert wrong == []


def is_config(node: ast.expr) -> bool:
    """A name or attribute that stands for one of our configurations, by how we name them."""
    if isinstance(node, ast.Attribute) and node.attr == "config":
        # ``model.config`` is Hugging Face's, which has no type to rely on.
        return isinstance(node.value, ast.Name) and node.value.id == "self"
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name in ("config", "gconfig", "experiment") or name.endswith("_config")


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("try:\n    x()\nexcept (ValueError, Exception):\n    pass", test_no_error_is_swallowed),
        ("try:\n    x()\nexcept:\n    y()", test_no_error_is_swallowed),
        ("config.get('x')", test_configs_are_read_by_attribute),
        ("self.train_config['x']", test_configs_are_read_by_attribute),
        ("getattr(config, 'x', 1)", test_configs_are_read_by_attribute),
        ("import torch", test_heavy_libraries_load_where_they_belong),
        ("def f():\n    import vllm", test_heavy_libraries_load_where_they_belong),
        ("import agentrl_cli.train.losses", test_rooms_import_only_what_stands_to_their_left),
        ("from agentrl_cli import launch", test_rooms_import_only_what_stands_to_their_left),
        (
            "def f():\n    from agentrl_cli.store import layout",
            test_no_import_inside_a_function_breaks_a_circle,
        ),
        ("\n" * 401 + "x = 1", test_files_and_functions_stay_short),
        ("def f():\n" + "    x()\n" * 60, test_files_and_functions_stay_short),
    ],
)
def test_each_rule_catches_its_breach(source: str, rule, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "store" / "made_up.py"
    path.parent.mkdir()
    path.write_text(source)
    with pytest.raises(AssertionError):
        rule(path)
