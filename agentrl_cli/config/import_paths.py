"""Import paths of the user's own code: ``package.module.name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl_cli.config.user_code import find_own_line
from agentrl_cli.errors import ImportPathError, format_nearest

#: What brings the package that an agent's module imports.
_EXTRAS = {
    "agents": "openai-agents",
    "anthropic": "anthropic",
    "camel": "camel",
    "langchain_core": "langgraph",
    "langchain_openai": "langgraph",
    "langgraph": "langgraph",
}
#: What the names of modules begin with that were loaded from a file.
_FILE_MODULE = "_agentrl_file_"


def add_current_folder() -> None:
    """Makes modules beside the user's YAML importable, as ``python -m`` does."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def import_object(import_path: str, key: str) -> Any:
    """The object at ``import_path``; ``key`` is the config key it came from, for messages.

    Raises:
        ImportPathError: with the module's own error and its line, or the nearest names.
    """
    add_current_folder()
    module_name, separator, name = import_path.rpartition(":")
    if not separator and not import_path.endswith(".py"):
        module_name, separator, name = import_path.rpartition(".")
    if not module_name or not name:
        raise ImportPathError(
            f"{key}: {import_path!r} is not an import path. Allowed: package.module.name, "
            "package.module:name or path/to/file.py:name"
        )
    where = f"{key}: {import_path!r}"
    load = _load_file if module_name.endswith(".py") else importlib.import_module
    try:
        module = load(module_name)
    except (Exception, SystemExit) as error:
        # SystemExit: a script that ends itself must not end the command without a word.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ImportPathError(
                f"{where}: there is no module {missing!r}. agentrl looked in the current folder "
                f"({Path.cwd().name}/) and in the installed packages. For a single file, write "
                "path/to/file.py:name"
            ) from None
        if isinstance(error, FileNotFoundError) and error.filename == module_name:
            raise ImportPathError(
                f"{where}: no such file: {module_name} (from the current folder, "
                f"{Path.cwd().name}/)"
            ) from None
        place = find_own_line(error, besides=(__file__,)) or "no line known"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        raise ImportPathError(
            f"{where}: the module was found but does not import: "
            f"{type(error).__name__}: {error}{advise_extra(error)}\n  at {place}"
        ) from error
    if not hasattr(module, name):
        raise ImportPathError(f"{where}: {_describe_missing(module, name)}")
    return getattr(module, name)


def _load_file(path: str) -> ModuleType:
    digest = hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:12]
    module_name = f"{_FILE_MODULE}{Path(path).stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    loader = SourceFileLoader(module_name, path)
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _describe_missing(module: ModuleType, name: str) -> str:
    """What to write instead of ``name``, which is not in ``module``."""
    if hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}"):
        inner = f"{module.__name__}.{name}"
        return f"{inner} is a module: add the name of what is in it, such as {inner}.build"
    is_file = module.__name__.startswith(_FILE_MODULE)
    shown = Path(module.__file__ or "").name if is_file else module.__name__
    public = {n: v for n, v in vars(module).items() if not n.startswith("_") and callable(v)}
    # A package may only pass on what its modules define.
    own = [n for n, v in public.items() if getattr(v, "__module__", None) == module.__name__]
    nearest = format_nearest(name, own or public) if public else "it has no function and no class"
    return f"{shown} has no {name!r}; {nearest}"


def advise_extra(error: BaseException) -> str:
    """What to install, as a clause, where an agent framework is not; else nothing."""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    extra = _EXTRAS.get(missing.partition(".")[0])
    return f". Type uv pip install 'agentrl-cli[{extra}]'" if extra else ""
