"""What the clients of both kinds of servers promise, against servers that make faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.engine import engine_server
from agentrl_cli.engine.engine_server import (
    SUPPORTED_VERSIONS,
    EngineServer,
    check_server_version,
    expand_spans,
)
from agentrl_cli.engine.protocol import UNKNOWN_VERSION, Sampling
from agentrl_cli.errors import (
    EngineError,
    EngineTimeoutError,
    ServerBusyError,
    ServerDownError,
    UserInputError,
)

Generate = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_the_load_is_read_from_the_servers_own_metrics(
    server: EngineServer, faulty: Any
) -> None:
    names = server._LOAD_METRICS
    lines = [
        f"# HELP {names['num_running']} Calls.",
        f'{names["num_running"]}{{engine="0"}} 3.0',
        f'{names["num_running"]}{{engine="1"}} 2.0',
        f"{names['num_running']}_by_reason 9.0",
        f"{names['num_waiting']} 7.0",
    ]

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="\n".join(lines))

    faulty.answers["/metrics"] = answer
    with pytest.raises(EngineError, match=f"has no metric {names['cache_use']}"):
        await server.read_load()
    lines.append(f"{names['cache_use']} 2.5e-1")
    load = await server.read_load()
    assert (load.num_running, load.num_waiting, load.cache_use) == (5, 7, 0.25)


async def test_a_completion_has_the_versions_of_all_its_tokens(
    server: EngineServer, generate: Generate
) -> None:
    first, last = [piece async for piece in server.stream([5], Sampling())]
    assert (first.completion_ids, first.versions, first.finish_reason) == ((1, 2), (), None)
    assert (last.completion_ids, last.versions) == ((3,), (7, 7, 7))
    whole = await generate()
    assert whole.completion_ids == (1, 2, 3)
    assert whole.rollout_logprobs == (-1.0, -2.0, -3.0)
    assert (whole.versions, whole.finish_reason) == ((7, 7, 7), "length")


async def test_no_more_is_asked_for_than_there_is_room(generate: Generate, faulty: Any) -> None:
    for max_tokens in (None, 100, 3):
        await generate([5] * 54, max_tokens=max_tokens)
    name = "max_tokens" if faulty.is_vllm else "max_new_tokens"
    assert [body["sampling_params"][name] for body in faulty.bodies()] == [10, 10, 3]


async def test_what_comes_in_one_piece_anyway_is_not_streamed(
    server: EngineServer, faulty: Any
) -> None:
    """A stream costs the server more, and its first token comes alone."""
    [faulty.answers[faulty.generate_path]] = faulty.make_pieces([1, 2])
    for max_tokens in (2, 3):
        sampling = Sampling(max_tokens=max_tokens)
        [piece] = [piece async for piece in server.stream([5], sampling, stream_interval=2)]
        assert (piece.completion_ids, piece.versions) == ((1, 2), (7, 7))
    assert [bool(body.get("stream")) for body in faulty.bodies()] == [False, True]


async def test_greedy_tokens_have_logprob_zero(generate: Generate) -> None:
    for temperature in (0.0, 1e-7):
        assert (await generate(temperature=temperature)).rollout_logprobs == (0.0,) * 3


async def test_a_stop_text_is_told_from_a_stop_token(generate: Generate, faulty: Any) -> None:
    for matched in ("</a>", 3):
        end = {"stop_reason": matched}
        if not faulty.is_vllm:
            end = {"finish_reason": {"type": "stop", "matched": matched}}
        pieces = faulty.make_pieces([3], reason="stop", **end)
        faulty.answers[faulty.generate_path] = faulty.stream(*pieces)
        generation = await generate()
        assert generation.finish_reason == "stop"
        assert generation.stop_text == (matched if matched == "</a>" else None)


@pytest.mark.parametrize("fault", ["break", "no end", "abort", "EngineCore encountered an issue"])
async def test_what_a_server_gives_up_another_may_finish(
    server: EngineServer, faulty: Any, fault: str
) -> None:
    pieces = faulty.make_pieces([1, 2], [3], reason="abort" if fault == "abort" else None)
    pieces += [{"error": {"message": fault}}] if fault.startswith("Engine") else []
    then = "break" if fault == "break" else "end"
    faulty.answers[faulty.generate_path] = faulty.stream(*pieces, then=then)
    stream = server.stream([5], Sampling())
    assert (await anext(stream)).completion_ids == (1, 2)
    with pytest.raises(ServerDownError, match=r"vllm-0|sglang-0"):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    ("code", "kind"), [(400, EngineError), (500, ServerBusyError), (None, EngineError)]
)
async def test_an_error_in_the_stream_is_the_servers_own(
    generate: Generate, faulty: Any, code: int | None, kind: type[EngineError]
) -> None:
    [piece] = faulty.make_pieces([1], reason=None)
    error = {"error": {"message": "no such adapter", "code": code}}
    faulty.answers[faulty.generate_path] = faulty.stream(piece, error)
    with pytest.raises(EngineError, match="no such adapter") as caught:
        await generate()
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "broken",
    [
        {"weight_versions": None},
        {"weight_versions": [1]},
        {"weight_versions": [{"version": "3"}]},
        {"weight_versions": [{"version": "3", "start": 0, "end": "2"}]},
        {"weight_versions": [{"version": "v3", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "3", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 1}]},
        {"finish_reason": 1},
    ],
)
async def test_a_reply_that_does_not_add_up_is_refused(
    generate: Generate, faulty: Any, broken: dict[str, Any]
) -> None:
    faulty.answers[faulty.generate_path] = faulty.stream(*faulty.make_pieces([5, 2], **broken))
    with pytest.raises(EngineError, match="a completion that cannot be used") as caught:
        await generate()
    assert not isinstance(caught.value, ServerDownError)


@pytest.mark.parametrize("reply", ["x" * 5000, [], None, {}, {"choices": []}, {"choices": [1]}])
async def test_garbage_is_refused_and_its_start_shown(
    generate: Generate, faulty: Any, reply: Any
) -> None:
    faulty.answers[faulty.generate_path] = faulty.stream(reply)
    with pytest.raises(EngineError, match="a completion that cannot be used") as caught:
        await generate()
    assert len(str(caught.value)) < 500


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_spans_become_the_version_of_every_token(runs: list[tuple[int, int]]) -> None:
    spans, expected = [], []
    for version, length in runs:
        end = len(expected) + length
        spans.append({"version": str(version), "start": len(expected), "end": end})
        expected += [version] * length
    assert expand_spans(spans, len(expected)) == tuple(expected)


@given(st.lists(st.tuples(st.integers(-3, 12), st.integers(-3, 12)), max_size=5), st.integers(0, 9))
def test_spans_that_leave_a_token_in_doubt_are_refused(
    bounds: list[tuple[int, int]], num_tokens: int
) -> None:
    spans = [{"version": str(i), "start": b[0], "end": b[1]} for i, b in enumerate(bounds)]
    owners = [[v for v, b in enumerate(bounds) if b[0] <= i < b[1]] for i in range(-3, 12)]
    is_covered = [len(o) == (1 if 0 <= i < num_tokens else 0) for i, o in enumerate(owners, -3)]
    try:
        versions = expand_spans(spans, num_tokens)
    except ValueError:
        return
    assert all(is_covered)
    assert versions == tuple(owners[i + 3][0] for i in range(num_tokens))


@pytest.mark.parametrize(("label", "version"), [("default", UNKNOWN_VERSION), ("0", 0), ("12", 12)])
async def test_versions_are_numbers(
    server: EngineServer, faulty: Any, label: str, version: int
) -> None:
    faulty.version = label
    assert await server.policy_version() == version
    faulty.asked.clear()
    assert await server.check_health() == version
    assert len(faulty.bodies(faulty.version_path)) == 1


@pytest.mark.parametrize("label", ["-1", "1.0", "step-3", "", "٣", None, 3, "9" * 40])
async def test_weights_that_somebody_else_named_are_refused(
    server: EngineServer, faulty: Any, label: Any
) -> None:
    faulty.version = label
    with pytest.raises(EngineError, match="names weights by numbers"):
        await server.policy_version()


@pytest.mark.parametrize(
    ("call", "paths", "leg"),
    [
        ("pause", ("/pause", "/pause_generation"), "pause"),
        ("resume", ("/resume", "/continue_generation"), "resume"),
        ("load_weights", ("/collective_rpc", "/update_weights_from_disk"), "load"),
        ("set_policy_version", ("/update_weight_version",) * 2, "setting the policy version"),
        ("policy_version", ("/weight_info", "/model_info"), "asking for the policy version"),
        ("load_adapter", ("/v1/load_lora_adapter", "/load_lora_adapter"), "loading an adapter"),
    ],
)
async def test_every_leg_of_a_publication_has_a_deadline(
    server: EngineServer, faulty: Any, call: str, paths: tuple[str, str], leg: str
) -> None:
    faulty.answers[paths[not faulty.is_vllm]] = faulty.hang
    arguments = {"load_weights": [Path("/w")], "set_policy_version": [1]}
    arguments["load_adapter"] = [Path("/w"), 1]
    with pytest.raises(EngineTimeoutError, match=r"within 0\.3 s") as caught:
        await getattr(server, call)(*arguments.get(call, []))
    message = str(caught.value)
    assert leg in message.partition(": ")[0]
    assert f"{server.name} (http://127.0.0.1:" in message
    assert message.endswith("\n  the last words with ***")


async def test_calls_in_flight_keep_their_adapter_and_its_version(
    server: EngineServer, generate: Generate, faulty: Any
) -> None:
    faulty.models.append("agentrl-adapter-of-a-trainer-that-died")
    faulty.models.append("theirs")
    await server.load_adapter(Path("/a/4"), 4)
    assert len(faulty.models) == 3
    stream = server.stream([5], Sampling())
    await anext(stream)
    await server.load_adapter(Path("/a/5"), 5)
    assert len(faulty.models) == 4
    assert (await anext(stream)).versions == (4, 4, 4)
    await stream.aclose()
    assert (await generate()).versions == (5, 5, 5)
    field = "model" if faulty.is_vllm else "lora_path"
    assert [str(body[field])[-3:] for body in faulty.bodies()] == ["-v4", "-v5"]
    # A trainer that resumes loads the same version again, with other weights maybe.
    await server.load_adapter(Path("/a/5"), 5)
    loaded = [
        body["lora_name"] for body in faulty.bodies(f"{faulty.adapters_path}/load_lora_adapter")
    ]
    assert len(set(loaded)) == 3
    assert faulty.models == ["m", "theirs", loaded[-1]]


async def test_an_adapter_that_cannot_be_dropped_costs_memory_and_nothing_else(
    server: EngineServer, faulty: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.models.append("agentrl-adapter-1-0")
    failure = {"success": False, "error_message": "in use"}
    faulty.answers[f"{faulty.adapters_path}/unload_lora_adapter"] = failure
    await server.load_adapter(Path("/a/4"), 4)
    assert "in use" in caplog.text


async def test_a_server_that_does_not_answer_is_not_healthy(
    server: EngineServer, faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "_HEALTH_SECONDS", 0.2)
    faulty.answers["/health" if faulty.is_vllm else "/health_generate"] = faulty.hang
    with pytest.raises(EngineTimeoutError, match="health check"):
        await server.check_health()
    if faulty.is_vllm:
        return
    # SGLang samples a token for it, which a pause holds back.
    checking = asyncio.create_task(server.check_health())
    await asyncio.sleep(0.05)
    await server.pause()
    await checking
    await server.check_health()
    await server.resume()
    with pytest.raises(EngineTimeoutError):
        await server.check_health()


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *(("vllm", version) for version in ("0.32.0", "0.32.1.post2", "v0.32.0rc1+cpu", " 0.32\n")),
        *(("sglang", version) for version in ("0.5.23", "0.5.30.post1")),
    ],
)
def test_supported_versions_pass(kind: str, version: str) -> None:
    check_server_version(kind, version)


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *(
            ("vllm", version)
            for version in ("0.31.9", "0.33.0", "1.32.0", "0.3.2", "0.320.1", "dev")
        ),
        *(("sglang", version) for version in ("0.5.22", "0.6.0", "1.5.23", "", "0.5")),
    ],
)
def test_other_versions_are_refused_with_what_to_type(kind: str, version: str) -> None:
    with pytest.raises(UserInputError) as caught:
        check_server_version(kind, version)
    supported = SUPPORTED_VERSIONS[kind]
    name = {"vllm": "vLLM", "sglang": "SGLang"}[kind]
    for text in (
        f"{name} {version or '(unknown)'} was found",
        f"supports {name} {supported}",
        f"pip install '{kind}{supported}'",
        "engine.python=PATH",
    ):
        assert text in str(caught.value)
