"""The SGLang client against a server that misbehaves; no SGLang is behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.engine.sglang.sglang_server import SglangServer
from agentrl_cli.errors import EngineError, ServerDownError

Generate = Callable[..., Awaitable[Any]]


@pytest.fixture
def kind() -> str:
    return "sglang"


def answer(faulty: Any, *pieces: list[int], **last: Any) -> None:
    faulty.answers[faulty.generate_path] = faulty.stream(*faulty.make_pieces(*pieces, **last))


async def test_a_call_that_sglang_cannot_serve_is_not_tried_elsewhere(
    generate: Generate, faulty: Any
) -> None:
    abort = {"type": "abort", "message": "Sampling support exceeds", "status_code": 400}
    answer(faulty, [], finish_reason=abort)
    with pytest.raises(EngineError, match="Sampling support exceeds") as caught:
        await generate()
    assert not isinstance(caught.value, ServerDownError)


async def test_a_failed_update_is_an_error_though_the_status_says_200(
    server: SglangServer, faulty: Any
) -> None:
    faulty.answers["/update_weights_from_disk"] = {"success": False, "message": "bad file"}
    with pytest.raises(EngineError, match=r"loading weights: sglang-0 .* answered bad file"):
        await server.load_weights(Path("/nowhere"))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"completion_tokens": 3}, "2 tokens that follow 0 others"),
        ({"output_token_logprobs": [[-0.5, 5, None], [-0.5, 9, None]]}, "other tokens"),
        ({"output_token_logprobs": [[None, 5, None], [-0.5, 2, None]]}, "not finite"),
    ],
)
async def test_a_reply_that_does_not_add_up_is_refused(
    generate: Generate, faulty: Any, broken: dict[str, Any], problem: str
) -> None:
    answer(faulty, [5, 2], **broken)
    with pytest.raises(EngineError, match=problem):
        await generate()


async def test_with_top_p_the_logprobs_are_those_after_it(generate: Generate, faulty: Any) -> None:
    answer(faulty, [5, 2], output_token_sampling_logprobs=[-0.1, -0.2])
    assert (await generate(top_p=0.9)).rollout_logprobs == (-0.1, -0.2)
    answer(faulty, [5, 2], output_token_sampling_logprobs=[-0.1])
    with pytest.raises(EngineError, match="not one logprob for each of 2 tokens"):
        await generate(top_p=0.9)
