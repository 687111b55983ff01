"""Import paths of the user's own code: ``package.module.name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

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
#: Where code lies that is not the user's: a line of it explains nothing.
_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


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
    if not separator or not module_name or not name:
        raise ImportPathError(
            f"{key}: {import_path!r} is not an import path. Allowed: package.module.name, "
            "package.module:name or path/to/file.py:name"
        )
    where = f"{key}: {import_path!r}"
    is_file = module_name.endswith(".py")
    module = _load_file(Path(module_name), where) if is_file else _load_module(module_name, where)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportPathError(f"{where}: {_describe_missing(module, name)}") from None


def _describe_missing(module: ModuleType, name: str) -> str:
    """What to write instead of ``name``, which is not in ``module``."""
    is_file = module.__name__.startswith("_agentrl_file_")
    shown = Path(module.__file__ or "").name if is_file else module.__name__
    is_package = hasattr(module, "__path__")
    if is_package and importlib.util.find_spec(f"{module.__name__}.{name}") is not None:
        inner = f"{module.__name__}.{name}"
        return f"{inner} is a module: add the name of what is in it, such as {inner}.build"
    names = _list_own_names(module)
    nearest = format_nearest(name, names) if names else "it has no function and no class"
    return f"{shown} has no {name!r}; {nearest}"


def _list_own_names(module: ModuleType) -> list[str]:
    """Names of what a path can lead to and the module made itself; where it made nothing, of all
    that it has: a package may only pass on what its modules define."""
    public = {n: v for n, v in vars(module).items() if not n.startswith("_") and callable(v)}
    # Functions and classes say where they were made; what else can be called (a partial) does not.
    own = [
        name
        for name, value in public.items()
        if not hasattr(value, "__qualname__")
        or getattr(value, "__module__", None) == module.__name__
    ]
    return own or list(public)


def _load_module(module_name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise ImportPathError(
                f"{where}: there is no module {missing!r}. agentrl looked in the current folder "
                f"({Path.cwd().name}/) and in the installed packages. For a single file, write "
                "path/to/file.py:name"
            ) from None
        raise ImportPathError(_format_own_error(where, error)) from error
    except (Exception, SystemExit) as error:
        # A script that ends itself must not end the command without a word.
        raise ImportPathError(_format_own_error(where, error)) from error


def _load_file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ImportPathError(
            f"{where}: no such file: {path} (from the current folder, {Path.cwd().name}/)"
        )
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module_name = f"_agentrl_file_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportPathError(f"{where}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ImportPathError(_format_own_error(where, error)) from error
    return module


def _format_own_error(where: str, error: BaseException) -> str:
    """The module's own error, with the last line of the user's code that led to it."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        place = find_own_line(error, besides=(__file__,)) or "no line known"
    return (
        f"{where}: the module was found but does not import: "
        f"{type(error).__name__}: {error}{advise_extra(error)}\n  at {place}"
    )


def find_own_line(error: BaseException, *, besides: Collection[str]) -> str | None:
    """``file:line: code`` where the user's own code was last, or else a library's.

    Args:
        error: what was raised there.
        besides: files that do not count.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "importlib" not in f.filename and f.filename not in besides]
    own = [f for f in outside if not f.filename.startswith(_LIBRARIES)] or outside
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else None


def advise_extra(error: BaseException) -> str:
    """What to install, as a clause, where an agent framework is not; else nothing."""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    extra = _EXTRAS.get(missing.partition(".")[0])
    return f". Type uv pip install 'agentrl-cli[{extra}]'" if extra else ""
