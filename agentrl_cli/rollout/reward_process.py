"""One call of a reward function: made in a process of its own, and its result read.

Every run starts several of these processes, so what this module imports is kept small.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.agents.agent_environment import reward_environment
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.config.user_code import format_user_traceback
from agentrl_cli.errors import ImportPathError, RewardError
from agentrl_cli.log import get_logger
from agentrl_cli.process_reaper import end_with_parent
from agentrl_cli.tracking.credit import parse_reward

_log = get_logger(__name__)

_ALLOWED = (
    "Allowed: a number, True or False, None (unscored), or a dict of named numbers with 'reward'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward function said of one trajectory."""

    reward: float | None
    """None: unscored."""
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Until it was there, waiting for a process included."""
    run_seconds: float = 0.0
    """Of the function alone."""
    returned: str = ""
    """What it returned: ``float``, ``bool``, ``None``, ``NaN``, ``numpy.float64``, ``dict``..."""


def begin_worker(import_path: str, parent: int) -> None:
    """Runs in a fresh worker, before its first call.

    Ctrl-C goes to every process of a terminal, and the run that drains on it needs this one; it
    ends with the run, even when that is killed. The import is early because a slow one must not
    count against the first call's deadline.
    """
    os.setsid()
    end_with_parent(parent)
    try:
        with reward_environment():
            import_object(import_path, "reward_fn_path")
    except ImportPathError as error:
        # The call that follows imports again and carries the error back.
        _log.debug("reward worker: %s", error)


def call_imported(import_path: str, arguments: dict[str, Any]) -> tuple[Score, Exception | None]:
    """Runs in a worker: what the function returned, or raised, in a form that can travel."""
    try:
        with reward_environment():
            fn = import_object(import_path, "reward_fn_path")
            # Parsed here, so that no array or tensor has to cross between processes.
            started = time.perf_counter()
            return build_score(fn(**arguments), started), None
    except RewardError as error:
        # Of the result: there is no line of the function's to show.
        return Score(reward=None), error
    except (Exception, SystemExit) as error:
        text = format_user_traceback(error)
        raised = contain_exit(error)
        try:
            pickle.loads(pickle.dumps(raised))
        except Exception:
            raised = RewardError(f"{type(error).__name__}: {error}")
        raised.add_note(f"In the reward process:\n{text}")
        return Score(reward=None), raised


def contain_exit(error: Exception | SystemExit) -> Exception:
    """What a reward function raised, as something that ends no more than its trajectory."""
    if isinstance(error, SystemExit):
        return RewardError(f"the reward function called exit({error.code!r})")
    return error


def build_score(result: Any, started: float) -> Score:
    """What a reward function said that was called at ``started`` and has just returned ``result``.

    Raises:
        RewardError: the result is no reward.
    """
    run_seconds = time.perf_counter() - started
    reward, parts = parse_reward_result(result)
    named = result["reward"] if isinstance(result, Mapping) else result
    kind = type(named)
    returned = kind.__qualname__
    if kind.__module__ != "builtins":
        returned = f"{kind.__module__}.{returned}"
    if reward is None:
        returned = "None" if named is None else "NaN"
    return Score(reward=reward, parts=parts, run_seconds=run_seconds, returned=returned)


def parse_reward_result(result: Any) -> tuple[float | None, dict[str, float]]:
    """A reward function's result as (reward, parts); the reward is None for None and NaN.

    Raises:
        RewardError: the result is no reward.
    """
    if not isinstance(result, Mapping):
        return _parse(result, "the reward"), {}
    if "reward" not in result:
        raise RewardError(
            f"the reward function returned a dict without 'reward' (it has: "
            f"{', '.join(map(str, result)) or 'nothing'}). {_ALLOWED}"
        )
    named = {str(name): _parse(value, f"the part {name!r}") for name, value in result.items()}
    reward = named.pop("reward")
    return reward, {name: value for name, value in named.items() if value is not None}


def _parse(value: Any, what: str) -> float | None:
    try:
        return parse_reward(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"{what} is not usable: {error}. {_ALLOWED}") from None
