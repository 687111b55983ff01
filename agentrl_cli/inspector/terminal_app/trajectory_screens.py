"""The screens of one trajectory: its conversations, and the tokens of a call."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from agentrl_cli.inspector.safe_text import format_number
from agentrl_cli.inspector.terminal_app.inspector_screen import InspectorScreen
from agentrl_cli.inspector.terminal_app.lines_view import LinesView, StripsView, find_meta
from agentrl_cli.inspector.terminal_app.run_reader import OpenedTrajectory, RunReader
from agentrl_cli.inspector.trajectory_view import (
    CALL_ID,
    Spell,
    TokenRow,
    build_tree,
    list_tokens,
)
from agentrl_cli.log import clean, format_count
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.trajectory_file import ProximalLogprobs


class TrajectoryScreen(InspectorScreen):
    """One trajectory as its conversation tree."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "turn(1)", "Next turn", key_display="Tab"),
        Binding("shift+tab", "turn(-1)", "Previous turn", show=False),
    ]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened: OpenedTrajectory | None = None
        self._width = 0

    def compose_body(self) -> Iterable[Widget]:
        yield StripsView()

    @property
    def view(self) -> StripsView:
        """The lines of the tree."""
        return self.query_one(StripsView)

    def name_position(self) -> str:
        return str(self.entries[self.position].summary.id)

    async def load(self) -> None:
        found = self.entries[self.position]
        self.show_info("")
        self._opened = await self.reader.read_one(found)
        await self._render_tree()
        summary = found.summary
        mean = "" if summary.reward is None else f"reward {format_number(summary.reward)}  "
        failed = "" if summary.failure_kind is None else f"failed: {summary.failure_kind}  "
        calls = format_count(len(self._opened.trajectory.interactions), "call")
        self.show_info(clean(f"{failed}{mean}{calls}"))

    async def _render_tree(self) -> None:
        assert self._opened is not None
        trajectory, title = self._opened.trajectory, self.entries[self.position].source.name
        width = self._width = max(self.lines.size.width or self.size.width - 1, 8)
        strips = await self.reader.run(lambda: _render_tree(trajectory, title, width))
        self.view.show_strips(strips, self.view.cursor)

    def open_position(self) -> None:
        self.view.show_strips(())
        super().open_position()

    def on_resize(self) -> None:
        super().on_resize()
        if self._opened is not None and self.lines.size.width != self._width:
            self.start(self._render_tree)

    def find(self, text: str) -> None:
        """Moves to the next line with the text, and from the last one to the first."""
        wanted, view = text.casefold(), self.view
        numbers = range(len(view.strips))
        for number in (*numbers[view.cursor + 1 :], *numbers[: view.cursor + 1]):
            if wanted in view.strips[number].text.casefold():
                view.cursor = number
                return
        self.notify(f"{text!r} is not in this trajectory", markup=False, timeout=3)

    def action_turn(self, offset: int) -> None:
        """Moves to the first line of the next call, or of the one before."""
        calls = [find_meta(strip, CALL_ID) for strip in self.view.strips]
        starts = [
            number
            for number, call in enumerate(calls)
            if call is not None and call not in calls[max(number - 1, 0) : number]
        ]
        here = self.view.cursor
        later = [n for n in starts if n > here] if offset > 0 else [n for n in starts if n < here]
        if later:
            self.view.cursor = later[0] if offset > 0 else later[-1]

    def open_line(self) -> None:
        """Shows the tokens of the call that the cursor is on, or that follows."""
        if self._opened is None or not self.view.strips:
            return
        trajectory = self._opened.trajectory
        here = self.view.cursor
        below = (find_meta(strip, CALL_ID) for strip in self.view.strips[here:])
        above = (find_meta(strip, CALL_ID) for strip in reversed(self.view.strips[:here]))
        call = next((call for calls in (below, above) for call in calls if call is not None), None)
        ids = [interaction.id for interaction in trajectory.interactions]
        if call not in ids:
            self.notify("no model call is stored: there are no tokens to show", timeout=3)
            return
        path = [*self.path, self.name_position()]
        screen = TokensScreen(self.reader, path, self._opened, ids.index(call))
        self.app.push_screen(screen, self._move_to_call)

    def _move_to_call(self, position: int | None) -> None:
        if self._opened is None or position is None:
            return
        call = self._opened.trajectory.interactions[position].id
        if find_meta(self.view.strips[self.view.cursor], CALL_ID) == call:
            return
        for number, strip in enumerate(self.view.strips):
            if find_meta(strip, CALL_ID) == call:
                self.view.cursor = number
                return


