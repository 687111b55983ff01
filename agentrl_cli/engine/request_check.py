"""What every engine refuses before it samples."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import ContextLengthError, EngineError

#: vLLM's own limit, and OpenAI's.
MAX_TOP_LOGPROBS = 20


def check_request(prompt_ids: Sequence[int], sampling: Sampling, max_model_len: int) -> None:
    """Refuses what no engine could serve, in words that say what is allowed.

    Raises:
        ContextLengthError: no room is left for an answer.
        EngineError: the prompt is empty, or a sampling parameter is outside of its range.
    """
    if len(prompt_ids) + 1 > max_model_len:
        raise ContextLengthError(len(prompt_ids), max_model_len)
    if not prompt_ids:
        raise EngineError("the prompt is empty: at least one token id is needed")
    problem = _find_sampling_problem(sampling)
    if problem:
        raise EngineError(problem)


def check_score(token_ids: Sequence[int], start: int, max_model_len: int) -> None:
    """Refuses to score what no server could.

    Raises:
        ContextLengthError: the tokens do not fit.
        EngineError: ``start`` is no position of them that has a logprob.
    """
    if not 1 <= start <= len(token_ids):
        raise EngineError(
            f"score from position {start} of {len(token_ids)} tokens: allowed are 1 (the "
            f"first token has no logprob) to {len(token_ids)}"
        )
    check_request(token_ids, Sampling(), max_model_len)


def _find_sampling_problem(sampling: Sampling) -> str | None:
    if not 0.0 <= sampling.temperature < float("inf"):
        return f"temperature {sampling.temperature} is not allowed: 0 (greedy) or more"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p {sampling.top_p} is not allowed: above 0, at most 1"
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        return f"max_tokens {sampling.max_tokens} is not allowed: 1 or more"
    if sampling.num_top_logprobs not in range(MAX_TOP_LOGPROBS + 1):
        return (
            f"num_top_logprobs {sampling.num_top_logprobs} is not allowed: 0 to {MAX_TOP_LOGPROBS}"
        )
    if sampling.structural_tag is not None and sampling.stop_token_ids:
        # Records do not hold them, so the trainer could not make the same masks.
        return "stop_token_ids are not allowed beside a structural_tag: use stop texts"
    return None
