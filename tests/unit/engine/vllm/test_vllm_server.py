"""What is said to vLLM, and what vLLM 0.32 answers (all else: tests/e2e/vllm)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl_cli.engine.protocol import BroadcastReceiver, Sampling
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.errors import EngineError, ServerDownError

Generate = Callable[..., Awaitable[Any]]

#: As a server sent it, shortened by fields that are always null.
PIECE = {
    "token_ids": [185, 430],
    "finish_reason": None,
    "stop_reason": None,
    "weight_versions": None,
    "logprobs": {
        "content": [
            {"token_id": 185, "logprob": -5.096236228942871, "rank": 20, "top_logprobs": []},
            {"token_id": 430, "logprob": -5.571554183959961, "rank": 49, "top_logprobs": []},
        ]
    },
}


def make_logprobs(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}


def answer(faulty: Any, *choices: dict[str, Any]) -> None:
    last = {"token_ids": [], "finish_reason": "length"}
    num_tokens = sum(len(choice["token_ids"] or []) for choice in choices)
    last["weight_versions"] = [{"version": "3", "start": 0, "end": num_tokens}]
    events = [{"choices": [choice]} for choice in (*choices, last)]
    faulty.answers[faulty.generate_path] = faulty.stream(*events)


async def test_its_pieces_are_read(server: VllmServer, generate: Generate, faulty: Any) -> None:
    assert isinstance(server, BroadcastReceiver)
    answer(faulty, PIECE)
    generation = await generate()
    assert generation.completion_ids == (185, 430)
    assert generation.rollout_logprobs == (-5.096236228942871, -5.571554183959961)
    assert (generation.versions, generation.finish_reason) == ((3, 3), "length")


async def test_the_likeliest_tokens_are_ranked_without_the_sampled_one(
    generate: Generate, faulty: Any
) -> None:
    tops = [(7, -3.0), (5, -0.25), (9, -1.5), (8, -9999.0)]
    logprobs = make_logprobs((7, -3.0))
    logprobs["content"][0]["top_logprobs"] = make_logprobs(*tops)["content"]
    answer(faulty, PIECE | {"token_ids": [7], "logprobs": logprobs})
    assert (await generate(num_top_logprobs=2)).top_logprobs == (((5, -0.25), (9, -1.5)),)
    # What cannot be sampled is not among them.
    all_tops = ((5, -0.25), (9, -1.5), (7, -3.0))
    assert (await generate(temperature=0.0, num_top_logprobs=4)).top_logprobs == (all_tops,)
    assert (await generate()).top_logprobs == ()


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": None},
        {"token_ids": [185]},
        {"token_ids": [185, 431]},
        {"token_ids": [430, 185]},
        {"token_ids": [185, -1], "logprobs": make_logprobs((185, -1.0), (-1, -1.0))},
        {"token_ids": ["185", 430]},
        {"token_ids": [185, True], "logprobs": make_logprobs((185, -1.0), (True, -1.0))},
        {"logprobs": None},
        {"logprobs": {"content": None}},
        {"logprobs": {"content": [1, 2]}},
        {"logprobs": {"content": [{"token_id": 185}, {"token_id": 430}]}},
        {"logprobs": make_logprobs((185, "-1"), (430, -1.0))},
        {"logprobs": make_logprobs((185, 0.5), (430, -1.0))},
        {"finish_reason": "error"},
    ],
)
async def test_what_is_malformed_is_refused(
    generate: Generate, faulty: Any, broken: dict[str, Any]
) -> None:
    answer(faulty, PIECE | broken)
    with pytest.raises(EngineError, match="a completion that cannot be used"):
        await generate()


@pytest.mark.parametrize("logprob", [None, -9999.0])
async def test_weights_that_make_no_numbers_are_named_as_such(
    generate: Generate, faulty: Any, logprob: float | None
) -> None:
    """vLLM writes -9999 for a logprob that is NaN."""
    answer(faulty, PIECE | {"logprobs": make_logprobs((185, logprob), (430, -1.0))})
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="not finite"):
            await generate(temperature=temperature)


async def ask(server: VllmServer, faulty: Any, sampling: Sampling) -> Any:
    """What is sent for a completion of 7 tokens."""
    async for _ in server.stream([1] * 57, sampling, stream_interval=4):
        pass
    return faulty.bodies()[-1]


async def test_a_request_asks_for_tokens_logprobs_and_pieces(
    server: VllmServer, faulty: Any
) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=3, stop_token_ids=(5,))
    body = await ask(server, faulty, sampling)
    assert len(body.pop("cache_salt")) == 16
    assert body == {
        "token_ids": [1] * 57,
        "sampling_params": {
            "max_tokens": 7,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "stop_token_ids": [5],
            "logprobs": 0,
            "stream_interval": 4,
            "detokenize": False,
        },
        "stream": True,
        "priority": 0,
    }


async def test_what_constrains_a_completion_is_said(server: VllmServer, faulty: Any) -> None:
    sampling = Sampling(structural_tag='{"a": 1}', stop=("</a>", ""), temperature=1e-6)
    body = await ask(server, faulty, sampling)
    params = body["sampling_params"]
    assert params["structured_outputs"] == {"structural_tag": '{"a": 1}'}
    # Even a server with a reasoning parser holds to it from the first token.
    assert body["reasoning_ended"] is True
    # What vLLM treats as greedy is said so.
    assert params["temperature"] == 0.0
    # Text is made only to find stop texts in it.
    assert (params["detokenize"], params["stop"]) == (True, ["</a>"])
    # An end tag may be one special token, which vLLM leaves out of the text otherwise.
    assert params["skip_special_tokens"] is False
    params = (await ask(server, faulty, Sampling(stop=("",))))["sampling_params"]
    assert params["detokenize"] is False
    assert "stop" not in params


async def test_calls_share_their_cache_while_the_weights_stay(
    server: VllmServer, faulty: Any
) -> None:
    async def find_salts() -> set[str]:
        faulty.asked.clear()
        for _ in range(2):
            await ask(server, faulty, Sampling())
        return {body["cache_salt"] for body in faulty.bodies()}

    salts = [await find_salts()]
    for _ in range(2):
        await server.pause()
        # Sent while the weights are replaced: may be half old and half new, each for itself.
        salts.append(await find_salts())
        await server.resume()
        salts.append(await find_salts())
    assert [len(one) for one in salts] == [1, 2, 1, 2, 1]
    assert len(set.union(*salts)) == sum(map(len, salts))
    # A pause that failed changed no weights.
    faulty.answers["/pause"] = faulty.hang
    with pytest.raises(EngineError):
        await server.pause()
    assert len(await find_salts()) == 1


async def test_a_server_whose_engine_died_is_down(
    server: VllmServer, generate: Generate, faulty: Any
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            raise web.HTTPServiceUnavailable
        raise web.HTTPInternalServerError(text='{"error": "EngineCore encountered an issue."}')

    faulty.answers = dict.fromkeys((faulty.generate_path, "/pause", "/health"), fail)
    for call in (generate(), server.pause(), server.check_health()):
        with pytest.raises(ServerDownError, match="vllm-0"):
            await call


async def test_weights_are_read_by_every_worker(server: VllmServer, faulty: Any) -> None:
    await server.load_weights(Path("/w"))
    prepare, load = faulty.bodies("/collective_rpc")
    assert prepare["kwargs"] == {"overrides": {"load_config": {"load_format": "auto"}}}
    assert load == {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}


async def test_an_adapter_waits_for_nobody_who_is_sampled_without_one(
    server: VllmServer, generate: Generate, faulty: Any
) -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    pieces = faulty.make_pieces([1, 2], [3], weight_versions=spans)
    faulty.answers[faulty.generate_path] = faulty.stream(*pieces)
    stream = server.stream([5], Sampling())
    await anext(stream)
    with pytest.raises(EngineError, match="1 calls without one are in flight on vllm-0"):
        await server.load_adapter(Path("/a"), 8)
    assert (await anext(stream)).versions == (7, 8, 8)
    await stream.aclose()
    await server.load_adapter(Path("/a"), 8)
    assert (await generate()).versions == (8, 8, 8)
