"""What ``agentrl train --seeds`` says at its end; real runs are in tests/e2e/cli/test_seeds.py."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_cli.cli.seed_runs import train_seeds
from agentrl_cli.config.config_file import load_config
from agentrl_cli.errors import ConfigError
from agentrl_cli.store.run_folder import RunFolder

CONFIG = """
experiment_name: e
output_dir: my runs
model: {path: m}
agent_builder_path: a.py:b
train_dataset: {path: t.jsonl}
"""


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        (
            {"seed=1": 0.25, "seed=2": 0.5, "seed=3": math.nan},
            "'my runs/e/t0-seed1' 'my runs/e/t0-seed2'",
        ),
        ({"seed=1": 0.25}, None),
    ],
)
def test_the_curves_of_runs_with_rewards_are_named(
    rewards: dict[str, float], line: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)

    def train(words: list[str]) -> None:
        with RunFolder.create_or_resume(load_config(config, words)) as run:
            for word in words:
                if word in rewards:
                    run.append_metrics({"step": 1, "reward_mean": rewards[word]})

    results = train_seeds(train, config, [], "1,2,3", skip_finished=False)
    console = Console(file=io.StringIO(), width=60, color_system=None)
    results.print(console)
    last = console.file.getvalue().splitlines()[-1]
    if line is None:
        assert "compare" not in last
    else:
        assert last.startswith("see their curves in one picture:  agentrl compare --curves ")
        assert last.endswith(f"{line} --html curves.html")


@pytest.mark.parametrize(
    ("seeds", "overrides", "message"),
    [
        ("1,x", [], "whole numbers from 0 on, as in --seeds 1,2,3"),
        ("2,2", [], "2 is there twice"),
        ("1,2", ["seed=5"], "Leave seed=5 out"),
    ],
)
def test_what_seeds_cannot_be_is_refused(
    seeds: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    with pytest.raises(ConfigError, match=message):
        train_seeds(print, config, overrides, seeds, skip_finished=False)
