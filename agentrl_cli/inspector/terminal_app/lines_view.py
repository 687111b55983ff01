"""Widgets that show any number of lines: only those on the screen are ever made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

RowT = TypeVar("RowT")

#: What the metadata of a table's head calls the column that was clicked.
_COLUMN = "column"
#: Cells between two columns.
_GAP = 2


class LinesView(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines, one of which the cursor is on; a subclass makes them in :meth:`build_strip`."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"lines--cursor"}
    DEFAULT_CSS = """
    LinesView {
        height: 1fr;
        overflow-x: hidden;
        scrollbar-size-vertical: 1;
        & > .lines--cursor {
            background: $block-cursor-blurred-background;
            color: $block-cursor-blurred-foreground;
        }
        &:focus > .lines--cursor {
            background: $block-cursor-background;
            color: $block-cursor-foreground;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Line up", show=False),
        Binding("down,j", "move(1)", "Line down", show=False),
        Binding("pageup", "move_page(-1)", "Page up", show=False),
        Binding("pagedown,space", "move_page(1)", "Page down", show=False),
        Binding("home,g", "move_to(0)", "First line", show=False),
        Binding("end,G", "move_to(-1)", "Last line", show=False),
        Binding("enter", "open", "Open"),
    ]

    class Opened(Message):
        """The line under the cursor is wanted: by Enter or a double click."""

    class Moved(Message):
        """The cursor is on another line."""

    cursor: reactive[int] = reactive(0, repaint=False)
    marks_cursor = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_lines = 0

    def set_num_lines(self, num_lines: int, cursor: int = 0) -> None:
        """Shows that many lines anew, with the cursor on one of them."""
        self.num_lines = num_lines
        self.virtual_size = Size(0, num_lines)
        self.cursor = cursor
        self._show_cursor()
        self.refresh()

    def build_strip(self, line: int, width: int) -> Strip:
        """The content of a line, from 0; cut to ``width`` cells by the caller."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        width, style = self.size.width, self.rich_style
        if line >= self.num_lines:
            return Strip.blank(width, style)
        strip = self.build_strip(line, width).crop_extend(0, width, style).apply_style(style)
        if line == self.cursor and self.marks_cursor:
            over = self.get_component_rich_style("lines--cursor")
            strip = Strip(Segment.apply_style(strip, post_style=over), width)
        return strip

    def validate_cursor(self, cursor: int) -> int:
        return max(0, min(cursor, self.num_lines - 1))

    def watch_cursor(self, old: int, new: int) -> None:
        self.refresh_line(old)
        self.refresh_line(new)
        self._show_cursor()
        self.post_message(self.Moved())

    def _show_cursor(self) -> None:
        top, height = self.scroll_offset.y, max(self.size.height, 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, force=True)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False, force=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_cursor)

    def action_move(self, num_lines: int) -> None:
        self.cursor += num_lines

    def action_move_page(self, num_pages: int) -> None:
        self.action_move(num_pages * max(self.size.height - 1, 1))

    def action_move_to(self, line: int) -> None:
        self.cursor = line if line >= 0 else self.num_lines - 1

    def action_open(self) -> None:
        if self.num_lines:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        line = event.y + self.scroll_offset.y
        if line < self.num_lines:
            self.cursor = line
            if event.chain == 2:
                self.action_open()


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """One column of a table."""

    title: str
    cell: Callable[[RowT], str | Text]
    width: int
    """Cells; of one with a ``share`` the least."""
    share: int = 0
    """Of the cells that are left over, compared with the other columns' shares."""
    is_left: bool = False
    """Texts are; numbers stand on the right."""
    rank: int = 0
    """Where there is no room for all, those of the highest rank are left out first."""
    says_something: Callable[[RowT], Any] | None = None
    """The column is shown only if this is truthy of a row."""
    sort_key: Callable[[RowT], Any] | None = None
    """Rows are sorted by it, largest first; None: they cannot be. None of a row: it comes last."""


def fit_columns(columns: Sequence[Column[RowT]], width: int) -> list[tuple[Column[RowT], int]]:
    """The columns for which a row of ``width`` cells has room, with the cells of each."""
    shown = list(columns)

    def count_left() -> int:
        return width - sum(column.width + _GAP for column in shown) + _GAP

    while len(shown) > 1 and count_left() < 0:
        shown.remove(max(reversed(shown), key=lambda column: column.rank))
    shares = sum(column.share for column in shown)
    left = max(count_left(), 0)
    return [
        (column, min(column.width + (left * column.share // shares if shares else 0), width))
        for column in shown
    ]


class TableView(LinesView, Generic[RowT]):
    """A table: a line for each of its rows."""

    def __init__(self, columns: Sequence[Column[RowT]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.columns = columns
        self.rows: Sequence[RowT] = ()
        self.head = TableHead(self)
        """The titles of the columns, to stand above the table."""
        self._fitted: list[tuple[Column[RowT], int]] = []

    @property
    def row(self) -> RowT | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def show_rows(self, rows: Sequence[RowT], cursor: int = 0) -> None:
        """Shows these rows, with the cursor on one of them."""
        self.rows = rows
        self._fit()
        self.set_num_lines(len(rows), cursor)

    def _fit(self) -> None:
        needed = [
            c
            for c in self.columns
            if c.says_something is None or any(map(c.says_something, self.rows))
        ]
        self._fitted = fit_columns(needed, self.size.width)
        self.head.refresh()

    def on_resize(self) -> None:
        self._fit()
        super().on_resize()
        self.refresh()

    def build_head(self) -> Text:
        """The titles of the columns, in their places."""
        head = Text(end="", no_wrap=True)
        for number, (column, width) in enumerate(self._fitted):
            title = _fill(column.title, width, is_left=column.is_left)
            title.apply_meta({_COLUMN: column.title})
            head.append(" " * (_GAP if number else 0)).append_text(title)
        return head

    def build_strip(self, line: int, width: int) -> Strip:
        text = Text(end="", no_wrap=True)
        row = self.rows[line]
        for number, (column, cells) in enumerate(self._fitted):
            filled = _fill(column.cell(row), cells, is_left=column.is_left)
            text.append(" " * (_GAP if number else 0)).append_text(filled)
        return Strip(text.render(self.app.console))


def _fill(content: str | Text, width: int, *, is_left: bool) -> Text:
    text = Text(content) if isinstance(content, str) else content.copy()
    text.truncate(width, overflow="ellipsis")
    text.align("left" if is_left else "right", width)
    return text


class TableHead(Widget):
    """The titles of a table's columns; a click on one is a wish to sort by it."""

    DEFAULT_CSS = """
    TableHead { height: 1; background: $panel; color: $text-muted; text-style: bold; }
    """

    class Clicked(Message):
        """The title of the column that was clicked."""

        def __init__(self, title: str) -> None:
            super().__init__()
            self.title = title

    def __init__(self, table: TableView[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._table = table

    def render(self) -> Text:
        return self._table.build_head()

    def on_click(self, event: events.Click) -> None:
        title = (event.style.meta or {}).get(_COLUMN)
        if title is not None:
            self.post_message(self.Clicked(title))


class StripsView(LinesView):
    """Lines that were made before."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strips: Sequence[Strip] = ()

    def show_strips(self, strips: Sequence[Strip], cursor: int = 0) -> None:
        """Shows these lines, with the cursor on one of them."""
        self.strips = strips
        self.set_num_lines(len(strips), cursor)

    def build_strip(self, line: int, width: int) -> Strip:
        return self.strips[line]


def find_meta(strip: Strip, name: str) -> Any:
    """The first value of that name in the metadata of a line's text; None: it has none."""
    for segment in strip:
        style: Style | None = segment.style
        if style is not None and name in style.meta:
            return style.meta[name]
    return None
