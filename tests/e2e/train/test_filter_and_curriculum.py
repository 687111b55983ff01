"""Tasks that are solved always or never, in whole runs: replaced, rested, and recovered."""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_cli.config.config_file import load_config
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import TaskStream, build_task_stream, recall_outcomes
from agentrl_cli.store.run_folder import RunFolder

REWARD = """

def judge(completions, level, **kwargs):
    if level != "open":
        return 1.0 if level == "always" else 0.0
    return float(len(completions)) + count_vowels(completions)
"""
#: Of every five tasks one is solved always and one never.
LEVELS = ("always", "open", "open", "never", "open")
NUM_ROWS, BATCH_SIZE, N_SAMPLES, NUM_STEPS, MAX_REPLACED = 20, 4, 4, 7, 2
FILTER = f"rollout.filter={{kind: dynamic_sampling, max_backup_tasks: {MAX_REPLACED}}}"
CURRICULUM = "rollout.curriculum={kind: cooldown, max_cooldown_epochs: 4}"


@pytest.fixture
def train(
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
) -> Callable[..., RunFolder]:
    """Runs the command to its end, killed after so many steps first where that is asked for."""
    with (project / "my_agent.py").open("a") as file:
        file.write(REWARD)
    rows = [{"question": f"Say {n}.", "level": LEVELS[n % len(LEVELS)]} for n in range(NUM_ROWS)]
    (project / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = yaml.safe_load((project / "experiment.yaml").read_text())
    config["reward_fn_path"] = "my_agent.judge"
    config["train"] |= {"total_steps": NUM_STEPS, "save_every_steps": 3}
    (project / "experiment.yaml").write_text(yaml.safe_dump(config))
    run_dir = project / "runs" / "small" / "t0"
    metrics = run_dir / "metrics.jsonl"

    def run(*overrides: str, kill_after: int | None = None) -> RunFolder:
        arguments = ("train", "--config", "experiment.yaml", *overrides)
        if kill_after is not None:
            process = agentrl(*arguments)
            wait_until(process, metrics.is_file)
            wait_until(process, lambda: len(metrics.read_text().splitlines()) >= kill_after)
            process.kill()
            process.communicate()
        finish(agentrl(*arguments))
        folder = RunFolder.open(run_dir)
        assert folder.trajectory_steps() == list(range(1, NUM_STEPS + 1))
        assert [line["step"] for line in folder.read_metrics()] == folder.trajectory_steps()
        return folder

    return run


def group(trajectories: list[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id].append(trajectory)
    return groups


def is_flat(trajectories: list[Trajectory]) -> bool:
    return len({t.reward for t in trajectories}) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("agent_mode", ["inline", "subprocess"])
def test_groups_without_signal_are_replaced_stored_and_not_trained_on(
    train: Callable[..., RunFolder],
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    agent_mode: str,
) -> None:
    kill_after = 4 if agent_mode == "inline" else None
    mode = (f"rollout.agent_mode={agent_mode}", "rollout.subprocess.max_processes=2")
    folder = train(FILTER, *mode, kill_after=kill_after)
    rows = [json.loads(line) for line in (project / "rows.jsonl").read_text().splitlines()]
    stream = TaskStream(
        rows, batch_size=BATCH_SIZE, shuffle=True, seed=1, num_backup_tasks=MAX_REPLACED
    )
    all_groups: dict[str, list[Trajectory]] = {}
    marked: list[str] = []
    for step, line in enumerate(folder.read_metrics(), start=1):
        trajectories = folder.read_trajectories(step)
        groups = group(trajectories)
        assert all(len(g) == N_SAMPLES for g in groups.values())
        replaced = [name for name, g in groups.items() if g[0].replaced_by is not None]
        flat = [name for name, g in groups.items() if is_flat(g)]
        assert replaced == flat[: len(replaced)]
        assert len(groups) - len(replaced) == BATCH_SIZE
        assert line["num_filtered_groups"] == len(replaced)
        assert line["num_groups_without_signal"] == len(flat)
        assert line["num_trajectories"] == len(trajectories)
        rewards = [t.reward for t in trajectories if t.reward is not None]
        assert line["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
        # One turn each: a sample for every trajectory of the batch, and for no other.
        assert line["num_samples"] == BATCH_SIZE * N_SAMPLES
        versions = {v for t in trajectories for i in t.interactions for v in i.versions}
        assert versions <= set(range(step))
        assert not set(groups) & set(all_groups)
        all_groups |= groups
        marked += [t.id for t in trajectories if t.replaced_by is not None]
    assert marked, "nothing was replaced: the test shows nothing"
    for number in range(1, NUM_STEPS + 1):
        found = {n: g for n, g in sorted(all_groups.items()) if n.startswith(f"{number:06d}.")}
        planned = [*stream.batch(number), *stream.backup_tasks(number)]
        tasks = [(t.group_id, t.task_id) for t in planned]
        assert [(name, g[0].task_id) for name, g in found.items()] == tasks[: len(found)]
        num_flat = sum(map(is_flat, found.values()))
        assert len(found) - BATCH_SIZE == min(num_flat, MAX_REPLACED)
    inspect = ("inspect-trajectories", str(folder.path), "--replaced", "any", "--json")
    shown = json.loads(finish(agentrl(*inspect)))["trajectories"]
    assert [t["id"] for t in shown] == marked[:50]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_solved_always_or_never_rest_and_a_killed_run_chooses_the_same(
    train: Callable[..., RunFolder], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few rows, so that the run has many epochs.
    overrides = (CURRICULUM, "train_dataset.limit=10", f"train.total_steps={NUM_STEPS}")
    folder = train(*overrides, "rollout.max_staleness=0", kill_after=4)
    monkeypatch.chdir(project)
    config = load_config("experiment.yaml", [*overrides, "rollout.max_staleness=0"])
    counts: Counter[bool] = Counter()
    for step, line in enumerate(folder.read_metrics(), start=1):
        # Each batch is what the stored steps before it say, whenever the command was killed.
        stream = build_task_stream(config, [{}] * 10)
        recall_outcomes(stream, folder, step)
        stored = group(folder.read_trajectories(step))
        planned = [(t.group_id, t.task_id) for t in stream.batch(step)]
        assert [(name, g[0].task_id) for name, g in stored.items()] == planned
        assert line["num_tasks_in_cooldown"] == stream.count_cooling(step)
        assert line["num_filtered_groups"] == 0
        counts.update(t.task["level"] == "open" for g in stored.values() for t in g[:1])
    assert folder.read_metrics()[-1]["num_tasks_in_cooldown"] > 0
    # Six of ten tasks are open; of 28 turns they would have 17 or less without a rest.
    assert counts[True] > 0.6 * NUM_STEPS * BATCH_SIZE + 1
