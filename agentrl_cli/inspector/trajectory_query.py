"""Which trajectories of a run to show, and finding them without reading their tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from agentrl_cli.errors import AgentrlError, UserInputError, format_nearest
from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import (
    ProximalLogprobs,
    find_matches,
    read_proximal_logprobs,
    read_summaries,
    read_trajectory,
)
from agentrl_cli.store.trajectory_summary import TrajectorySummary

#: The name of the evaluations that training makes.
TRAINING_EVALS = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryQuery:
    """Filters (None: everything passes), an order and a limit."""

    steps: str | None = None
    """``12``, ``3-7``, ``1,4,9``, ``last`` or ``all``."""
    evals: str | None = None
    """Evaluations instead of training steps: all of them, or those with this name."""
    min_reward: float | None = None
    max_reward: float | None = None
    failure: str | None = None
    """A boundary, ``any`` or ``none``."""
    mismatch: str | None = None
    """The cause of a prefix mismatch, ``any`` or ``none``."""
    malformed: str | None = None
    """``any``: those with a malformed tool call; ``none``: those without."""
    replaced: str | None = None
    """``any``: those of replaced groups; ``none``: those trained on."""
    task_id: str | None = None
    agent_name: str | None = None
    sort: str | None = None
    """``reward``, ``turns``, ``tokens`` or ``seconds``; None: as stored."""
    ascending: bool = False
    limit: int | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing is asked for but the run itself."""
        rewards = (self.min_reward, self.max_reward)
        kinds = (self.failure, self.mismatch, self.malformed, self.replaced)
        asked = (self.steps, self.evals, self.task_id, self.agent_name, self.sort)
        return all(value is None for value in (*rewards, *kinds, *asked))


@dataclass(frozen=True, slots=True)
class Source:
    """One stored file of trajectories: a training step, or an evaluation after a step."""

    step: int
    is_eval: bool = False
    label: str | None = None

    @property
    def name(self) -> str:
        """``step 12``, ``eval 20`` or, with its name, ``eval 20 label``."""
        kind = "eval" if self.is_eval else "step"
        return f"{kind} {self.step}" + (f" {self.label}" if self.label else "")

    def find_file(self, folder: RunFolder) -> Path:
        """Where it is stored."""
        return folder.find_trajectory_file(self.step, is_eval=self.is_eval, label=self.label)

    def read_proximal_logprobs(self, folder: RunFolder, trajectory: Trajectory) -> ProximalLogprobs:
        """What the trainer computed for its tokens before the update; empty where it has not."""
        ids = [interaction.id for interaction in trajectory.interactions]
        return read_proximal_logprobs(self.find_file(folder), ids)


@dataclass(frozen=True, slots=True)
class Found:
    """A trajectory that a query found, and where it is stored."""

    source: Source
    number: int
    """Its position in the file, from 0."""
    summary: TrajectorySummary


@dataclass(frozen=True, slots=True)
class Selection:
    """What a query found, in its order; and what could not be read, in words."""

    found: list[Found]
    num_matching: int
    """Before the limit."""
    problems: list[str]


def list_sources(folder: RunFolder) -> list[Source]:
    """Every step and evaluation that is stored."""
    steps = [Source(step) for step in folder.trajectory_steps()]
    return steps + [Source(step, is_eval=True, label=label) for step, label in folder.list_evals()]


def choose_sources(folder: RunFolder, query: TrajectoryQuery) -> list[Source]:
    """The files that a query looks into.

    Raises:
        UserInputError: steps that cannot be understood, or that are not stored.
    """
    sources = list_sources(folder)
    stored = [s for s in sources if s.is_eval == (query.evals is not None)]
    kind = "evaluations" if query.evals is not None else "steps"
    if not stored:
        remedy = "Type agentrl eval"
        if query.evals is None:
            remedy = "The first appears when step 1 is sampled"
            if sources:
                remedy += "; for the trajectories of evaluations, type --evals all"
        raise UserInputError(f"{folder.location}: no {kind} are stored yet. {remedy}")
    if query.evals not in (None, "all"):
        names = list(dict.fromkeys(s.label or TRAINING_EVALS for s in stored))
        stored = [s for s in stored if (s.label or TRAINING_EVALS) == query.evals]
        if not stored:
            raise UserInputError(
                f"{folder.location}: --evals {query.evals}: no evaluation has this name; "
                f"{format_nearest(query.evals, ['all', *names])}"
            )
    if query.steps is None or query.steps == "all":
        return stored
    if query.steps == "last":
        return [s for s in stored if s.step == stored[-1].step]
    wanted = parse_steps(query.steps)
    chosen = [s for s in stored if any(low <= s.step <= high for low, high in wanted)]
    if not chosen:
        raise UserInputError(
            f"{folder.location}: --step {query.steps}: not stored; stored {kind}: "
            f"{stored[0].step} to {stored[-1].step} ({len(stored)})"
        )
    return chosen


