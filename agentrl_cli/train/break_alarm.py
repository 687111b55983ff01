"""Says it once when agents break the conversations that the training is made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl_cli.breaks import REMEDIES, BreakSummary, summarize_breaks
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.records import Trajectory

_log = get_logger(__name__)

#: Share of broken turns from which on a person should know. A framework that rewrites history
#: does so on every turn, or on every long one; a single odd trajectory stays below.
ALARM_FRACTION = 0.1


class BreakAlarm:
    """Tells the observer of the first step with too many broken turns, and what to type.

    Args:
        observer: shows the run to a person.
        run_dir: the run folder, for the command that shows them.
    """

    def __init__(self, observer: Observer, run_dir: Path) -> None:
        self._observer = observer
        self._run_dir = run_dir
        self._has_rung = False

    def check(self, step: int, batch: Sequence[Trajectory]) -> None:
        """Looks at the trajectories of a step."""
        if self._has_rung:
            return
        breaks = summarize_breaks(batch)
        if breaks.broken_fraction < ALARM_FRACTION or not breaks.by_cause:
            return
        self._has_rung = True
        text = format_alarm(step, breaks, self._run_dir)
        _log.warning("%s", text)
        self._observer.on_message(text)


def format_alarm(step: int, breaks: BreakSummary, run_dir: Path) -> str:
    """What broke, what it costs, and what to type, cause by cause."""
    total = breaks.total
    lines = [
        f"step {step}: {total.num_turns} of {breaks.num_replaying_turns} turns that go back to an "
        f"earlier turn ({breaks.broken_fraction:.0%}) could not continue its tokens. Nothing wrong "
        f"is trained, but {total.num_recomputed_tokens:,} prompt tokens were computed anew, and "
        f"{total.num_departed_tokens:,} sampled tokens are no longer in the context of the turns "
        "after them"
    ]
    by_size = sorted(breaks.by_cause.items(), key=lambda item: -item[1].num_turns)
    lines += [f"  {cause.value} ({t.num_turns}): {REMEDIES[cause]}" for cause, t in by_size]
    lines.append(
        f"  look at them: agentrl inspect-trajectories {run_dir} --step {step} --broken any"
    )
    return "\n".join(lines)
