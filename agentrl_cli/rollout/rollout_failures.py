"""Failures as data: which boundary an exception crossed, and when failures stop a run."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentrl_cli.agents.agent_runner import BoundaryError
from agentrl_cli.errors import EngineError, RolloutFailedError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Boundary, Failure, StopReason, Trajectory
from agentrl_cli.tracking.client import IN_PROCESS_URL, BlockingCallError
from agentrl_cli.tracking.gateway_socket import OwnLoopError

_MAX_TRACEBACK_CHARS = 8_000
_SHOWN_LINES = 12

_ADVICE = {
    Boundary.AGENT: "Run the agent on one task of your own to see it fail, fix it, start again",
    Boundary.TOOL: "Let the tool return its errors as text, so that the model can react to them",
    Boundary.REWARD: "Call the reward function on one answer of your own, fix it, start again",
    Boundary.ENGINE: "See the engine's log in the run folder. For prompts that are too long, "
    "raise engine.max_model_len",
    Boundary.GATEWAY: "The gateway refused the agent's requests: its message says which field or "
    "message to change in the agent",
    Boundary.TIMEOUT: "Raise rollout.timeout_seconds, or lower rollout.max_concurrent so that each "
    "trajectory gets a larger share of the engine",
    Boundary.BUDGET: "Raise rollout.max_turns or rollout.max_tokens_per_trajectory, or let the "
    "agent stop earlier",
}


class AgentRunError(Exception):
    """What an agent raised in a process of its own.

    Attributes:
        failure: the same, as the process described it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def describe_failure(
    error: BaseException,
    *,
    boundary: Boundary | None = None,
    budget_exceeded: str | None = None,
    stop_reason: StopReason | None = None,
    engine_error: BaseException | None = None,
    own_urls: Collection[str] | None = None,
) -> Failure:
    """The failure that ``error`` was, attributed once.

    Args:
        error: what ended the rollout.
        boundary: the boundary, where the place of the exception tells (the reward).
        budget_exceeded: the budget that the session ran out of, if it did, in words.
        stop_reason: the same as a name.
        engine_error: the last engine error that a call of the session crossed.
        own_urls: the gateway's addresses: an error of a call to another one is the agent's.
            None: not known.
    """
    chain = list(_walk_causes(error))
    remote = next((e for e in chain if isinstance(e, AgentRunError)), None)
    if remote is not None:
        return _attribute(remote.failure, budget_exceeded, engine_error)
    call = find_failed_call(chain, own_urls)
    api_error = call is not None and call.is_own
    shown = error
    if boundary is None:
        carrier = next((e for e in chain if isinstance(e, BoundaryError)), None)
        engine = next((e for e in chain if isinstance(e, EngineError)), None)
        if carrier is not None:
            boundary, shown = carrier.boundary, carrier.original
        elif isinstance(error, DeadlineError):
            boundary = Boundary.TIMEOUT
        elif budget_exceeded is not None and api_error:
            is_time = stop_reason is StopReason.MAX_SECONDS
            boundary = Boundary.TIMEOUT if is_time else Boundary.BUDGET
        elif engine is not None or (engine_error is not None and api_error):
            boundary, shown = Boundary.ENGINE, engine or engine_error or error
        else:
            boundary = Boundary.GATEWAY if api_error else Boundary.AGENT
    message = str(shown)
    if call is not None and shown is error:
        message += call.explain()
    out_of_time = boundary is Boundary.TIMEOUT and stop_reason is StopReason.MAX_SECONDS
    if budget_exceeded is not None and (boundary is Boundary.BUDGET or out_of_time):
        message = f"{budget_exceeded} was reached: {message}"
    text = "".join(traceback.format_exception(error))
    return Failure(
        boundary=boundary,
        kind=type(shown).__name__,
        message=message,
        traceback=text[-_MAX_TRACEBACK_CHARS:],
    )


def _attribute(
    failure: Failure, budget_exceeded: str | None, engine_error: BaseException | None
) -> Failure:
    """A failure from another process, by what the session knows and that process does not."""
    if failure.boundary is not Boundary.GATEWAY:
        return failure
    if budget_exceeded is not None:
        message = f"{budget_exceeded} was reached: {failure.message}"
        return replace(failure, boundary=Boundary.BUDGET, message=message)
    if engine_error is not None:
        return replace(
            failure,
            boundary=Boundary.ENGINE,
            kind=type(engine_error).__name__,
            message=str(engine_error),
        )
    return failure


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and the members of exception groups."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.append(current.__cause__)
        if not current.__suppress_context__:
            waiting.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)


def check_batch_worked(trajectories: Sequence[Trajectory], what: str) -> None:
    """Stops a run in which nothing works; ``what`` names the batch.

    Raises:
        RolloutFailedError: every trajectory failed at the same boundary with the same
            exception class, and none of them has a reward; or none made a call of the model;
            or none has a reward though agents ended as they should.
    """
    _check_calls(trajectories, what)
    _check_scores(trajectories, what)
    failures = [t.failure for t in trajectories if t.failure is not None and t.reward is None]
    causes = {(f.boundary, f.kind) for f in failures}
    if not trajectories or len(failures) < len(trajectories) or len(causes) != 1:
        return
    first = failures[0]
    lines = first.traceback.rstrip().splitlines()[-_SHOWN_LINES:]
    raise RolloutFailedError(
        f"{what}: all {len(trajectories)} trajectories failed in the same way, at the boundary "
        f"'{first.boundary}' with {first.kind}: {first.message}\n"
        + "\n".join(f"  | {line}" for line in lines)
        + f"\n{_ADVICE[first.boundary]}. The failed trajectories are kept in the run folder: "
        "agentrl inspect-trajectories shows them.",
        trajectories,
    )