def parse_steps(text: str) -> list[tuple[int, int]]:
    """Ranges of steps, both ends included.

    Raises:
        UserInputError: ``text`` is not a list of steps.
    """
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise UserInputError(
                f"--step {text!r} is not understood. Allowed: 12, 3-7, 1,4,9, last, all"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise UserInputError(f"--step {text!r}: {low} is after {high}. Type {high}-{low}")
        ranges.append((low, high))
    return ranges


def select(folder: RunFolder, query: TrajectoryQuery) -> Selection:
    """What ``query`` finds; a file that cannot be read is listed as a problem.

    Of what is not shown in the end, only the columns that are asked about are read.
    """
    conditions = _build_conditions(query)
    sort_by = None if query.sort is None else _SORT_FIELDS[query.sort]
    places: list[tuple[float, Source, int]] = []
    problems: list[str] = []
    num_matching = 0
    for source in choose_sources(folder, query):
        try:
            found = find_matches(
                source.find_file(folder),
                conditions,
                sort_by,
                ascending=query.ascending,
                limit=query.limit,
            )
        except AgentrlError as error:
            problems.append(str(error))
            continue
        num_matching += found.num_matching
        places += [(k, source, n) for k, n in zip(found.keys, found.numbers, strict=True)]
    # What has no value comes last either way.
    sign = 1.0 if query.ascending else -1.0
    places.sort(key=lambda place: (math.isnan(place[0]), sign * place[0]))
    shown = [(source, number) for _, source, number in places[: query.limit]]
    return Selection(_summarize(folder, shown, problems), num_matching, problems)


def _summarize(
    folder: RunFolder, places: Sequence[tuple[Source, int]], problems: list[str]
) -> list[Found]:
    numbers: dict[Source, list[int]] = {}
    for source, number in places:
        numbers.setdefault(source, []).append(number)
    found: dict[tuple[Source, int], Found] = {}
    for source, wanted in numbers.items():
        try:
            summaries = read_summaries(source.find_file(folder), wanted)
        except AgentrlError as error:
            problems.append(str(error))
            continue
        for number, summary in zip(wanted, summaries, strict=True):
            found[source, number] = Found(source, number, summary)
    return [found[place] for place in places if place in found]


def find_one(folder: RunFolder, query: TrajectoryQuery, name: str) -> tuple[Source, Trajectory]:
    """The trajectory with the id ``name``, or at that number (from 1) of the query's list.

    Raises:
        UserInputError: there is none.
    """
    if not name.isdigit():
        place = _find_named(folder, query, name)
        if place is not None:
            return place[0], read_trajectory(place[0].find_file(folder), place[1])
    selection = select(folder, query)
    shown = selection.found
    found = next((f for f in shown if f.summary.id == name), None)
    if found is None and name.isdigit() and 1 <= int(name) <= len(shown):
        found = shown[int(name) - 1]
    if found is None:
        raise UserInputError(
            f"{folder.location}: no trajectory {name!r}. Allowed: an id, or a number from 1 to "
            f"{len(shown)} of the list. List them with: agentrl inspect-trajectories "
            f"{folder.location} --step all"
        )
    return found.source, read_trajectory(found.source.find_file(folder), found.number)


def _find_named(folder: RunFolder, query: TrajectoryQuery, name: str) -> tuple[Source, int] | None:
    """Where the trajectory of that id is, first of all in what the query names.

    An id begins with the step that its task was chosen for, and few are trained on much later.
    """
    chosen = set(choose_sources(folder, query))
    step = int(re.sub(r"\D.*", "", name) or 0)
    sources = sorted(list_sources(folder), key=lambda s: (s not in chosen, abs(s.step - step)))
    for source in sources:
        try:
            found = find_matches(source.find_file(folder), {"id": partial(eq, name)})
        except AgentrlError:
            # Nothing in a damaged file can be shown.
            continue
        if found.num_matching:
            return source, found.numbers[0]
    return None


def _build_conditions(query: TrajectoryQuery) -> dict[str, Callable[[Any], bool]]:
    """What a query asks of the fields of a summary."""
    conditions: dict[str, Callable[[Any], bool]] = {}
    if query.min_reward is not None or query.max_reward is not None:
        low = -math.inf if query.min_reward is None else query.min_reward
        high = math.inf if query.max_reward is None else query.max_reward
        conditions["reward"] = lambda reward: reward is not None and low <= reward <= high
    if query.failure is not None:
        conditions["failure_boundary"] = lambda b: _is_one([b] if b else [], query.failure)
    if query.mismatch is not None:
        conditions["prefix_mismatches"] = lambda m: _is_one([*m.by_cause], query.mismatch)
    if query.malformed is not None:
        conditions["num_malformed_calls"] = lambda n: query.malformed == ("any" if n else "none")
    if query.replaced is not None:
        conditions["replaced_by"] = lambda other: query.replaced == ("any" if other else "none")
    for name in ("task_id", "agent_name"):
        wanted = getattr(query, name)
        if wanted is not None:
            conditions[name] = partial(eq, wanted)
    return conditions


def _is_one(kinds: Collection[str], wanted: str | None) -> bool:
    """Whether a trajectory of these ``kinds`` passes the filter for a kind, ``any`` or ``none``."""
    return bool(kinds) == (wanted == "any") if wanted in ("any", "none") else wanted in kinds


_SORT_FIELDS = {
    "reward": "reward",
    "turns": "num_turns",
    "tokens": "num_completion_tokens",
    "seconds": "seconds",
}
