"""The application: its first screen, its looks, and how it ends."""

from __future__ import annotations

import asyncio
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from agentrl_cli.inspector.terminal_app.list_screens import StepsScreen
from agentrl_cli.inspector.terminal_app.run_reader import RunReader
from agentrl_cli.inspector.trajectory_view import load_spell
from agentrl_cli.store.run_folder import RunFolder

#: How often it is looked whether the terminal is still there.
_HANGUP_SECONDS = 2.0


def run_application(run: str | Path, tokenizer_path: str | None = None) -> None:
    """Shows a run in full screen until the user quits.

    Raises:
        UserInputError: no such run, or no such tokenizer.
    """
    with RunFolder.open(run) as folder:
        if tokenizer_path is not None:
            # Told before the screen is taken.
            load_spell(folder, tokenizer_path)
        reader = RunReader(folder, tokenizer_path)
        app = InspectorApp(reader)
        try:
            app.run()
        finally:
            reader.close()
        if app._exception is not None:
            raise app._exception


class InspectorApp(App[None]):
    """A run, from its steps down to single tokens."""

    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    VERTICAL_BREAKPOINTS = [(0, "-short"), (12, "-tall")]  # noqa: RUF012
    CSS = """
    #title { height: 1; background: $primary; color: $text; text-style: bold; }
    #info, #legend { height: 1; color: $text-muted; }
    #token { height: 1; background: $panel; }
    #title, #info, #legend, #token, #sparkline { text-wrap: nowrap; text-overflow: ellipsis; }
    #sparkline { height: 1; }
    .-short #sparkline, .-short #legend { display: none; }
    #problem-room { height: 1fr; padding: 1; color: $text-error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
    ]

    def __init__(self, reader: RunReader) -> None:
        super().__init__()
        self.title = reader.folder.location
        self._reader = reader

    def on_mount(self) -> None:
        # Only a main thread gets signals: in tests there may be another.
        with suppress(ValueError, RuntimeError):
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        if not self.is_headless:
            self.set_interval(_HANGUP_SECONDS, self._end_with_terminal)
        self.push_screen(StepsScreen(self._reader))

    def _end_with_terminal(self) -> None:
        # Whoever ignores SIGHUP, as under nohup, learns of a lost terminal from nothing else.
        terminal = select.poll()
        terminal.register(sys.__stdout__ or 1, 0)
        if terminal.poll(0):
            self.exit()

    def _fatal_error(self) -> None:
        # Textual would print the values of all variables, and a secret may be among them: whoever
        # runs the application reports the error.
        self.panic()
