"""The screens that list: steps, the groups of a step, trajectories."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual import on, work
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input, Static

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.list_view import StepSummary
from agentrl_cli.inspector.safe_text import one_line
from agentrl_cli.inspector.terminal_app.inspector_screen import InspectorScreen
from agentrl_cli.inspector.terminal_app.lines_view import (
    Column,
    TableHead,
    TableView,
)
from agentrl_cli.inspector.terminal_app.list_columns import (
    GROUP_COLUMNS,
    GROUP_FILTERS,
    MAX_CELL,
    STEP_COLUMNS,
    STEP_FILTERS,
    TRAJECTORY_COLUMNS,
    TRAJECTORY_FILTERS,
)
from agentrl_cli.inspector.terminal_app.run_reader import (
    GroupRow,
    RunReader,
    group_trajectories,
)
from agentrl_cli.inspector.terminal_app.trajectory_screens import TrajectoryScreen
from agentrl_cli.inspector.trajectory_query import Found
from agentrl_cli.sparkline import format_sparkline
from agentrl_cli.store.trajectory_summary import TrajectorySummary

RowT = TypeVar("RowT")

#: How long after one look at a live run the next one follows.
_FOLLOW_SECONDS = 3.0


class ListScreen(InspectorScreen, Generic[RowT]):
    """A table whose rows can be filtered, sorted and searched."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Sort the other way", show=False),
    ]

    #: What one row is called, and several.
    nouns = ("row", "rows")
    columns: ClassVar[Sequence[Column[Any]]] = ()
    filters: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all: Sequence[RowT] = ()
        self._filter: str | None = None
        self._sort: Column[RowT] | None = None
        self._is_ascending = False
        self._search = ""

    @abstractmethod
    def find_key(self, row: RowT) -> Hashable:
        """What a row is known by when the rows are read again."""

    @abstractmethod
    def find_text(self, row: RowT) -> str:
        """What of a row is searched."""

    @abstractmethod
    def open_row(self, rows: Sequence[RowT], number: int) -> None:
        """Shows more of one of these rows."""

    def compose_body(self) -> Iterable[Widget]:
        table: TableView[RowT] = TableView(self.list_columns())
        yield table.head
        yield table

    def list_columns(self) -> Sequence[Column[RowT]]:
        """The columns of the table, where there is room for all."""
        return self.columns

    @property
    def table(self) -> TableView[RowT]:
        """The table of this screen."""
        return self.query_one(TableView)

    def show_rows(self, rows: Sequence[RowT]) -> None:
        """Shows those of the rows that pass the filter and the search, in the order asked for."""
        self._all = rows
        self._update()

    def _update(self) -> None:
        at, number = self.table.row, self.table.cursor
        passes = self.filters[self._filter] if self._filter else None
        rows = [row for row in self._all if passes is None or passes(row)]
        if self._search:
            wanted = self._search.casefold()
            rows = [row for row in rows if wanted in self.find_text(row).casefold()]
        if self._sort is not None and (key := self._sort.sort_key) is not None:
            known = [row for row in rows if not _is_missing(key(row))]
            known.sort(key=key, reverse=not self._is_ascending)
            rows = known + [row for row in rows if _is_missing(key(row))]
        elif self._is_ascending:
            rows.reverse()
        if at is not None:
            here = self.find_key(at)
            same = (n for n, row in enumerate(rows) if self.find_key(row) == here)
            number = next(same, number)
        self.table.show_rows(rows, number)
        self.show_info(self.describe(rows))

    def describe(self, rows: Sequence[RowT]) -> str:
        """The line of information about what is shown."""
        parts = [f"{len(self._all):,} {self.nouns[len(self._all) != 1]}"]
        if len(rows) != len(self._all):
            parts = [f"{len(rows):,} of {parts[0]}"]
        if self._filter:
            parts.append(f"filter: {self._filter}")
        if self._sort:
            parts.append(f"sorted by {self._sort.title}{', ascending' * self._is_ascending}")
        elif self._is_ascending:
            parts.append("last one first")
        if self._search:
            parts.append(f"with {one_line(self._search, 20)!r}")
        return "  ".join(parts)

    def find(self, text: str) -> None:
        self._search = text
        self._update()

    @on(Input.Changed, "#search")
    def _on_typed(self, event: Input.Changed) -> None:
        self.find(event.value)

    def action_filter(self) -> None:
        names = [None, *self.filters]
        self._filter = names[(names.index(self._filter) + 1) % len(names)]
        self._update()

    def action_sort(self) -> None:
        columns = self.table.columns
        orders = [None, *(column for column in columns if column.sort_key is not None)]
        self._sort = orders[(orders.index(self._sort) + 1) % len(orders)]
        self._is_ascending = False
        self._update()

    def action_reverse(self) -> None:
        self._is_ascending = not self._is_ascending
        self._update()

    @on(TableHead.Clicked)
    def _on_head_clicked(self, event: TableHead.Clicked) -> None:
        column = next(column for column in self.table.columns if column.title == event.title)
        if column.sort_key is not None:
            self._is_ascending = self._sort is column and not self._is_ascending
            self._sort = column
            self._update()

    def open_line(self) -> None:
        self.open_row(self.table.rows, self.table.cursor)

    def open_screen(self, screen: InspectorScreen, rows: Sequence[RowT]) -> None:
        """Opens a screen that shows one of ``rows`` at a time; afterwards the cursor is on the
        last one of them."""

        def move(position: int | None) -> None:
            key = self.find_key(rows[position or 0])
            for number, row in enumerate(self.table.rows):
                if self.find_key(row) == key:
                    self.table.cursor = number

        self.app.push_screen(screen, move)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


