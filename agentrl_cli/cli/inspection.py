"""``agentrl inspect-trajectories``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.errors import UserInputError


class SortKey(StrEnum):
    """What a list of trajectories may be sorted by."""

    REWARD = "reward"
    TURNS = "turns"
    TOKENS = "tokens"
    SECONDS = "seconds"


class FailureFilter(StrEnum):
    """Failures to show: any, none, or those at one boundary."""

    ANY = "any"
    NONE = "none"
    AGENT = "agent"
    TOOL = "tool"
    REWARD = "reward"
    ENGINE = "engine"
    GATEWAY = "gateway"
    TIMEOUT = "timeout"
    BUDGET = "budget"


class ReplacedFilter(StrEnum):
    """Trajectories of groups that others took the place of, or all the others."""

    ANY = "any"
    NONE = "none"


class BreakFilter(StrEnum):
    """Breaks to show: any, none, or those of one cause."""

    ANY = "any"
    NONE = "none"
    HISTORY_EDITED = "history_edited"
    THINKING_STRIPPED = "thinking_stripped"
    TOOL_ARGUMENTS_CHANGED = "tool_arguments_changed"
    TEMPLATE_CHANGED = "template_changed"
    RETOKENIZED = "retokenized"


FailureOption = Annotated[
    FailureFilter | None, typer.Option(help="Failed trajectories only (or none of them).")
]
BrokenOption = Annotated[
    BreakFilter | None, typer.Option(help="Trajectories with broken turns only (or without any).")
]
ReplacedOption = Annotated[
    ReplacedFilter | None,
    typer.Option(help="Trajectories of replaced groups only (or none of them)."),
]


def inspect_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    trajectory: Annotated[
        str | None,
        typer.Argument(help="Show this one: its id, or its number in the list.", metavar="[ID]"),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Steps: 12, 3-7, 1,4,9, last or all.", metavar="STEPS"),
    ] = None,
    evals: Annotated[
        bool, typer.Option("--evals", help="Evaluations instead of training steps.")
    ] = False,
    min_reward: Annotated[float | None, typer.Option(help="Smallest reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Largest reward.")] = None,
    failure: FailureOption = None,
    broken: BrokenOption = None,
    replaced: ReplacedOption = None,
    task: Annotated[str | None, typer.Option(help="Task id.", metavar="ID")] = None,
    agent: Annotated[str | None, typer.Option(help="Agent name.", metavar="NAME")] = None,
    sort: Annotated[SortKey | None, typer.Option(help="Sort by this, largest first.")] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most rows of a list.")] = 50,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show ids, logprobs, versions and mask.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A model folder whose tokenizer spells the ids.", metavar="DIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
) -> None:
    """List a run's steps and trajectories, or show one as its conversation tree."""
    from agentrl_cli.inspector.query import TrajectoryQuery
    from agentrl_cli.inspector.show import inspect_run

    if min_reward is not None and max_reward is not None and min_reward > max_reward:
        raise UserInputError(
            f"--min-reward {min_reward} is above --max-reward {max_reward}: nothing lies between"
        )
    if tokenizer is not None and not tokens:
        raise UserInputError("--tokenizer is for the view of tokens. Add --tokens")
    query = TrajectoryQuery(
        steps=step,
        evals=evals,
        min_reward=min_reward,
        max_reward=max_reward,
        failure=failure.value if failure else None,
        broken=broken.value if broken else None,
        replaced=replaced.value if replaced else None,
        task_id=task,
        agent_name=agent,
        sort=sort.value if sort else None,
        ascending=ascending,
        limit=limit,
    )
    inspect_run(run, trajectory, query, tokens=tokens, tokenizer_path=tokenizer, as_json=as_json)
