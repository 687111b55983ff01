"""What prefix mismatches cost, worked out by hand."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest

from agentrl_cli.prefix_mismatches import (
    REMEDIES,
    MismatchSummary,
    find_prefix_mismatches,
    format_mismatch_totals,
    summarize_prefix_mismatches,
)
from agentrl_cli.records import Interaction, InteractionStatus, MismatchCause, Trajectory


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


@pytest.mark.parametrize(
    ("earlier", "prompt", "fields", "costs"),
    [
        # It shares 1 2 3 4 with the parent's seven tokens; 50 51 stand for what was 5 6 7. After
        # position 4 the parent's sequence had 3 tokens, all sampled; the request has 3 there.
        ((FIRST,), (1, 2, 3, 4, 50, 51, 8), {"parent_id": "a"}, (3, 3)),
        # What lies beyond the old sequence is new, and costs nothing.
        ((FIRST,), (1, 2, 3, 40, *range(100, 200)), {"parent_id": "a"}, (4, 4)),
        # All but the first token is gone: two tokens after it are computed, four were sampled.
        ((FIRST,), (1, 70, 71), {}, (2, 4)),
        # It extends the first turn; the second, with the same request, was replayed otherwise.
        # The second's sequence has 11 tokens; 9 are shared.
        (
            (FIRST, SECOND),
            (1, 2, 3, 4, 5, 6, 7, 8, 9, 60, 61, 62),
            {"parent_id": "a", "extends_parent": True},
            (2, 2),
        ),
        # The first sampled turn is edited: of the first turn 5 6 7 go, of the second 9 10 11.
        ((FIRST, SECOND), (1, 2, 3, 4, 55, 56, 57, 58, 59, 60), {}, (6, 6)),
    ],
)
def test_what_a_mismatch_costs(
    earlier: tuple[Interaction, ...],
    prompt: tuple[int, ...],
    fields: dict[str, Any],
    costs: tuple[int, int],
) -> None:
    last = call("c", prompt, (9,), 5, mismatch_cause=MismatchCause.RETOKENIZED, **fields)
    [found] = find_prefix_mismatches((*earlier, last))
    assert (found.interaction_id, found.cause) == ("c", MismatchCause.RETOKENIZED)
    assert (found.num_reprefilled_tokens, found.num_dropped_tokens) == costs


def test_later_and_failed_calls_are_not_what_a_turn_goes_back_to() -> None:
    failed = call("f", (1, 70, 71, 72), (), 3, status=InteractionStatus.FAILED,
                  mismatch_cause=MismatchCause.HISTORY_EDITED)  # fmt: skip
    later = call("l", (1, 70, 71, 72, 73), (9,), 9)
    third = call("c", (1, 70, 71, 72), (9,), 5, mismatch_cause=MismatchCause.HISTORY_EDITED)
    [found] = find_prefix_mismatches((FIRST, failed, third, later))
    assert (found.interaction_id, found.num_reprefilled_tokens) == ("c", 3)


def test_without_ids_a_mismatch_counts_and_costs_nothing_known() -> None:
    endpoint = Interaction(id="e", mismatch_cause=MismatchCause.HISTORY_EDITED, started=3, ended=4)
    [found] = find_prefix_mismatches((Interaction(id="d", started=1, ended=2), endpoint))
    assert (found.num_reprefilled_tokens, found.num_dropped_tokens) == (0, 0)


def test_damaged_records_end_too() -> None:
    """Two turns that name each other as parents."""
    x = call("x", (1, 2), (3,), 1, parent_id="y", extends_parent=True)
    y = call("y", (1, 2), (3,), 1, parent_id="x", extends_parent=True)
    z = call("z", (9, 9), (3,), 7, parent_id="gone", mismatch_cause=MismatchCause.RETOKENIZED)
    [found] = find_prefix_mismatches((x, y, z))
    assert found.num_reprefilled_tokens == 2


def test_a_summary_counts_the_turns_that_could_mismatch() -> None:
    third = call("c", (1, 2, 3, 4, 50, 51, 8), (9,), 5,
                 parent_id="a", mismatch_cause=MismatchCause.RETOKENIZED)  # fmt: skip
    edited = call("d", (1, 70, 71), (9,), 3, mismatch_cause=MismatchCause.HISTORY_EDITED)
    summary = summarize_prefix_mismatches(
        [trajectory(FIRST, SECOND, third), trajectory(FIRST, edited)]
    )
    # b and c of the one, d of the other; the first turns go back to nothing.
    assert summary.num_replaying_turns == 3
    numbers = {cause: tuple(asdict(t).values()) for cause, t in summary.by_cause.items()}
    assert numbers == {
        MismatchCause.RETOKENIZED: (1, 3, 3),
        MismatchCause.HISTORY_EDITED: (1, 2, 4),
    }
    assert tuple(asdict(summary.total).values()) == (2, 5, 7)
    assert summary.mismatch_fraction == pytest.approx(2 / 3)
    assert MismatchSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary
    assert format_mismatch_totals(summary.total) == (
        "2 turns, 5 prompt tokens re-prefilled, 7 sampled tokens dropped"
    )


def test_no_mismatch_costs_nothing() -> None:
    summary = summarize_prefix_mismatches([trajectory(FIRST, SECOND)])
    assert (summary.by_cause, summary.mismatch_fraction) == ({}, 0.0)
    assert summarize_prefix_mismatches([]).mismatch_fraction == 0.0


def test_every_cause_has_a_remedy_of_one_line() -> None:
    assert set(REMEDIES) == set(MismatchCause)
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
            call("c", new, (9,), 3, parent_id="a", mismatch_cause=MismatchCause.RETOKENIZED),
        )
        [found] = find_prefix_mismatches(turns)
        assert found.num_reprefilled_tokens == min(len(old), len(new)) - position
        assert found.num_dropped_tokens == len(old) - max(position, 1)
