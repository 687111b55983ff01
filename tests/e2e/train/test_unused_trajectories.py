"""Killed in the midst of its rollouts, a run makes again only what had not finished."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store.run_folder import RunFolder

#: Ends at once for most tasks; for some, only when it may. Says what it was asked, and when done.
AGENT = """
import asyncio
from pathlib import Path


async def answer(data, client):
    key = data["question"]
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": key}]
    )
    while "slow" in key and not Path("go").exists():
        await asyncio.sleep(0.01)
    with Path("done.txt").open("a") as file:
        file.write(key.replace(" ", "-") + "\\n")
    return reply.choices[0].message.content


def build():
    return answer


def count_vowels(completions, **kwargs):
    return sum(letter in "aeiou" for letter in completions) / max(len(completions), 1)
"""
ARGUMENTS = (
    "train",
    "--config",
    "experiment.yaml",
    "train.total_steps=2",
    "train_dataset.shuffle=false",
    "train_dataset.batch_size=3",
    "rollout.max_staleness=1",
)
#: Two rounds of three tasks, begun together; with two that end there is no step yet.
QUESTIONS = ["a", "slow b", "slow c", "d", "slow e", "slow f"]
NUM_FINISHED = 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_had_finished_is_used_and_the_rest_made_again(
    project: Path, agentrl: Any, finish: Any, wait_until: Any
) -> None:
    (project / "my_agent.py").write_text(AGENT)
    rows = "\n".join(f'{{"question": "{question}"}}' for question in QUESTIONS)
    (project / "rows.jsonl").write_text(rows)
    log, run_dir = project / "done.txt", project / "runs" / "small" / "t0"

    def count_done() -> Counter[str]:
        return Counter(log.read_text().split() if log.is_file() else ())

    killed = agentrl(*ARGUMENTS)
    wait_until(killed, lambda: count_done().total() >= NUM_FINISHED)
    # The last is judged and written after it has said that it is done.
    pending = run_dir / "pending"
    wait_until(
        killed,
        lambda: sum(p.read_bytes().count(b"\n") for p in pending.glob("*")) >= NUM_FINISHED,
    )
    killed.kill()
    killed.communicate()
    assert RunFolder.open(run_dir).trajectory_steps() == []
    finished = {t.id: t for t in RunFolder.open(run_dir).read_pending()}
    assert {t.step for t in finished.values()} == {1, 2}

    (project / "go").touch()
    output = finish(agentrl(*ARGUMENTS))
    assert f"{NUM_FINISHED} finished trajectories are used, not repeated" in output
    folder = RunFolder.open(run_dir)
    stored = {t.id: t for step in (1, 2) for t in folder.read_trajectories(step)}
    assert len(stored) == 24
    # A group goes into the first step that it is finished for.
    assert {key: replace(stored[key], step=t.step) for key, t in finished.items()} == finished
    others = {t.task["question"] for key, t in stored.items() if key not in finished}
    assert others == {question for question in QUESTIONS if "slow" in question}
    # Each of the others was asked once for each sample, before or after the kill.
    assert count_done() == {question.replace(" ", "-"): 4 for question in QUESTIONS}
    assert list(pending.iterdir()) == []
