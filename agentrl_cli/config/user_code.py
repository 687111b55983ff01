"""Which code is the user's own, and where it failed."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep


def is_of_user(file: str) -> bool:
    """Whether a file is the user's own, and neither agentrl's nor a library's."""
    return not file.startswith(("<", _OWN_FOLDER)) and not is_of_library(file)


def is_of_library(file: str) -> bool:
    """Whether a file of code was installed, and is not the user's own."""
    return file.startswith(_list_library_folders(tuple(sys.path)))


@cache
def _list_library_folders(search_path: tuple[str, ...]) -> tuple[str, ...]:
    """Wherever something was installed: beside this environment's own, those of the system and
    of ``pip install --target``."""
    own = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = (folder for folder in search_path if any(Path(folder).glob("*.dist-info")))
    return tuple(folder.rstrip(os.sep) + os.sep for folder in {*own, *installed})


def find_own_line(error: BaseException, *, besides: Collection[str]) -> str | None:
    """``file:line: code`` where the user's own code was last, or else a library's.

    Args:
        error: what was raised there.
        besides: files that do not count.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "importlib" not in f.filename and f.filename not in besides]
    own = [f for f in outside if not is_of_library(f.filename)] or outside
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else None


def format_user_traceback(
    error: BaseException, *, without_user_code: Literal["everything", "nothing"] = "everything"
) -> str:
    """The traceback from the first frame on that is the user's code.

    What stands before it, of agentrl, the framework and Python, called it and is not at fault.

    Args:
        error: what was raised.
        without_user_code: what is shown of one in which no frame is the user's.
    """
    shown = traceback.TracebackException.from_exception(error)
    has_user_code = False
    for one in _walk_shown(shown):
        first = next((n for n, f in enumerate(one.stack) if is_of_user(f.filename)), None)
        has_user_code |= first is not None
        one.stack = traceback.StackSummary.from_list(list(one.stack)[first or 0 :])
    if without_user_code == "nothing" and not has_user_code:
        return ""
    return "".join(shown.format())


def _walk_shown(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    pending = [shown]
    while pending:
        one = pending.pop()
        yield one
        others = (one.__cause__, one.__context__, *(one.exceptions or ()))
        pending += [other for other in others if other is not None]