class StepsScreen(ListScreen[StepSummary]):
    """The steps and evaluations of a run, the latest first; new ones appear as they are made."""

    nouns = ("step or evaluation", "steps and evaluations")
    columns = STEP_COLUMNS
    filters = STEP_FILTERS

    def __init__(self, reader: RunReader) -> None:
        super().__init__(reader)
        self._total_steps: int | None = None

    def compose_body(self) -> Iterable[Widget]:
        yield Static(id="sparkline")
        yield from super().compose_body()

    def name_position(self) -> str:
        return self.reader.folder.location

    def find_key(self, row: StepSummary) -> Hashable:
        return row.source

    def find_text(self, row: StepSummary) -> str:
        return " ".join((row.source.name, *row.alarms))

    async def load(self) -> None:
        self._total_steps = await self.reader.count_steps()
        try:
            await self._look()
        finally:
            # After a failure too: the place may answer later.
            self._follow()

    async def _look(self) -> None:
        await self.reader.follow(self.show_rows)
        if not self._all:
            self.show_info("nothing is stored yet; the first step is being sampled")

    @work(group="follow")
    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            try:
                await self._look()
            except (AgentrlError, OSError) as error:
                # As long as the place does not answer, what is known stays on the screen.
                self.show_info(one_line(str(error), MAX_CELL))

    def show_rows(self, rows: Sequence[StepSummary]) -> None:
        self.show_problem("")
        self.lines.loading = False
        super().show_rows(rows)
        self._show_sparkline()

    def describe(self, rows: Sequence[StepSummary]) -> str:
        num_steps = sum(not row.source.is_eval for row in self._all)
        of = "" if self._total_steps is None else f" of {self._total_steps:,}"
        return f"step {num_steps:,}{of}  {super().describe(rows)}"

    def on_resize(self) -> None:
        super().on_resize()
        self._show_sparkline()

    def _show_sparkline(self) -> None:
        rewards = self.reader.list_rewards()
        known = [reward for reward in rewards if not math.isnan(reward)]
        if not known:
            return
        ends = f"  {known[0]:.3f} to {known[-1]:.3f}"
        width = max(self.size.width - len("reward ") - len(ends), 1)
        line = Text("reward ").append(format_sparkline(rewards, width), style="green").append(ends)
        self.query_one("#sparkline", Static).update(line)

    def open_row(self, rows: Sequence[StepSummary], number: int) -> None:
        sources = [row.source for row in rows]
        path = [self.name_position()]
        self.open_screen(GroupsScreen(self.reader, path, sources, number), rows)


class GroupsScreen(ListScreen[GroupRow]):
    """The groups of a step or an evaluation."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("t", "list_trajectories", "Trajectories")]

    nouns = ("group", "groups")
    columns = GROUP_COLUMNS
    filters = GROUP_FILTERS

    def name_position(self) -> str:
        return str(self.entries[self.position].name)

    def find_key(self, row: GroupRow) -> Hashable:
        return row.first.group_id

    def find_text(self, row: GroupRow) -> str:
        return "\n".join(_find_text(found.summary) for found in row.members)

    async def load(self) -> None:
        found = await self.reader.read_source(self.entries[self.position])
        self.show_rows(group_trajectories(found))

    def open_row(self, rows: Sequence[GroupRow], number: int) -> None:
        path = [*self.path, self.name_position()]
        if all(len(group.members) == 1 for group in rows):
            attempts = [group.members[0] for group in rows]
            self.open_screen(TrajectoryScreen(self.reader, path, attempts, number), rows)
        else:
            self.open_screen(TrajectoriesScreen(self.reader, path, rows, number), rows)

    def action_list_trajectories(self) -> None:
        rows = self.table.rows
        if rows:
            members = [found for group in rows for found in group.members]
            path = [*self.path, self.name_position()]
            everything = [GroupRow(members)]
            screen = TrajectoriesScreen(self.reader, path, everything, 0, is_of_step=True)
            self.app.push_screen(screen)


def _find_text(summary: TrajectorySummary) -> str:
    texts = (
        summary.id,
        f"task {summary.task_id}",
        summary.agent_name,
        summary.question,
        summary.expected,
        summary.final_answer,
        summary.failure_kind,
        summary.failure_message,
    )
    return "\n".join(text for text in texts if text)


class TrajectoriesScreen(ListScreen[Found]):
    """The trajectories of a group, or of all groups that a step's screen showed."""

    nouns = ("trajectory", "trajectories")
    columns = TRAJECTORY_COLUMNS
    filters = TRAJECTORY_FILTERS

    def __init__(self, *args: Any, is_of_step: bool = False) -> None:
        super().__init__(*args)
        self._is_of_step = is_of_step

    def list_columns(self) -> Sequence[Column[Found]]:
        # In a group all are asked the same.
        left_out = "" if self._is_of_step else "question"
        return [column for column in self.columns if column.title != left_out]

    def name_position(self) -> str:
        if self._is_of_step:
            return "trajectories"
        return f"group {self.entries[self.position].first.group_id}"

    def find_key(self, row: Found) -> Hashable:
        return row.source, row.number

    def find_text(self, row: Found) -> str:
        return _find_text(row.summary)

    async def load(self) -> None:
        self.show_rows(self.entries[self.position].members)

    def describe(self, rows: Sequence[Found]) -> str:
        text = super().describe(rows)
        if self._is_of_step:
            return text
        first = self.entries[self.position].first
        return f"{text}  task {one_line(first.task_id, 40)}: {one_line(first.question, MAX_CELL)}"

    def open_row(self, rows: Sequence[Found], number: int) -> None:
        path = [*self.path, self.name_position()]
        self.open_screen(TrajectoryScreen(self.reader, path, rows, number), rows)
