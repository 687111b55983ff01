"""What a place must do in which run folders last that is no folder of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

#: How long a place may be away before a run ends.
PATIENCE_SECONDS = 120.0


class UnreachableError(Exception):
    """The place did not answer, or refused; the same call may succeed a little later."""


class TaggedContent(NamedTuple):
    """A file's content, and the tag of this version of it."""

    content: bytes
    tag: str


class RemoteFiles(Protocol):
    """The files of one run folder by name: posix paths below it.

    Every method makes one attempt, with a deadline of its own, blocks until it is over, and may be
    called from any thread.

    Raises:
        UnreachableError: by every method.
    """

    url: str
    """What a user calls the run folder."""

    def list_names(self, folder: str = "") -> dict[str, int]:
        """All names below ``folder``, at any depth, with the sizes in bytes."""
        ...

    def get(self, name: str, path: Path) -> bool:
        """Copies a file to ``path``, whole or not at all; False: there is none."""
        ...

    def put(self, name: str, path: Path) -> None:
        """Copies ``path`` here; the name has its old or its new content, never a mixture."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Deletes those of the names that are there."""
        ...

    def read(self, name: str) -> TaggedContent | None:
        """A small file; None: there is none."""
        ...

    def create(self, name: str, content: bytes) -> str | None:
        """The tag of a new file; None: there is one already, which stays as it is."""
        ...

    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        """The tag of the new content; None: the file's tag is not ``tag``, and it stays as it
        is."""
        ...


def format_away(error: UnreachableError) -> str:
    """The message of a run that ends since its place has been away for too long."""
    return (
        f"{error}. It was tried for up to {PATIENCE_SECONDS:g} s. Everything stored there before "
        "is intact. When it can be reached again, type the same command: the run resumes from its "
        "last checkpoint, and learns from the stored trajectories, which are not sampled again"
    )
