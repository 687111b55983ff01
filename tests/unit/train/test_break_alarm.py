"""A person is told once, in words and with what to type."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.log import SilentObserver
from agentrl_cli.records import BreakCause, Interaction, Trajectory
from agentrl_cli.train.break_alarm import BreakAlarm


class Listener(SilentObserver):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def batch(num_turns: int, num_broken: int, cause: BreakCause = BreakCause.THINKING_STRIPPED):
    """One trajectory: a first turn, then ``num_turns`` that go back to it, some of them broken."""
    calls = [Interaction(id="0", prompt_ids=(1, 2), completion_ids=(3, 4), started=1, ended=2)]
    for number in range(num_turns):
        broken = number < num_broken
        calls.append(
            Interaction(
                id=str(number + 1),
                parent_id="0",
                extends_parent=not broken,
                break_cause=cause if broken else None,
                prompt_ids=(1, 2, 9, 9) if broken else (1, 2, 3, 4, 5),
                completion_ids=(6,),
                started=3 + 2 * number,
                ended=4 + 2 * number,
            )
        )
    return [Trajectory(id="t", group_id="g", task_id="0", interactions=tuple(calls))]


def test_it_rings_once_and_says_what_to_type() -> None:
    listener = Listener()
    alarm = BreakAlarm(listener, Path("runs/e/t"))
    alarm.check(1, batch(20, 1))
    assert listener.messages == []
    alarm.check(2, batch(20, 5))
    alarm.check(3, batch(20, 20))
    [text] = listener.messages
    assert "step 2: 5 of 20 turns" in text
    assert "(25%)" in text
    assert "10 prompt tokens were computed anew" in text
    assert "thinking_stripped (5): type engine.keep_thinking=true" in text
    assert "agentrl inspect-trajectories runs/e/t --step 2 --broken any" in text


def test_no_turn_that_could_break_is_no_alarm() -> None:
    listener = Listener()
    BreakAlarm(listener, Path("run")).check(1, batch(0, 0))
    BreakAlarm(listener, Path("run")).check(1, [])
    assert listener.messages == []
