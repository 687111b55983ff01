"""What a reward function may return, as one number and its named parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_cli.errors import RewardError
from agentrl_cli.tracking.credit import parse_reward as parse_number

_ALLOWED = (
    "Allowed: a number, True or False, None (unscored), or a dict of named numbers with 'reward'"
)


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
        return parse_number(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"{what} is not usable: {error}. {_ALLOWED}") from None
