"""What breaks cost, worked out by hand."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentrl_cli.breaks import (
    REMEDIES,
    BreakSummary,
    BreakTotals,
    find_breaks,
    format_break_totals,
    summarize_breaks,
)
from agentrl_cli.records import BreakCause, Interaction, InteractionStatus, Trajectory


def call(
    name: str, prompt: tuple[int, ...], completion: tuple[int, ...], started: int, **fields: Any
) -> Interaction:
    return Interaction(
        id=name,
        prompt_ids=prompt,
        completion_ids=completion,
        started=started,
        **({"ended": started + 1} | fields),
    )


def trajectory(*interactions: Interaction) -> Trajectory:
    return Trajectory(id="t", group_id="g", task_id="0", interactions=interactions)


FIRST = call("a", (1, 2, 3), (4, 5, 6, 7), 1)
#: Extends the first: one new token, three sampled.
SECOND = call("b", (1, 2, 3, 4, 5, 6, 7, 8), (9, 10, 11), 3, parent_id="a", extends_parent=True)


def test_a_turn_that_its_parent_does_not_begin() -> None:
    # Retokenized: it shares 1 2 3 4 with the parent's seven tokens; 50 51 stand for what was 5 6 7.
    third = call(
        "c", (1, 2, 3, 4, 50, 51, 8), (9,), 3,
        parent_id="a", break_cause=BreakCause.RETOKENIZED,
    )  # fmt: skip
    [found] = find_breaks((FIRST, third))
    assert (found.interaction_id, found.cause) == ("c", BreakCause.RETOKENIZED)
    # Behind position 4 the parent's sequence had 3 tokens, all sampled; the request has 3 there.
    assert found.num_recomputed_tokens == 3
    assert found.num_departed_tokens == 3


def test_what_lies_beyond_the_old_sequence_is_new_and_no_waste() -> None:
    long = (1, 2, 3, 40, *range(100, 200))
    third = call("c", long, (9,), 3, parent_id="a", break_cause=BreakCause.TEMPLATE_CHANGED)
    [found] = find_breaks((FIRST, third))
    assert found.num_recomputed_tokens == 4
    assert found.num_departed_tokens == 4


def test_a_shorter_history_costs_what_it_has() -> None:
    # All but the first token is gone: two tokens behind it are computed, four were sampled.
    third = call("c", (1, 70, 71), (9,), 3, break_cause=BreakCause.HISTORY_EDITED)
    [found] = find_breaks((FIRST, third))
    assert found.num_recomputed_tokens == 2
    assert found.num_departed_tokens == 4


def test_an_edited_later_turn_is_found_by_its_tokens_and_not_by_its_parent() -> None:
    # It extends the first turn; the second, with the same request, was replayed otherwise.
    third = call(
        "c", (1, 2, 3, 4, 5, 6, 7, 8, 9, 60, 61, 62), (12,), 5,
        parent_id="a", extends_parent=True, break_cause=BreakCause.HISTORY_EDITED,
    )  # fmt: skip
    [found] = find_breaks((FIRST, SECOND, third))
    # The second's sequence has 11 tokens; 9 are shared.
    assert found.num_recomputed_tokens == 2
    assert found.num_departed_tokens == 2


def test_all_sampled_turns_of_the_sequence_depart() -> None:
    # The first sampled turn is edited: of the first turn 5 6 7 depart, of the second 9 10 11.
    third = call("c", (1, 2, 3, 4, 55, 56, 57, 58, 59, 60), (9,), 5,
                 break_cause=BreakCause.THINKING_STRIPPED)  # fmt: skip
    [found] = find_breaks((FIRST, SECOND, third))
    assert found.num_recomputed_tokens == 6
    assert found.num_departed_tokens == 6


def test_later_and_failed_calls_are_not_what_was_broken() -> None:
    failed = call("f", (1, 70, 71, 72), (), 3, status=InteractionStatus.FAILED,
                  break_cause=BreakCause.HISTORY_EDITED)  # fmt: skip
    later = call("l", (1, 70, 71, 72, 73), (9,), 9)
    third = call("c", (1, 70, 71, 72), (9,), 5, break_cause=BreakCause.HISTORY_EDITED)
    [found] = find_breaks((FIRST, failed, third, later))
    assert (found.interaction_id, found.num_recomputed_tokens) == ("c", 3)


def test_without_ids_a_break_counts_and_costs_nothing_known() -> None:
    endpoint = Interaction(id="e", break_cause=BreakCause.HISTORY_EDITED, started=3, ended=4)
    [found] = find_breaks((Interaction(id="d", started=1, ended=2), endpoint))
    assert (found.num_recomputed_tokens, found.num_departed_tokens) == (0, 0)


def test_damaged_records_end_too() -> None:
    """Two turns that name each other as parents."""
    x = call("x", (1, 2), (3,), 1, parent_id="y", extends_parent=True)
    y = call("y", (1, 2), (3,), 1, parent_id="x", extends_parent=True)
    z = call("z", (9, 9), (3,), 7, parent_id="gone", break_cause=BreakCause.RETOKENIZED)
    [found] = find_breaks((x, y, z))
    assert found.num_recomputed_tokens == 2


def test_a_summary_counts_the_turns_that_could_break() -> None:
    third = call("c", (1, 2, 3, 4, 50, 51, 8), (9,), 5,
                 parent_id="a", break_cause=BreakCause.RETOKENIZED)  # fmt: skip
    edited = call("d", (1, 70, 71), (9,), 3, break_cause=BreakCause.HISTORY_EDITED)
    summary = summarize_breaks([trajectory(FIRST, SECOND, third), trajectory(FIRST, edited)])
    # b and c of the one, d of the other; the first turns go back to nothing.
    assert summary.num_replaying_turns == 3
    assert summary.by_cause == {
        BreakCause.RETOKENIZED: BreakTotals(
            num_turns=1, num_recomputed_tokens=3, num_departed_tokens=3
        ),
        BreakCause.HISTORY_EDITED: BreakTotals(
            num_turns=1, num_recomputed_tokens=2, num_departed_tokens=4
        ),
    }
    assert summary.total == BreakTotals(num_turns=2, num_recomputed_tokens=5, num_departed_tokens=7)
    assert summary.broken_fraction == pytest.approx(2 / 3)
    assert BreakSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary
    assert format_break_totals(summary.total) == (
        "2 turns, 5 prompt tokens computed anew, 7 sampled tokens left the context"
    )


def test_nothing_broken_is_nothing() -> None:
    assert summarize_breaks([]) == BreakSummary()
    summary = summarize_breaks([trajectory(FIRST, SECOND)])
    assert (summary.by_cause, summary.broken_fraction) == ({}, 0.0)
    assert BreakSummary().broken_fraction == 0.0


def test_every_cause_has_a_remedy_of_one_line() -> None:
    assert set(REMEDIES) == set(BreakCause)
    assert all("\n" not in text and len(text) > 20 for text in REMEDIES.values())


def test_shared_tokens_are_those_of_a_plain_loop() -> None:
    """The halving finds the position that comparing token by token finds."""
    dice = random.Random(3)
    for _ in range(300):
        shared = tuple(dice.choices((1, 2), k=dice.randrange(12)))
        old = (*shared, *dice.choices((1, 2), k=dice.randrange(1, 8)))
        new = (*shared, *dice.choices((1, 2), k=dice.randrange(1, 8)))
        position = next(
            (n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]),
            min(len(old), len(new)),
        )
        turns = (
            call("a", old[:1], old[1:], 1),
            call("c", new, (9,), 3, parent_id="a", break_cause=BreakCause.RETOKENIZED),
        )
        [found] = find_breaks(turns)
        assert found.num_recomputed_tokens == min(len(old), len(new)) - position
        assert found.num_departed_tokens == len(old) - max(position, 1)