def _render_tree(trajectory: Trajectory, title: str, width: int) -> list[Strip]:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor",
        legacy_windows=False, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    lines = console.render_lines(build_tree(trajectory, title), pad=False)
    return [Strip(line) for line in lines]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a token, on one line."""

    token: int
    text: str


#: Probabilities from which on a token gets the style, and what that range is called.
_PROBABILITIES: Sequence[tuple[float, str, Style]] = (
    (0.9, "0.9 and more", Style(color="bright_green")),
    (0.5, "0.5", Style(color="green")),
    (0.2, "0.2", Style(color="yellow")),
    (0.05, "0.05", Style(color="bright_white", bgcolor="dark_orange3", underline=True)),
    (0.0, "less", Style(color="bright_white", bgcolor="red3", bold=True, underline=True)),
)
#: As of probabilities, for nats between what the engine and the trainer computed: the styles, from
#: the largest gap down.
_GAPS: Sequence[tuple[float, str, Style]] = tuple(
    (least, name, style)
    for (least, name), (_, _, style) in zip(
        ((0.5, "0.5 nats and more"), (0.2, "0.2"), (0.05, "0.05"), (0.01, "0.01"), (0.0, "less")),
        reversed(_PROBABILITIES),
        strict=True,
    )
)
_VERSIONS = tuple(
    Style(color="bright_white", bgcolor=color)
    for color in ("blue3", "dark_green", "purple4", "dark_orange3", "deep_pink4", "grey37")
)
_TRAINED = Style(color="bright_white", bgcolor="dark_green", bold=True)
_PLAIN = Style(dim=True)
#: Modes of the view of tokens, in the order in which ``m`` changes them.
_MODES = ("logprob", "gap", "policy version", "mask")


class TokensView(LinesView):
    """Tokens as running text, coloured by one of their properties, with a cursor on one token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move_token(-1)", "Token before", show=False),
        Binding("right,l", "move_token(1)", "Next token", show=False),
        Binding("enter", "open", "Colours", show=False),
    ]
    marks_cursor = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens: Sequence[TokenRow] = ()
        self.texts: Sequence[str] = ()
        self.mode = _MODES[0]
        self.token = 0
        self._lines: list[list[_Piece]] = []
        self._first_lines: list[int] = []
        self._versions: list[int] = []

    def show_tokens(self, tokens: Sequence[TokenRow], texts: Sequence[str], token: int) -> None:
        """Shows tokens with their texts, and the cursor on one of them."""
        self.tokens, self.texts, self.token = tokens, texts, token
        self._versions = sorted({row.version for row in tokens if row.version is not None})
        self._lay_out()

    def _lay_out(self) -> None:
        # Without a place on the screen yet, there is nothing to fill.
        texts = self.texts if self.size.width else ()
        self._lines, self._first_lines = lay_out_tokens(texts, self.size.width)
        line = self._first_lines[self.token] if self._first_lines else 0
        self.set_num_lines(len(self._lines), line)

    def on_resize(self) -> None:
        self._lay_out()
        super().on_resize()

    def build_strip(self, line: int, width: int) -> Strip:
        pieces = self._lines[line]
        return Strip([Segment(p.text, self._find_style(p.token)) for p in pieces])

    def _find_style(self, token: int) -> Style:
        style = self.style_token(self.tokens[token])
        return style + Style(reverse=True, bold=True) if token == self.token else style

    def style_token(self, row: TokenRow) -> Style:
        """How a token looks in the mode that is on."""
        if self.mode == "mask":
            return _TRAINED if row.trained else _PLAIN
        if self.mode == "policy version":
            if row.version is None:
                return _PLAIN
            return _VERSIONS[self._versions.index(row.version) % len(_VERSIONS)]
        if self.mode == "gap":
            gap = row.gap
            return _PLAIN if gap is None else next(s for least, _, s in _GAPS if gap >= least)
        if row.logprob is None or math.isnan(row.logprob):
            return _PLAIN
        probability = math.exp(min(row.logprob, 0.0))
        return next(style for least, _, style in _PROBABILITIES if probability >= least)

    def build_legend(self) -> Text:
        """What the colours of the mode mean."""
        text = Text(f"{self.mode}: ", no_wrap=True)
        entries: list[tuple[str, Style]]
        if self.mode == "mask":
            entries = [("trained", _TRAINED), ("not trained", _PLAIN)]
        elif self.mode == "policy version":
            entries = [
                (str(version), _VERSIONS[number % len(_VERSIONS)])
                for number, version in enumerate(self._versions)
            ] or [("none is stored", _PLAIN)]
        elif self.mode == "gap":
            text = Text("gap |engine - trainer|: ", no_wrap=True)
            entries = [(name, style) for _, name, style in _GAPS]
        else:
            text = Text("probability: ", no_wrap=True)
            entries = [(name, style) for _, name, style in _PROBABILITIES]
        for name, style in entries:
            text.append(name, style).append(" ")
        return text

    def action_move_token(self, offset: int) -> None:
        self.move_to_token(self.token + offset)

    def move_to_token(self, token: int) -> None:
        """Has the cursor on that token, or on the nearest that there is."""
        if self.tokens:
            self.token = max(0, min(token, len(self.tokens) - 1))
            self.cursor = self._first_lines[self.token]
            self.refresh()
            self.post_message(self.Moved())

    def watch_cursor(self, old: int, new: int) -> None:
        # Moved by lines: to the first token that begins on the line, or goes on there.
        if self._first_lines and self._first_lines[self.token] != new:
            self.token = self._lines[new][0].token
            self.refresh()
        super().watch_cursor(old, new)

    def on_click(self, event: events.Click) -> None:
        line = event.y + self.scroll_offset.y
        if line < len(self._lines):
            pieces = self._lines[line]
            ends = [*accumulate(cell_len(piece.text) for piece in pieces)]
            here = min(bisect_right(ends, event.x), len(pieces) - 1)
            self.move_to_token(pieces[here].token)


