"""The page as one file: styles, scripts, and as much of the run as fits in.

Nothing is loaded from anywhere else. Trajectories whose details would make the page large go into
scripts in a folder beside it, which the page loads one by one: a page opened from a file may not
read other files, but it may run scripts. What models have said enters the page as data that the
page parses, never as markup, and a content security policy allows no scripts but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.report.block_format import to_text
from agentrl_cli.inspector.report.report_columns import ReportSource, RunColumns
from agentrl_cli.inspector.report.report_data import ReportData
from agentrl_cli.inspector.report.report_details import DetailReader
from agentrl_cli.inspector.trajectory_view import Spell
from agentrl_cli.store.atomic_files import atomic_file, store_errors
from agentrl_cli.store.run_folder import RunFolder

#: Details of up to so many bytes are inside the page: what opens at once everywhere, and what mail
#: takes.
MAX_INLINE_BYTES = 4 * 1024 * 1024

_STYLES = ("vendor/uPlot.min.css", "report.css")
_SCRIPTS = (
    "vendor/uPlot.iife.min.js", "vendor/htm-preact.umd.js", "page_data.js", "formatting.js",
    "navigation.js", "conversation.js", "charts.js", "overview.js", "task_map.js",
    "trajectory_list.js", "trajectory.js", "token_map.js", "side_by_side.js", "evaluations.js",
    "comparison.js", "application.js",
)  # fmt: skip
_SELF, _NONE = "'self'", "'none'"
_SIDE_FILE = re.compile(r"((step|eval)-\d+[\w.\-]*|[A-Z]\.\d+)\.[0-9a-f]{8}\.js")

#: Is told how many of all trajectories are written.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """What was written."""

    path: Path
    num_trajectories: int
    folder: Path | None
    """Of the details; None: they are in the page."""
    num_files: int
    num_bytes: int
    """Of all files."""
    problems: list[str]
    """What could not be read."""


def write_report(
    folder: RunFolder,
    path: Path,
    spell: Spell | None = None,
    *,
    on_progress: OnProgress = lambda _done, _total: None,
) -> WrittenReport:
    """Writes the page of a run; an earlier one stays until the new one is complete.

    Raises:
        StoreError: the disk is full, or the file cannot be written to.
    """
    run, head = ReportData(folder, has_tokenizer=spell is not None).read()
    return write_page(run, head, path, spell, on_progress=on_progress)


def write_page(
    run: RunColumns,
    head: dict[str, Any],
    path: Path,
    spell: Spell | None = None,
    *,
    on_progress: OnProgress = lambda _done, _total: None,
) -> WrittenReport:
    """Writes the page of some trajectories; an earlier one stays until the new one is complete.

    Args:
        run: the trajectories.
        head: what the page shows before it has them.
        path: where the page is written.
        spell: gives the texts of tokens.
        on_progress: is told how many trajectories are written.

    Raises:
        StoreError: the disk is full, or the file cannot be written to.
    """
    problems = [s.problem for s in run.sources if s.problem]
    details = _Details(path)
    reader = DetailReader(spell)
    num_done = 0
    for source in run.sources:
        try:
            for name, rows, block in _read_details(source, reader):
                details.add(name, block)
                num_done += rows
                on_progress(num_done, run.num_rows)
        except AgentrlError as error:
            problems.append(str(error))
    head["details"] = details.describe()
    head["problems"] = problems
    head["version"] = 0
    blocks = {name: to_text(block) for name, block in run.pack().items()} | details.inline
    with atomic_file(path) as file:
        for part in build_page(head, blocks):
            file.write(part.encode())
    details.remove_earlier()
    return WrittenReport(
        path=path,
        num_trajectories=run.num_rows,
        folder=details.folder if details.num_files else None,
        num_files=details.num_files,
        num_bytes=path.stat().st_size + details.num_bytes,
        problems=problems,
    )


def _read_details(source: ReportSource, reader: DetailReader) -> Iterator[tuple[str, int, bytes]]:
    """Name, number of trajectories and content of every block of a source."""
    if not source.num_rows:
        return
    blocks = reader.read_blocks(source.find_file(), source.num_rows, source.block_rows)
    for number, (num_rows, block) in enumerate(blocks):
        yield f"{source.key}.{number}", num_rows, block


class _Details:
    """Blocks of details: in the page while they are small, else all in files beside it."""

    def __init__(self, page: Path) -> None:
        self.folder = page.with_name(f"{page.stem}_files")
        self.inline: dict[str, str] = {}
        self.num_files = self.num_bytes = 0
        self._inline_bytes = 0
        # The files of an earlier page stay beside these until this page is complete.
        self._tag = token_hex(4)

    def add(self, name: str, block: bytes) -> None:
        text = to_text(block)
        self._inline_bytes += len(text)
        if self._inline_bytes <= MAX_INLINE_BYTES:
            self.inline[name] = text
            return
        for earlier, content in self.inline.items():
            self._write(earlier, content)
        self.inline = {}
        self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        path = self.folder / f"{name}.{self._tag}.js"
        script = f'addBlock("{name}", "{text}");\n'
        with store_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            path.write_text(script, encoding="ascii")
        self.num_files += 1
        self.num_bytes += len(script)

    def describe(self) -> dict[str, Any]:
        """For the page."""
        where = "files" if self.num_files else "page"
        return {
            "where": where,
            "folder": self.folder.name,
            "tag": self._tag,
            "numFiles": self.num_files,
            "numBytes": self.num_bytes or self._inline_bytes,
        }

    def remove_earlier(self) -> None:
        """Deletes the files of the page that was here before, and nothing else."""
        if not self.folder.is_dir():
            return
        with store_errors(self.folder):
            for path in self.folder.iterdir():
                is_ours = _SIDE_FILE.fullmatch(path.name) is not None
                if is_ours and not path.name.endswith(f".{self._tag}.js"):
                    path.unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()


def build_page(
    head: Mapping[str, Any], blocks: Mapping[str, str], *, connects: bool = False
) -> Iterator[str]:
    """The text of the page in parts: what it shows first comes first.

    Args:
        head: what :meth:`ReportData.read` gives, and where details are.
        blocks: by name, as base64.
        connects: whether the page may ask the server that it came from.
    """
    style, scripts = _read_assets()
    policy = "; ".join(
        [
            "default-src 'none'",
            # Of scripts these alone, and the files of details, which they load.
            f"script-src {' '.join(map(_hash, scripts))} 'strict-dynamic'",
            f"style-src {_hash(style)}",
            f"connect-src {_SELF if connects else _NONE}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = html.escape(f"{head['name']} - agentrl")
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"><noscript>This page needs JavaScript, which is inside it.</noscript></div>\n'
    )
    yield f'<script type="application/json" id="head">{escape_json(head)}</script>\n'
    for script in scripts:
        yield f"<script>{script}</script>\n"
    for name, text in blocks.items():
        yield f'<script type="text/plain" id="block:{name}">{text}</script>\n'
    yield "</body>\n</html>\n"


def escape_json(value: Any) -> str:
    """JSON that ends no script element, whatever its texts say."""
    # orjson writes null for what is not finite.
    return orjson.dumps(value).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")


@cache
def _read_assets() -> tuple[str, tuple[str, ...]]:
    folder = files("agentrl_cli.inspector.report").joinpath("assets")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    libraries = [read(name) for name in _SCRIPTS if name.startswith("vendor/")]
    own = "\n".join(read(name) for name in _SCRIPTS if not name.startswith("vendor/"))
    # One scope for all of ours.
    own = f'"use strict";\n(() => {{\n{own}\n}})();'
    return "\n".join(map(read, _STYLES)), (*libraries, own)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
