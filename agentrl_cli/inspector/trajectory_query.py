"""Which trajectories of a run to show, and finding them without reading their tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from agentrl_cli.errors import AgentrlError, UserInputError, format_nearest
from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import TrajectorySummary

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

    def summarize(self, folder: RunFolder) -> list[TrajectorySummary]:
        """Its trajectories, without tokens."""
        if self.is_eval:
            return folder.list_eval_trajectories(self.step, label=self.label)
        return folder.list_trajectories(self.step)

    def read(self, folder: RunFolder) -> list[Trajectory]:
        """Its trajectories with their tokens."""
        if self.is_eval:
            return folder.read_eval(self.step, label=self.label)[0]
        return folder.read_trajectories(self.step)


@dataclass(frozen=True, slots=True)
class Found:
    """A trajectory that a query found, and where it is stored."""

    source: Source
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
    stored = [s for s in list_sources(folder) if s.is_eval == (query.evals is not None)]
    kind = "evaluations" if query.evals is not None else "steps"
    if not stored:
        raise UserInputError(
            f"{folder.path}: no {kind} are stored yet. "
            + (
                "The first appears when step 1 is sampled"
                if query.evals is None
                else "Type agentrl eval"
            )
        )
    if query.evals not in (None, "all"):
        names = list(dict.fromkeys(s.label or TRAINING_EVALS for s in stored))
        stored = [s for s in stored if (s.label or TRAINING_EVALS) == query.evals]
        if not stored:
            raise UserInputError(
                f"{folder.path}: --evals {query.evals}: no evaluation has this name; "
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
            f"{folder.path}: --step {query.steps}: not stored; stored {kind}: "
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
    """What ``query`` finds; a file that cannot be read is listed as a problem."""
    found: list[Found] = []
    problems: list[str] = []
    for source in choose_sources(folder, query):
        try:
            summaries = source.summarize(folder)
        except AgentrlError as error:
            problems.append(str(error))
            continue
        found += [Found(source, s) for s in summaries if _matches(s, query)]
    if query.sort is not None:
        found = _sort(found, _SORT_KEYS[query.sort], query.ascending)
    return Selection(found[: query.limit], len(found), problems)


def find_one(folder: RunFolder, query: TrajectoryQuery, name: str) -> tuple[Source, Trajectory]:
    """The trajectory with the id ``name``, or at that number (from 1) of the query's list.

    Raises:
        UserInputError: there is none.
    """
    selection = select(folder, query)
    if name.isdigit() and 1 <= int(name) <= len(selection.found):
        return _read(folder, selection.found[int(name) - 1])
    found = next((f for f in selection.found if f.summary.id == name), None)
    if found is None and not name.isdigit():
        found = _find_anywhere(folder, name)
    if found is None:
        raise UserInputError(
            f"{folder.path}: no trajectory {name!r}. Allowed: an id, or a number from 1 to "
            f"{len(selection.found)} of the list. List them with: agentrl inspect-trajectories "
            f"{folder.path} --step all"
        )
    return _read(folder, found)


def _find_anywhere(folder: RunFolder, name: str) -> Found | None:
    for source in reversed(list_sources(folder)):
        try:
            summaries = source.summarize(folder)
        except AgentrlError:
            # Nothing in a damaged file can be shown.
            continue
        for summary in summaries:
            if summary.id == name:
                return Found(source, summary)
    return None


def _read(folder: RunFolder, found: Found) -> tuple[Source, Trajectory]:
    for trajectory in found.source.read(folder):
        if trajectory.id == found.summary.id:
            return found.source, trajectory
    raise UserInputError(
        f"{folder.path}: {found.source.name} was rewritten at this moment. Type it again"
    )


def _matches(summary: TrajectorySummary, query: TrajectoryQuery) -> bool:
    reward = summary.reward
    if query.min_reward is not None or query.max_reward is not None:
        low = -math.inf if query.min_reward is None else query.min_reward
        high = math.inf if query.max_reward is None else query.max_reward
        if reward is None or not low <= reward <= high:
            return False
    return (
        _is_one([summary.failure_boundary] if summary.failure_boundary else [], query.failure)
        and _is_one([*summary.prefix_mismatches.by_cause], query.mismatch)
        and query.malformed in (None, "any" if summary.num_malformed_calls else "none")
        and query.replaced in (None, "none" if summary.replaced_by is None else "any")
        and query.task_id in (None, summary.task_id)
        and query.agent_name in (None, summary.agent_name)
    )


def _is_one(kinds: Collection[str], wanted: str | None) -> bool:
    """Whether a trajectory of these ``kinds`` passes the filter for a kind, ``any`` or ``none``."""
    if wanted in ("any", "none"):
        return bool(kinds) == (wanted == "any")
    return wanted is None or wanted in kinds


_SORT_KEYS: dict[str, Callable[[TrajectorySummary], float | None]] = {
    "reward": lambda s: s.reward,
    "turns": lambda s: s.num_turns,
    "tokens": lambda s: s.num_completion_tokens,
    "seconds": lambda s: s.seconds,
}


def _sort(
    found: Sequence[Found], key: Callable[[TrajectorySummary], float | None], ascending: bool
) -> list[Found]:
    """Largest first unless ``ascending``; what has no value comes last either way."""

    def order(item: Found) -> tuple[bool, float]:
        value = key(item.summary)
        missing = value is None or math.isnan(value)
        number = 0.0 if value is None or missing else float(value)
        return missing, number if ascending else -number

    return sorted(found, key=order)
