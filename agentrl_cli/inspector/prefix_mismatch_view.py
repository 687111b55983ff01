"""Prefix mismatches of conversations: what they cost, and what to type against each cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl_cli.prefix_mismatches import REMEDIES, MismatchSummary


def build_mismatch_table(summary: MismatchSummary, title: str) -> Table | None:
    """One row a cause: turns, share, tokens lost and the remedy; None without a mismatch."""
    if not summary.by_cause:
        return None
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
    for name in ("prefix mismatches", "number", "share", "re-prefilled", "dropped"):
        table.add_column(
            name, justify="left" if name == "prefix mismatches" else "right", no_wrap=True
        )
    table.add_column("what to do", overflow="fold")
    for cause, totals in summary.by_cause.items():
        table.add_row(
            Text(cause.value, style="yellow"),
            f"{totals.num_turns:,}",
            format_share(totals.num_turns, summary.num_replaying_turns),
            f"{totals.num_reprefilled_tokens:,}",
            f"{totals.num_dropped_tokens:,}",
            Text(REMEDIES[cause]),
        )
    return table


def format_share(num_mismatches: int, num_replaying: int) -> str:
    """Mismatches as a share of the turns that continue an earlier one; ``-`` where none does."""
    return f"{num_mismatches / num_replaying:.0%}" if num_replaying else "-"


def format_mismatches(summary: MismatchSummary) -> Text:
    """A cell of a table: nothing, or the number of mismatches and their share."""
    num_mismatches = summary.total.num_turns
    if not num_mismatches:
        return Text("0")
    share = format_share(num_mismatches, summary.num_replaying_turns)
    return Text(f"{num_mismatches} ({share})", style="yellow")


def describe_mismatches(summary: MismatchSummary) -> dict[str, Any]:
    """The summary for machines, with each cause's remedy."""
    data = summary.to_dict()
    by_cause: Mapping[Any, dict[str, Any]] = data["by_cause"]
    for cause in summary.by_cause:
        by_cause[cause.value]["remedy"] = REMEDIES[cause]
    return data | {"mismatch_fraction": summary.mismatch_fraction}
