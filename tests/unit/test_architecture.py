"""The rules of the house that a reader would otherwise have to keep in mind.

Every rule takes the parsed modules of the package and gives its violations, one a line.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "agentrl_cli"

#: Each room may import itself and those before it; ``base`` are the files beside the rooms.
ORDER = (
    *("base", "config", "store", "engine", "models", "tracking", "agents", "rollout", "train"),
    "launch",
)
MAY_IMPORT = {room: set(ORDER[: index + 1]) for index, room in enumerate(ORDER)}
# A model is made without a run.
MAY_IMPORT["models"] -= {"store"}
# Training evaluates before, in between and after.
MAY_IMPORT["launch"] |= {"evaluate"}
MAY_IMPORT["evaluate"] = MAY_IMPORT["rollout"] | {"evaluate"}
MAY_IMPORT["inspector"] = {"base", "config", "store", "inspector"}
MAY_IMPORT["cli"] = {"base", "config", "cli"}
#: The ways into the package, lazy names and the command, lead to every room.
ENTRANCES = ("__init__.py", "__main__.py")

TORCH_AT_MODULE_LEVEL = ("train/", "models/", "engine/embedded/")
SERVERS = ("vllm", "sglang")
RAY_ALONE_IN = "launch/ray/"

#: What ``agentrl init`` writes is the user's code.
TEMPLATES = PACKAGE / "cli" / "new_project" / "templates"

FORBIDDEN_NAMES = ("utils", "util", "common", "helpers", "helper", "misc")
LOOP = "train/loop.py"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 100
MAX_ROOM_FILES = 13
#: A cluster, and run folders on object storage, took 2,600 lines of them; ranks of torchrun and the
#: scripts of Slurm 550.
MAX_PACKAGE_LINES = 57_500
MAX_PACKAGE_FILES = 288
MAX_TEST_LINES = 49_800


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    module: str
    line: int
    is_deferred: bool
    """True inside a function."""
    is_for_types: bool
    """True under ``if TYPE_CHECKING``."""


class Module:
    """One parsed file of the package."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        """``train/loop.py``."""
        self.num_lines = len(text.splitlines())
        self.nodes = list(ast.walk(tree := ast.parse(text)))
        self.imports = list(_find_imports(tree, is_deferred=False, is_for_types=False))

    @property
    def path(self) -> PurePosixPath:
        return PurePosixPath(self.name)

    @property
    def room(self) -> str:
        return self.path.parts[0] if len(self.path.parts) > 1 else "base"


def _find_imports(node: ast.AST, *, is_deferred: bool, is_for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, is_deferred, is_for_types)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        yield Import(node.module or "", node.lineno, is_deferred, is_for_types)
        if node.module == "agentrl_cli":
            # ``from agentrl_cli import store`` imports the room that it names.
            for alias in node.names:
                name = f"agentrl_cli.{alias.name}"
                yield Import(name, node.lineno, is_deferred, is_for_types)
    elif isinstance(node, ast.expr):
        return
    is_deferred |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    is_guard = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in ast.iter_child_nodes(node):
        under_guard = is_for_types or (is_guard and child in node.body)
        yield from _find_imports(child, is_deferred=is_deferred, is_for_types=under_guard)


def load(package: Path) -> list[Module]:
    return [
        Module(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
        if TEMPLATES not in path.parents
    ]


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return load(PACKAGE)


def find_room(module: str, names: set[str]) -> str | None:
    """The room of ``agentrl_cli.store.layout``; None for modules that are not ours."""
    parts = module.split(".")
    if parts[0] != "agentrl_cli":
        return None
    return "base" if len(parts) == 1 or f"{parts[1]}.py" in names else parts[1]


def rooms_import_only_what_stands_to_their_left(modules: Sequence[Module]) -> Iterator[str]:
    names = {module.name for module in modules}
    for module in modules:
        for item in module.imports:
            room = find_room(item.module, names)
            if room is None or item.is_for_types or module.name in ENTRANCES:
                continue
            if item.module == "agentrl_cli.__version__" or room in MAY_IMPORT[module.room]:
                continue
            if module.room != "cli" or not item.is_deferred:
                yield f"{module.name}:{item.line}: {module.room} imports {item.module}"


def imports_in_functions_defer_heavy_libraries_alone(modules: Sequence[Module]) -> Iterator[str]:
    """Of our own modules only commands defer any, and others those that load torch or Ray."""
    names = {module.name for module in modules}
    for module in modules:
        for item in module.imports:
            if not item.is_deferred or module.room == "cli":
                continue
            is_ours = find_room(item.module, names) is not None
            path = "/".join(item.module.split(".")[1:]) + "/"
            if is_ours and not path.startswith((*TORCH_AT_MODULE_LEVEL, RAY_ALONE_IN)):
                yield f"{module.name}:{item.line}: {item.module}"


def heavy_libraries_load_where_they_belong(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        for item in module.imports:
            library = item.module.split(".")[0]
            is_early = not item.is_deferred and not item.is_for_types
            if (
                library in SERVERS
                or (library == "ray" and not module.name.startswith(RAY_ALONE_IN))
                or (
                    library == "torch"
                    and is_early
                    and not module.name.startswith(TORCH_AT_MODULE_LEVEL)
                )
            ):
                yield f"{module.name}:{item.line}: {item.module}"


def file_names_say_what_is_inside(modules: Sequence[Module]) -> Iterator[str]:
    """No name that says nothing, and none that is told from another by its folder alone."""
    places = defaultdict(list)
    for module in modules:
        if module.path.stem in FORBIDDEN_NAMES:
            yield f"{module.name}: a name that says nothing"
        if module.path.stem != "__init__":
            places[module.path.name].append(module.name)
    yield from (f"one name: {', '.join(found)}" for found in places.values() if len(found) > 1)


def public_classes_have_names_of_their_own(modules: Sequence[Module]) -> Iterator[str]:
    places = defaultdict(list)
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    for name, found in places.items():
        if len(found) > 1:
            yield f"{name}: {', '.join(found)}"


def files_and_functions_stay_short(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        if module.num_lines > MAX_FILE_LINES:
            yield f"{module.name} has {module.num_lines} lines, allowed are {MAX_FILE_LINES}"
        allowed = MAX_LOOP_LINES if module.name == LOOP else MAX_FUNCTION_LINES
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > allowed:
                    yield f"{module.name}:{node.lineno}: {node.name} has {length} lines ({allowed})"


def rooms_hold_a_dozen_files(modules: Sequence[Module]) -> Iterator[str]:
    sizes: defaultdict[str, int] = defaultdict(int)
    for module in modules:
        sizes[str(module.path.parent)] += module.path.stem != "__init__"
    for room, size in sizes.items():
        if size > MAX_ROOM_FILES:
            yield f"{room} has {size} files, allowed are {MAX_ROOM_FILES}: give it sub-rooms"


def no_error_is_swallowed(modules: Sequence[Module]) -> Iterator[str]:
    """A handler of every error must do something; a bare one may not exist at all."""
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            where = f"{module.name}:{node.lineno}"
            if node.type is None:
                yield f"{where}: bare except"
                continue
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            is_broad = bool(caught & {"Exception", "BaseException"})
            if is_broad and all(_does_nothing(statement) for statement in node.body):
                yield f"{where}: the error is swallowed"


def _does_nothing(statement: ast.stmt) -> bool:
    """``pass``, ``...`` or a lone string."""
    if isinstance(statement, ast.Pass):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def configs_are_read_by_attribute(modules: Sequence[Module]) -> Iterator[str]:
    """``config.get("x")``, ``config["x"]`` and ``getattr(config, "x", ...)`` hide typing errors."""
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Subscript) and _is_config(node.value):
                yield f"{module.name}:{node.lineno}: [...] on a config"
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            is_get = isinstance(called, ast.Attribute) and called.attr == "get"
            if is_get and _is_config(called.value):
                yield f"{module.name}:{node.lineno}: .get on a config"
            is_getattr = isinstance(called, ast.Name) and called.id == "getattr"
            if is_getattr and _is_config(node.args[0]):
                yield f"{module.name}:{node.lineno}: getattr on a config"


def _is_config(node: ast.expr) -> bool:
    """A name or attribute that stands for one of our configurations, by how we name them."""
    if isinstance(node, ast.Attribute) and node.attr == "config":
        # ``model.config`` is Hugging Face's, which has no type to rely on.
        return isinstance(node.value, ast.Name) and node.value.id == "self"
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name in ("config", "gconfig", "experiment") or name.endswith("_config")


RULES: tuple[Callable[[Sequence[Module]], Iterator[str]], ...] = (
    rooms_import_only_what_stands_to_their_left,
    imports_in_functions_defer_heavy_libraries_alone,
    heavy_libraries_load_where_they_belong,
    file_names_say_what_is_inside,
    public_classes_have_names_of_their_own,
    files_and_functions_stay_short,
    rooms_hold_a_dozen_files,
    no_error_is_swallowed,
    configs_are_read_by_attribute,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule, package: list[Module]) -> None:
    violations = list(rule(package))
    assert not violations, "\n".join(violations)


def test_the_package_stays_small(package: list[Module]) -> None:
    num_files, num_lines = len(package), sum(module.num_lines for module in package)
    assert num_files <= MAX_PACKAGE_FILES
    assert num_lines <= MAX_PACKAGE_LINES


def test_the_tests_stay_small() -> None:
    texts = (path.read_text(encoding="utf-8") for path in (PROJECT / "tests").rglob("*.py"))
    num_lines = sum(len(text.splitlines()) for text in texts)
    assert num_lines <= MAX_TEST_LINES


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (RULES[0], "store/x.py", "import agentrl_cli.train.loss.policy_loss"),
        (RULES[0], "store/x.py", "from agentrl_cli import launch"),
        (RULES[0], "cli/x.py", "from agentrl_cli.store import layout"),
        (RULES[1], "store/x.py", "def f():\n    from agentrl_cli.store import layout"),
        (RULES[2], "store/x.py", "import torch"),
        (RULES[2], "store/x.py", "def f():\n    import vllm"),
        (RULES[2], "launch/x.py", "def f():\n    import ray"),
        (RULES[3], "store/utils.py", ""),
        (RULES[3], "store/layout.py", ""),
        (RULES[4], "store/x.py", "class Layout: ..."),
        (RULES[5], "store/x.py", "\n" * 601 + "x = 1"),
        (RULES[5], "store/x.py", "def f():\n" + "    x()\n" * 60),
        (RULES[7], "store/x.py", "try:\n    x()\nexcept (ValueError, Exception):\n    pass"),
        (RULES[7], "store/x.py", "try:\n    x()\nexcept:\n    y()"),
        (RULES[8], "store/x.py", "config.get('x')"),
        (RULES[8], "store/x.py", "self.train_config['x']"),
        (RULES[8], "store/x.py", "getattr(config, 'x', 1)"),
    ],
)
def test_each_rule_catches_its_breach(rule, name: str, source: str) -> None:
    others = [Module("engine/layout.py", "class Layout: ..."), Module("errors.py", "")]
    assert len(list(rule([*others, Module(name, source)]))) == 1


def test_what_is_allowed_is_no_breach() -> None:
    sources = {
        "errors.py": "x = 1",
        "cli/x.py": "import agentrl_cli.errors\ndef f():\n    import agentrl_cli.launch.plan",
        "engine/embedded/y.py": "import torch",
        "launch/z.py": "def f():\n    import torch\n    from agentrl_cli.models import tiny",
        "launch/ray/w.py": "import ray",
        "store/v.py": "if TYPE_CHECKING:\n    import torch\n    import agentrl_cli.launch.plan",
    }
    modules = [Module(name, source) for name, source in sources.items()]
    assert [found for rule in RULES for found in rule(modules)] == []
