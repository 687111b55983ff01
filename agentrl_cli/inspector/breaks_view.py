"""Breaks of conversations: what they cost, and what to type against each cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl_cli.breaks import REMEDIES, BreakSummary


def build_break_table(breaks: BreakSummary, title: str) -> Table | None:
    """One row a cause: turns, share, wasted tokens and the remedy; None where nothing broke."""
    if not breaks.by_cause:
        return None
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
    for name in ("broken turns", "number", "share", "computed anew", "left context"):
        table.add_column(name, justify="left" if name == "broken turns" else "right", no_wrap=True)
    table.add_column("what to do", overflow="fold")
    for cause, totals in breaks.by_cause.items():
        table.add_row(
            Text(cause.value, style="yellow"),
            f"{totals.num_turns:,}",
            format_share(totals.num_turns, breaks.num_replaying_turns),
            f"{totals.num_recomputed_tokens:,}",
            f"{totals.num_departed_tokens:,}",
            Text(REMEDIES[cause]),
        )
    return table


def format_share(num_broken: int, num_replaying: int) -> str:
    """Broken turns as a share of those that could break; ``-`` where none could."""
    return f"{num_broken / num_replaying:.0%}" if num_replaying else "-"


def format_broken(breaks: BreakSummary) -> Text:
    """A cell of a table: nothing, or the number of broken turns and their share."""
    num_broken = breaks.total.num_turns
    if not num_broken:
        return Text("0")
    share = format_share(num_broken, breaks.num_replaying_turns)
    return Text(f"{num_broken} ({share})", style="yellow")


def describe_breaks(breaks: BreakSummary) -> dict[str, Any]:
    """The summary for machines, with each cause's remedy."""
    data = breaks.to_dict()
    by_cause: Mapping[Any, dict[str, Any]] = data["by_cause"]
    for cause in breaks.by_cause:
        by_cause[cause.value]["remedy"] = REMEDIES[cause]
    return data | {"broken_fraction": breaks.broken_fraction}