def lay_out_tokens(texts: Sequence[str], width: int) -> tuple[list[list[_Piece]], list[int]]:
    """The tokens in lines of ``width`` cells, and the line on which each begins.

    A newline is shown, and ends its line.
    """
    lines: list[list[_Piece]] = [[]]
    first_lines: list[int] = []
    room = width
    for token, text in enumerate(texts):
        is_begun = False
        for part in text.replace("\t", "⇥").replace("\n", "⏎\n").splitlines(keepends=True) or [""]:
            shown = part.rstrip("\n")
            if cell_len(shown) > room and lines[-1]:
                lines.append([])
                room = width
            if not is_begun:
                first_lines.append(len(lines) - 1)
                is_begun = True
            for number, chunk in enumerate(chop_cells(shown, width) or [""]):
                if number:
                    lines.append([])
                    room = width
                lines[-1].append(_Piece(token, chunk))
                room -= cell_len(chunk)
            if part.endswith("\n"):
                lines.append([])
                room = width
    if not lines[-1]:
        lines.pop()
    return lines, first_lines


class TokensScreen(InspectorScreen):
    """The tokens of one call of a trajectory."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "mode", "Colours")]

    def __init__(
        self, reader: RunReader, path: Sequence[str], opened: OpenedTrajectory, position: int
    ) -> None:
        super().__init__(reader, path, opened.trajectory.interactions, position)
        self._opened = opened

    def compose_body(self) -> Iterable[Widget]:
        yield Static(id="legend")
        yield TokensView()
        yield Static(id="token")

    @property
    def view(self) -> TokensView:
        """The tokens."""
        return self.query_one(TokensView)

    def name_position(self) -> str:
        return f"call {self.position + 1}"

    async def load(self) -> None:
        interaction: Interaction = self.entries[self.position]
        spell = await self.reader.load_spell()
        is_trained = self._opened.untrained_reason is None
        tokens, texts = await self.reader.run(
            lambda: _spell(interaction, spell, is_trained, self._opened.proximal)
        )
        if not tokens:
            self.view.show_tokens((), (), 0)
            self.show_problem(
                f"no token ids are stored for this call, which {interaction.status.value}"
            )
            return
        first = min(len(interaction.prompt_ids), len(tokens) - 1)
        self.view.show_tokens(tokens, texts, first)
        parts = [f"{len(interaction.prompt_ids):,} prompt + {interaction.num_completion_tokens:,}"]
        parts[0] += " completion tokens"
        if self._opened.untrained_reason is not None:
            parts.append(f"none is trained on: {self._opened.untrained_reason}")
        if spell is None:
            parts.append("ids, as no tokenizer is stored yet: type --tokenizer MODEL_FOLDER")
        self.show_info(clean("  ".join(parts)))
        self._show_legend()
        self._show_token()

    def _show_legend(self) -> None:
        self.query_one("#legend", Static).update(self.view.build_legend())

    @on(LinesView.Moved)
    def _show_token(self) -> None:
        view = self.view
        if not view.tokens:
            return
        row = view.tokens[view.token]
        logprob = "prompt" if row.logprob is None else f"logprob {row.logprob:z.4f}"
        gap = "" if row.gap is None else f"  gap {row.gap:.4f}"
        version = "" if row.version is None else f"  version {row.version}"
        trained = "trained" if row.trained else "not trained"
        text = f"{row.position}: id {row.token_id}  {logprob}{gap}{version}  {trained}"
        if view.texts[view.token].strip() != str(row.token_id):
            text += f"  {view.texts[view.token]!r}"
        self.query_one("#token", Static).update(Text(clean(text)))

    def action_mode(self) -> None:
        view = self.view
        modes = [mode for mode in _MODES if mode != "gap" or self._opened.proximal]
        view.mode = modes[(modes.index(view.mode) + 1) % len(modes)]
        view.refresh()
        self._show_legend()

    def find(self, text: str) -> None:
        """Moves to the next token at which the text begins, and from the last one to the first."""
        view = self.view
        whole = "".join(view.texts).casefold()
        starts = [0, *accumulate(len(token.casefold()) for token in view.texts)]
        here = starts[min(view.token + 1, len(view.texts))]
        place = whole.find(text.casefold(), here)
        place = whole.find(text.casefold()) if place < 0 else place
        if place < 0:
            self.notify(f"{text!r} is not in these tokens", markup=False, timeout=3)
        else:
            view.move_to_token(bisect_right(starts, place) - 1)

    def open_line(self) -> None:
        self.action_mode()


def _spell(
    interaction: Interaction, spell: Spell | None, is_trained: bool, proximal: ProximalLogprobs
) -> tuple[list[TokenRow], list[str]]:
    tokens = list_tokens(interaction, is_trained=is_trained, proximal=proximal)
    if spell is None:
        return tokens, [f"{row.token_id} " for row in tokens]
    # A token without any text still has a place.
    known = {row.token_id for row in tokens}
    texts = {token_id: clean(spell(token_id)) or "·" for token_id in known}
    return tokens, [texts[row.token_id] for row in tokens]
