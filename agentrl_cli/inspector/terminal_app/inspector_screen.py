"""What all screens of the application have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Footer, Input, Static

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.terminal_app.lines_view import LinesView
from agentrl_cli.inspector.terminal_app.run_reader import RunReader
from agentrl_cli.log import sanitize


class InspectorScreen(Screen[int], inherit_bindings=False):
    """A title, a line of information, lines with a cursor, and the keys.

    It is dismissed with the position among its entries of what it showed last.

    Args:
        reader: of the run.
        path: what the title says before its own part: the way to this screen.
        entries: what it can show, one at a time.
        position: of the first that it shows.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", key_display="Esc"),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("n", "sibling(1)", "Next"),
        Binding("p", "sibling(-1)", "Previous"),
        Binding("question_mark", "show_keys", "Keys", key_display="?"),
    ]

    def __init__(
        self,
        reader: RunReader,
        path: Sequence[str] = (),
        entries: Sequence[Any] = (),
        position: int = 0,
    ) -> None:
        super().__init__()
        self.reader = reader
        self.path = path
        self.entries = entries
        self.position = position

    @abstractmethod
    def compose_body(self) -> Iterable[Widget]:
        """The widgets between the title and the search line; one is a LinesView."""

    @abstractmethod
    async def load(self) -> None:
        """Reads and shows what is at the position."""

    @abstractmethod
    def find(self, text: str) -> None:
        """Shows what contains the text."""

    @abstractmethod
    def open_line(self) -> None:
        """Shows more of what the cursor is on."""

    def name_position(self) -> str:
        """What is shown, for the title."""
        return ""

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="info")
        yield from self.compose_body()
        with VerticalScroll(id="problem-room", can_focus=False):
            yield Static(id="problem")
        yield Input(id="search", placeholder="search: Enter keeps it, Esc ends it", compact=True)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#search").display = False
        self.query_one("#problem-room").display = False
        self.lines.focus()
        self.open_position()

    @property
    def lines(self) -> LinesView:
        """The lines of this screen."""
        return self.query_one(LinesView)

    def open_position(self) -> None:
        """Shows what is at the position, once it is read."""
        self.show_title()
        self.start(self.load)

    def show_title(self) -> None:
        """The way to this screen, what it shows, and the number of that among its entries."""
        number = f"  ({self.position + 1} of {len(self.entries)})" * (len(self.entries) > 1)
        names = [sanitize(name) for name in (*self.path, self.name_position())]
        title = " › ".join(names) + number
        while cell_len(title) > self.size.width and len(names) > 1:
            # The end says where one is.
            del names[0]
            title = " › ".join(["…", *names]) + number
        self.query_one("#title", Static).update(Text(title))

    def on_resize(self) -> None:
        self.show_title()

    def show_info(self, info: str | Text) -> None:
        """Shows the line below the title."""
        self.query_one("#info", Static).update(info if isinstance(info, Text) else Text(info))

    def start(self, read: Callable[[], Awaitable[None]]) -> None:
        """Reads and shows, with a sign that something is loading; what is raised is shown in place.

        What was started before and is not done is given up.
        """
        self.lines.loading = True
        self._load(read)

    @work(exclusive=True, group="load")
    async def _load(self, read: Callable[[], Awaitable[None]]) -> None:
        self.show_problem("")
        try:
            await read()
        except (AgentrlError, OSError) as error:
            self.show_problem(str(error))
        except Exception as error:
            # Whatever a damaged file leads to, the rest of the run can still be looked at.
            self.show_problem(f"unexpected {type(error).__name__}: {error}")
        self.lines.loading = False
        # What is loading has no keys.
        self.refresh_bindings()

    def show_problem(self, problem: str) -> None:
        """Shows a message in the place of the lines; empty: the lines."""
        self.query_one("#problem", Static).update(Text(sanitize(problem)))
        self.query_one("#problem-room").display = bool(problem)
        self.lines.display = not problem

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 2:
            self.dismiss(self.position)

    def action_sibling(self, offset: int) -> None:
        if 0 <= self.position + offset < len(self.entries):
            self.position += offset
            self.open_position()

    def action_show_keys(self) -> None:
        keys: dict[str, str] = {}
        for _, binding, is_enabled, _ in self.active_bindings.values():
            if is_enabled and binding.description:
                known = keys.get(binding.description)
                key = self.app.get_key_display(binding)
                keys[binding.description] = key if known is None else f"{known} {key}"
        self.app.push_screen(KeysScreen(keys))

    def action_search(self) -> None:
        field = self.query_one("#search", Input)
        field.display = True
        # At once: what is typed next is for it.
        self.set_focus(field)
        field.action_select_all()

    def on_key(self, event: Key) -> None:
        field = self.query_one("#search", Input)
        if event.key == "escape" and field.has_focus:
            event.stop()
            field.value = ""
            self._close_search()

    @on(Input.Submitted, "#search")
    def _on_searched(self, event: Input.Submitted) -> None:
        if not self.query_one("#search").display:
            # A second Enter, which was typed before the first had closed it, is for the line.
            self.lines.action_open()
            return
        if event.value:
            self.find(event.value)
        self._close_search()

    def _close_search(self) -> None:
        self.query_one("#search").display = False
        self.set_focus(self.lines)

    @on(LinesView.Opened)
    def _on_opened(self) -> None:
        # Enter twice, before the first has been answered, opens one screen.
        if self.app.screen is self:
            self.open_line()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "sibling":
            return len(self.entries) > 1
        if action == "back":
            return len(self.app.screen_stack) > 2
        return True


class KeysScreen(ModalScreen[None]):
    """All keys of the screen below; any key closes it."""

    DEFAULT_CSS = """
    KeysScreen { align: center middle; }
    KeysScreen > VerticalScroll {
        width: 46; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; background: $panel; padding: 0 1;
    }
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        text = Text("Keys (Esc closes this)\n\n", no_wrap=True)
        width = max(map(len, self._keys.values()))
        for description, key in self._keys.items():
            text.append(f"{key:>{width}}", style="bold").append(f"  {description}\n")
        with VerticalScroll():
            yield Static(text)

    def on_key(self, event: Key) -> None:
        if event.key not in ("up", "down", "pageup", "pagedown", "home", "end"):
            event.stop()
            self.dismiss()

    def on_click(self) -> None:
        self.dismiss()