def _check_calls(trajectories: Sequence[Trajectory], what: str) -> None:
    """Refuses a batch whose agents spoke, if at all, to another model: there is no token in it."""
    ended = [t for t in trajectories if t.failure is None]
    if not ended or any(t.interactions for t in trajectories):
        return
    raise RolloutFailedError(
        f"{what}: none of {len(trajectories)} trajectories called the model through agentrl, so "
        "there is nothing to measure or to learn from. Does the agent make a client of its own? "
        "Take agentrl's: def build(client, model), or async def solve(data, client, model); or "
        "give yours the base_url and api_key that solve's signature can name. With "
        "rollout.agent_mode: subprocess, clients made without arguments lead to agentrl. The "
        "trajectories are kept in the run folder: agentrl inspect-trajectories shows them.",
        trajectories,
    )


def _check_scores(trajectories: Sequence[Trajectory], what: str) -> None:
    """Refuses a batch that nobody scored, though there was something to score."""
    ended = [t for t in trajectories if t.failure is None]
    if not ended or any(t.reward is not None for t in trajectories):
        return
    raise RolloutFailedError(
        f"{what}: none of {len(trajectories)} trajectories has a reward, and {len(ended)} of them "
        "ended without an error, so there is nothing to measure or to learn from. Let the function "
        "of reward_fn_path return a number (None leaves a trajectory unscored), or without one "
        "let the agent return it or call client.set_final_reward. The trajectories are kept in "
        "the run folder: agentrl inspect-trajectories shows them.",
        trajectories,
    )


ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

#: How long cancelled code may take to clean up before it is left behind.
GRACE_SECONDS = 5.0


class DeadlineError(Exception):
    """The deadline of a trajectory passed."""


async def run_with_deadline(
    coroutine: Coroutine[Any, Any, ResultT],
    seconds: float,
    what: str,
    *,
    grace: float = 0.0,
    describe_late: Callable[[], str] | None = None,
) -> ResultT:
    """The coroutine's result, or a DeadlineError when it takes longer.

    ``asyncio.timeout`` waits until the cancelled code has ended, which is never when an
    agent catches CancelledError and continues; here such code is cancelled again, then abandoned.
    ``grace`` are seconds after the deadline in which it may still end by itself;
    ``describe_late`` gives a clause to add to the error, once the code has ended.

    Raises:
        DeadlineError: the deadline passed.
    """
    task = asyncio.ensure_future(_contain_exit(coroutine, what))
    try:
        await asyncio.wait({task}, timeout=seconds + grace)
    except asyncio.CancelledError:
        await _end(task, what)
        raise
    if task.done():
        if task.cancelled():
            # Not our doing: something inside cancelled the task that it ran in.
            raise RuntimeError(f"{what} cancelled itself (asyncio.CancelledError)")
        return task.result()
    await _end(task, what)
    more = describe_late() if describe_late is not None else ""
    raise DeadlineError(f"{what} did not finish in {seconds:g} seconds{more}")


async def _contain_exit(coroutine: Coroutine[Any, Any, ResultT], what: str) -> ResultT:
    """The coroutine's result; asyncio would end the whole event loop for a ``sys.exit()``."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"{what} called exit({error.code!r})") from error
    except OwnLoopError as error:
        raise BlockingCallError(str(error)) from error


async def _end(task: asyncio.Task[Any], what: str) -> None:
    """Cancels a task until it has ended, for a while."""
    for _ in range(5):
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS / 5)
        if task.done():
            if not task.cancelled() and task.exception() is not None:
                _log.debug("%s raised while it was cancelled", what, exc_info=task.exception())
            return
    _log.warning("%s ignored five cancellations and was left running", what)


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call of a model's API that ended with an error."""

    url: str
    """Where it went; empty: the error does not say."""
    is_own: bool
    """False: it went to another API than agentrl's, that of a judge, say."""
    is_unreachable: bool
    """True: nothing could be connected to."""

    def explain(self) -> str:
        """What the error's message leaves out, as a clause to append."""
        if not self.is_own:
            return (
                f" (the call went to {self.url}, not to agentrl. For the model that is trained, "
                "take the client that agentrl gives, or its base_url and api_key)"
            )
        if self.is_unreachable and self.url.startswith(str(IN_PROCESS_URL)):
            return (
                f" ({self.url} is answered through `client` and `http_client` alone: for a client "
                "of its own, a function names base_url in its signature)"
            )
        return ""


def find_failed_call(
    chain: Iterable[BaseException], own_urls: Collection[str] | None
) -> FailedCall | None:
    """The call whose error is in a chain of causes; None: there is none.

    Args:
        chain: an error and what it came from.
        own_urls: the addresses of the gateway; None: not known, so every call counts as its.
    """
    errors = list(chain)
    error = next((e for e in errors if _is_api_error(e)), None)
    if error is None:
        return None
    url = str(getattr(getattr(error, "request", None), "url", ""))
    return FailedCall(
        url,
        is_own=not url or own_urls is None or url.startswith(tuple(own_urls)),
        is_unreachable=any(type(e).__name__ == "ConnectError" for e in errors),
    )


def _is_api_error(error: BaseException) -> bool:
    """Whether an SDK raised it for a call's sake; known by name, not to load what nobody uses."""
    return any(
        t.__name__ == "APIError" and t.__module__.partition(".")[0] in ("openai", "anthropic")
        for t in type(error).__mro__
    )
