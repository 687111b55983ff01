"""``agentrl inspect-trajectories``."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from agentrl_cli.errors import UserInputError

#: Failures to show: any, none, or those at one boundary.
FailureFilter = Literal[
    "any", "none", "agent", "tool", "reward", "engine", "gateway", "timeout", "budget"
]
#: Prefix mismatches to show: any, none, or those of one cause.
MismatchFilter = Literal[
    "any",
    "none",
    "history_edited",
    "thinking_stripped",
    "tool_arguments_changed",
    "template_changed",
    "retokenized",
]

FailureOption = Annotated[
    FailureFilter | None, typer.Option(help="Failed trajectories only (or none of them).")
]
MismatchOption = Annotated[
    MismatchFilter | None,
    typer.Option(help="Trajectories with prefix mismatches only (or without any)."),
]
MalformedOption = Annotated[
    Literal["any", "none"] | None,
    typer.Option(help="Trajectories with malformed tool calls only (or without any)."),
]
ReplacedOption = Annotated[
    Literal["any", "none"] | None,
    typer.Option(help="Trajectories of replaced groups only (or none of them)."),
]
EvalsOption = Annotated[
    str | None,
    typer.Option(
        help="Evaluations instead of training steps: all, training (those that it makes), or one "
        "by its name.",
        metavar="NAME",
    ),
]
TrajectoryArgument = Annotated[
    str | None,
    typer.Argument(help="Show this one: its id, or its number in the list.", metavar="[ID]"),
]
StepOption = Annotated[
    str | None,
    typer.Option(help="Steps: 12, 3-7, 1,4,9, last or all.", metavar="STEPS"),
]
SortOption = Annotated[
    Literal["reward", "turns", "tokens", "seconds"] | None,
    typer.Option(help="Sort by this, largest first."),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="A model folder whose tokenizer spells the ids.", metavar="DIR"),
]


def inspect_command(
    run: Annotated[str, typer.Argument(help="A run folder, or its URL.", metavar="RUN")],
    trajectory: TrajectoryArgument = None,
    step: StepOption = None,
    evals: EvalsOption = None,
    min_reward: Annotated[float | None, typer.Option(help="Smallest reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Largest reward.")] = None,
    failure: FailureOption = None,
    mismatch: MismatchOption = None,
    malformed: MalformedOption = None,
    replaced: ReplacedOption = None,
    task: Annotated[str | None, typer.Option(help="Task id.", metavar="ID")] = None,
    agent: Annotated[str | None, typer.Option(help="Agent name.", metavar="NAME")] = None,
    sort: SortOption = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 50,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show ids, logprobs, versions and mask.")
    ] = False,
    tokenizer: TokenizerOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print, also where a terminal would show it all.")
    ] = False,
) -> None:
    """Look at a run's steps and trajectories in full screen; print what options or a pipe ask
    for."""
    from agentrl_cli.cli.display.progress_display import is_plain
    from agentrl_cli.inspector.inspect_run import inspect_run
    from agentrl_cli.inspector.trajectory_query import TrajectoryQuery

    if min_reward is not None and max_reward is not None and min_reward > max_reward:
        raise UserInputError(
            f"--min-reward {min_reward} is above --max-reward {max_reward}: nothing is in between"
        )
    query = TrajectoryQuery(
        steps=step,
        evals=evals,
        min_reward=min_reward,
        max_reward=max_reward,
        failure=failure,
        mismatch=mismatch,
        malformed=malformed,
        replaced=replaced,
        task_id=task,
        agent_name=agent,
        sort=sort,
        ascending=ascending,
        limit=limit,
    )
    asks_for_output = trajectory is not None or not query.is_empty or tokens or as_json or plain
    if not asks_for_output and not is_plain(os.environ, sys.stdin.isatty() and sys.stdout.isatty()):
        from agentrl_cli.inspector.terminal_app.application import run_application

        run_application(run, tokenizer)
        return
    if tokenizer is not None and not tokens:
        raise UserInputError("--tokenizer is for the view of tokens. Add --tokens")
    inspect_run(run, trajectory, query, tokens=tokens, tokenizer_path=tokenizer, as_json=as_json)
