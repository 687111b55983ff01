"""How well the quickstart is learned from what older weights sampled.

    python -m benchmarks.staleness

Writes docs/results/staleness.md: the quickstart with no staleness, a little and much of it, each
with the decoupled objective and with PPO's own, on several seeds. Trajectories are as old as they
may be (benchmarks/stale_training.py). The page is written after every run, so that one that is
interrupted has its rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.quickstart import SeedResult, run_seed

_PAGE = Path("docs/results/staleness.md")
_CONFIG = Path("configs/quickstart.yaml")
_OBJECTIVES = {
    "decoupled": "decoupled_ppo",
    "PPO's own": "ppo_clip",
}

Results = Mapping[tuple[int, str], Sequence[SeedResult]]


def format_page(results: Results, num_steps: int) -> str:
    """The table: one row for each staleness and objective."""
    rows = []
    for (staleness, objective), of_seeds in results.items():
        lines = [line for result in of_seeds for line in result.metrics]
        after = ", ".join(f"{result.after:.3f}" for result in of_seeds)
        cells = [
            str(staleness),
            objective,
            after,
            f"{statistics.mean(line['token_age_mean'] for line in lines):.2f}",
            f"{max(line['token_age_max'] for line in lines):.0f}",
            f"{statistics.mean(line['off_policy_fraction'] for line in lines):.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    before = [result.before for of_seeds in results.values() for result in of_seeds]
    return f"""# Learning from what older weights sampled

Made by `python -m benchmarks.staleness`: {_CONFIG}, {num_steps} steps, with other
values of `rollout.max_staleness` (`rollout.max_trajectory_age` is 8) and of
`train.algorithm.loss.kind`. A step begins only when all trajectories that were admitted ahead of
it have ended, so that its tokens are as old as `max_staleness` lets them be: at 8, the first nine
steps learn from what the weights before step 1 sampled. Mean reward on 256 held-out tasks:
{min(before):.3f} to {max(before):.3f} before, and after the last step as below. The age of the
sampled tokens is in weight updates, over all steps.

| `max_staleness` | objective | mean reward after, by seed | mean age | largest | older tokens |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main() -> None:
    """Runs one after the other and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    results: dict[tuple[int, str], list[SeedResult]] = {
        (staleness, objective): [] for staleness in arguments.staleness for objective in _OBJECTIVES
    }
    for seed in arguments.seeds:
        for (staleness, objective), of_seeds in results.items():
            overrides = (
                f"rollout.max_staleness={staleness}",
                f"train.algorithm.loss.kind={_OBJECTIVES[objective]}",
                f"train.total_steps={arguments.steps}",
            )
            result = run_seed(_CONFIG, seed, "kept", overrides, "benchmarks.stale_training")
            of_seeds.append(result)
            print(
                f"seed {seed}, staleness {staleness}, {objective}: {result.before:.3f} to "
                f"{result.after:.3f} in {result.seconds:.0f} s",
                flush=True,
            )
            done = {key: found for key, found in results.items() if found}
            _PAGE.write_text(format_page(done, arguments.steps), encoding="utf-8")
    print(f"wrote {_PAGE}")


if __name__ == "__main__":
    main()
