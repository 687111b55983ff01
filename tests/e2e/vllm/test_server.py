"""The client of one server against a real vLLM."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import save_file

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.probes import PROBE_SAMPLING
from agentrl_cli.engine.protocol import Generation, Sampling, ServerEndpoint, join_pieces
from agentrl_cli.errors import EngineError, EngineTimeoutError
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.tracking.gateway import Gateway

#: float32 on both sides.
TOLERANCE = 1e-4
ComputeTruth = Callable[..., torch.Tensor]
PROMPT = (10, 20, 30, 40, 50)


def find_gap(logprobs: Sequence[float], expected: torch.Tensor) -> float:
    assert len(logprobs) == len(expected)
    return (torch.tensor(logprobs, dtype=torch.float64) - expected).abs().max().item()


async def publish(server: Any, folder: Path, version: int) -> None:
    await server.pause()
    await server.load_weights(folder)
    await server.set_policy_version(version)
    await server.resume()


async def ask_without_client(
    endpoint: ServerEndpoint, method: str, path: str, key: str | None = None, body: Any = None
) -> tuple[int, str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, endpoint.base_url + path, json=body) as response,
    ):
        return response.status, await response.text()


async def read_metric(endpoint: ServerEndpoint, name: str) -> float:
    _, text = await ask_without_client(endpoint, "GET", "/metrics", endpoint.api_key)
    return sum(map(float, re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def folders(save_tiny_model: Callable[..., Path]) -> list[Path]:
    """The weights of versions 1, 2 and 3."""
    return [save_tiny_model(seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def models(build_tiny_model: Callable[..., Any]) -> list[Any]:
    """The same in memory."""
    return [build_tiny_model(seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def endpoint(
    folders: list[Path],
    make_vllm_config: Callable[..., ExperimentConfig],
    build_server_group: Callable[..., ServerGroup],
) -> Iterator[ServerEndpoint]:
    """A server that takes whole weights and adapters."""
    model = {"path": str(folders[0]), "dtype": "float32", "lora": {"rank": 4}}
    config = make_vllm_config(folders[0], model=model)
    with build_server_group(config) as server_group:
        server_group.wait()
        yield server_group.endpoints[0]


@pytest.fixture
async def server(
    endpoint: ServerEndpoint, folders: list[Path], open_server: Callable[..., Any]
) -> AsyncIterator[Any]:
    """A new client of the server, which holds the first weights as version 1."""
    client = open_server(endpoint)
    await publish(client, folders[0], 1)
    yield client
    await client.resume()


async def test_logprobs_are_those_of_the_distribution_sampled_from(
    server: Any, models: list[Any], compute_truth: ComputeTruth
) -> None:
    """All at once, so that every batch mixes them."""
    samplings = [
        Sampling(max_tokens=24, temperature=temperature, top_p=top_p, seed=seed)
        for temperature in (0.0, 0.6, 1.0, 1.7)
        for top_p in (1.0, 0.9, 0.3)
        for seed in (None, 1)
    ]
    prompts = [(*PROMPT, index) for index in range(len(samplings))]
    done = await asyncio.gather(*map(server.generate, prompts, samplings))
    for prompt, sampling, generation in zip(prompts, samplings, done, strict=True):
        expected = compute_truth(models[0], prompt, generation, sampling)
        assert find_gap(generation.rollout_logprobs, expected) < TOLERANCE, sampling
        assert set(generation.versions) == {1}
        assert generation.finish_reason in ("length", "stop")
        if generation.finish_reason == "length":
            assert len(generation.completion_ids) == 24


async def test_a_group_prefills_its_prompt_once(
    endpoint: ServerEndpoint, server: Any, models: list[Any], compute_truth: ComputeTruth
) -> None:
    prompt = tuple(range(20, 120))
    before = await read_metric(endpoint, "prefix_cache_hits_total")
    samplings = [Sampling(max_tokens=8, seed=seed) for seed in range(8)]
    done = await asyncio.gather(*(server.generate(prompt, sampling) for sampling in samplings))
    # Three blocks of 32 tokens.
    assert await read_metric(endpoint, "prefix_cache_hits_total") == before + 7 * 96
    for sampling, generation in zip(samplings, done, strict=True):
        expected = compute_truth(models[0], prompt, generation, sampling)
        assert find_gap(generation.rollout_logprobs, expected) < TOLERANCE


async def test_a_stream_is_the_completion_in_pieces(server: Any) -> None:
    sampling = Sampling(max_tokens=100, seed=4)
    whole = await server.generate(PROMPT, sampling)
    stream = server.stream(PROMPT, sampling, stream_interval=16)
    pieces = [piece async for piece in stream]
    assert len(pieces) > 2
    assert sum((piece.completion_ids for piece in pieces), ()) == whole.completion_ids
    assert sum((piece.rollout_logprobs for piece in pieces), ()) == pytest.approx(
        whole.rollout_logprobs, abs=1e-5
    )
    assert [piece.versions for piece in pieces[:-1]] == [()] * (len(pieces) - 1)
    assert pieces[-1].versions == whole.versions == (1,) * len(whole.completion_ids)
    assert [piece.finish_reason is None for piece in pieces[:-1]] == [True] * (len(pieces) - 1)


async def test_prompts_are_those_of_vllms_own_chat(
    endpoint: ServerEndpoint, folders: list[Path], scripted_engine: Any, chat_tokenizer: Any
) -> None:
    """Text in parts; and token ids are where vLLM has them, whole and streamed."""
    gateway = Gateway(scripted_engine(["4", "4"]), chat_tokenizer)
    headers = {"Authorization": f"Bearer {gateway.open_session().key}"}
    parts = [{"type": "text", "text": text} for text in ("What", "is", "2 + 2?")]
    user = {"role": "user", "content": parts}
    chat = {"messages": [{**user, "role": "system"}, user], "return_token_ids": True}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/messages/count_tokens", {"messages": [user], "system": parts}),
    ):
        asked = {**body, "model": str(folders[0])}
        _, theirs = await ask_without_client(endpoint, "POST", path, endpoint.api_key, asked)
        url = f"http://agentrl.invalid{path}"
        ours = await gateway.http_client.post(url, json=asked, headers=headers)
        assert read_prompt(ours.text) == read_prompt(theirs)
    await gateway.close()


def read_prompt(text: str) -> Any:
    """The prompt's ids and the event that has them, or their number."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if "input_tokens" in events[0]:
        return events[0]["input_tokens"]
    assert any(choice.get("token_ids") for event in events for choice in event["choices"])
    prompts = [event.get("prompt_token_ids") for event in events]
    [prompt_ids] = filter(None, prompts)
    return prompts.index(prompt_ids), prompt_ids


async def test_a_completion_spans_three_versions_and_says_so(
    server: Any, folders: list[Path], models: list[Any], compute_truth: ComputeTruth
) -> None:
    """Each token is sampled after a forward pass of its own version over all before it: what
    older weights had computed for the completion is dropped at the pause."""
    generation = await sample_over_updates(server, folders)
    assert list(generation.versions) == sorted(generation.versions)
    assert len(generation.versions) == len(generation.completion_ids)
    for version, model in enumerate(models, 1):
        expected = compute_truth(model, PROMPT, generation, Sampling())
        own = [i for i, v in enumerate(generation.versions) if v == version]
        others = [i for i, v in enumerate(generation.versions) if v != version]
        logprobs = generation.rollout_logprobs
        assert find_gap([logprobs[i] for i in own], expected[own]) < TOLERANCE
        assert find_gap([logprobs[i] for i in others], expected[others]) > 0.1


async def sample_over_updates(server: Any, folders: list[Path]) -> Generation:
    """A completion during which versions 2 and 3 are published."""
    for seed in range(8):
        await publish(server, folders[0], 1)
        pieces, version = [], 1
        stream = server.stream(PROMPT, Sampling(max_tokens=400, seed=seed))
        async with aclosing(stream):
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) in (10, 60):
                    version += 1
                    await publish(server, folders[version - 1], version)
        if {1, 2, 3} == set(pieces[-1].versions):
            return join_pieces(pieces)
    raise AssertionError("every completion ended before its second update")


async def test_calls_of_new_weights_use_no_cache_of_old_ones(
    server: Any, folders: list[Path], models: list[Any], compute_truth: ComputeTruth
) -> None:
    """Also if they are sent while the weights are replaced."""
    long = tuple(range(5, 205))
    sampling = Sampling(max_tokens=4)
    await server.generate(long, sampling)
    await server.pause()
    held = [asyncio.create_task(server.generate(long, sampling)) for _ in range(3)]
    await asyncio.sleep(0.2)
    await server.load_weights(folders[1])
    await server.set_policy_version(2)
    await server.resume()
    for generation in [*await asyncio.gather(*held), await server.generate(long, sampling)]:
        assert set(generation.versions) == {2}
        expected = compute_truth(models[1], long, generation, sampling)
        assert find_gap(generation.rollout_logprobs, expected) < TOLERANCE
    assert await server.policy_version() == 2


async def test_a_stop_text_ends_the_completion_and_keeps_its_tokens(
    server: Any, chat_tokenizer: Any
) -> None:
    sampling = Sampling(max_tokens=60, seed=5)
    ids = (await server.generate(PROMPT, sampling)).completion_ids
    # Two tokens whose text nothing before them contains.
    place, text = next(
        (i, text)
        for i in range(8, len(ids) - 2)
        if (text := chat_tokenizer.decode(ids[i : i + 2])).isascii()
        and text not in chat_tokenizer.decode(ids[: i + 1])
    )
    stopped = await server.generate(PROMPT, replace(sampling, stop=("never said", text)))
    assert stopped.completion_ids == ids[: place + 2]
    assert (stopped.finish_reason, stopped.stop_text) == ("stop", text)


async def test_a_stop_token_ends_the_completion_and_is_kept(server: Any) -> None:
    sampling = Sampling(max_tokens=60, seed=5)
    ids = (await server.generate(PROMPT, sampling)).completion_ids
    place = next(i for i in range(5, len(ids)) if ids[i] not in ids[:i])
    stopped = await server.generate(PROMPT, replace(sampling, stop_token_ids=(ids[place],)))
    assert stopped.completion_ids == ids[: place + 1]
    assert (stopped.finish_reason, stopped.stop_text) == ("stop", None)


async def test_the_models_own_end_token_ends_the_completion(
    server: Any, chat_tokenizer: Any
) -> None:
    """Random weights end at random: one of many does."""
    done = await asyncio.gather(
        *(server.generate(PROMPT, Sampling(max_tokens=200, seed=seed)) for seed in range(40))
    )
    ended = [generation for generation in done if generation.finish_reason == "stop"]
    assert ended
    for generation in ended:
        assert generation.completion_ids[-1] == chat_tokenizer.eos_token_id
        assert generation.stop_text is None


async def test_a_seed_makes_the_same_tokens_whatever_else_runs(server: Any) -> None:
    alone = await server.generate(PROMPT, Sampling(max_tokens=30, seed=7))
    crowd = await asyncio.gather(
        *(server.generate(PROMPT, Sampling(max_tokens=30, seed=seed)) for seed in range(12))
    )
    assert crowd[7].completion_ids == alone.completion_ids
    assert len({generation.completion_ids for generation in crowd}) == 12
    unseeded = [await server.generate(PROMPT, Sampling(max_tokens=30)) for _ in range(2)]
    assert unseeded[0].completion_ids != unseeded[1].completion_ids


async def test_probes_go_before_the_calls_that_wait(server: Any, endpoint: ServerEndpoint) -> None:
    # For 128 seats.
    sampling = Sampling(max_tokens=200, temperature=0.0)
    calls = [asyncio.create_task(server.generate(PROMPT, sampling)) for _ in range(256)]
    async with asyncio.timeout(60):
        while (load := await server.read_load()).num_waiting < 100:
            await asyncio.sleep(0.05)
    assert 0 < load.num_running <= load.num_seats == 128
    assert 0.0 < load.cache_use <= 1.0
    await server.generate(PROMPT, PROBE_SAMPLING)
    assert sum(call.done() for call in calls) <= 128
    await asyncio.gather(*calls)


async def test_without_a_limit_the_room_is_filled(server: Any) -> None:
    prompt = tuple(range(5, 255)) * 2
    generation = await server.generate(prompt, Sampling(seed=3))
    assert len(generation.completion_ids) == 12 or generation.finish_reason == "stop"


async def test_a_token_that_the_model_does_not_have_is_refused(server: Any) -> None:
    """As after a prompt was tokenized by another model's tokenizer."""
    with pytest.raises(EngineError, match="99999 is out of vocabulary"):
        await server.generate([5, 99999], Sampling(max_tokens=5))
    await server.generate([5], Sampling(max_tokens=5))


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_leaving_a_completion_aborts_it_in_the_server(
    server: Any, endpoint: ServerEndpoint, leave: str
) -> None:
    """Frozen meanwhile, so that it cannot end by itself."""
    for seed in range(20):
        sampling = Sampling(max_tokens=400, seed=seed)
        if len((await server.generate(PROMPT, sampling)).completion_ids) > 300:
            break
    else:
        raise AssertionError("every completion was short")
    num_tokens = await read_metric(endpoint, "generation_tokens_total")
    began = asyncio.Event()

    async def read(stream: AsyncGenerator[Generation]) -> None:
        async with aclosing(stream):
            async for _ in stream:
                began.set()
                if leave == "close":
                    await frozen.wait()
                    return

    frozen = asyncio.Event()
    reading = asyncio.create_task(read(server.stream(PROMPT, sampling)))
    await began.wait()
    await server.pause()
    frozen.set()
    if leave == "cancel":
        reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled() == (leave == "cancel")
    await asyncio.sleep(0.2)
    await server.resume()

    # A step, after which the server counts anew.
    await server.generate(PROMPT, Sampling(max_tokens=1))
    async with asyncio.timeout(5):
        while await read_metric(endpoint, "num_requests_running"):
            await asyncio.sleep(0.05)
    # Those until it was frozen; the whole has more.
    assert await read_metric(endpoint, "generation_tokens_total") - num_tokens < 300


async def test_a_file_that_is_cut_off_says_so_and_a_whole_one_mends_it(
    server: Any,
    folders: list[Path],
    models: list[Any],
    tmp_path: Path,
    compute_truth: ComputeTruth,
) -> None:
    whole = (folders[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    await server.pause()
    with pytest.raises(EngineError, match=r"loading weights: vllm-0 .*deserializing"):
        await server.load_weights(tmp_path)
    await server.load_weights(folders[1])
    await server.set_policy_version(2)
    await server.resume()
    generation = await server.generate(PROMPT, Sampling(max_tokens=10))
    expected = compute_truth(models[1], PROMPT, generation, Sampling())
    assert find_gap(generation.rollout_logprobs, expected) < TOLERANCE


async def test_a_wrong_key_says_so(
    endpoint: ServerEndpoint, open_server: Callable[..., Any]
) -> None:
    stranger = open_server(endpoint, api_key="wrong")
    for call in (stranger.check_health, stranger.policy_version, stranger.pause):
        with pytest.raises(EngineError, match="refused the key"):
            await call()
    with pytest.raises(EngineError, match="refused the key"):
        await stranger.generate(PROMPT, Sampling())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause?mode=keep"),
        ("POST", "/resume"),
        ("POST", "/collective_rpc"),
        ("POST", "/update_weight_version"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/weight_info"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
    ],
)
async def test_nobody_gets_in_without_the_key(
    endpoint: ServerEndpoint, method: str, path: str
) -> None:
    for key in (None, "wrong"):
        status, _ = await ask_without_client(endpoint, method, path, key, {})
        assert status == 401
    status, _ = await ask_without_client(endpoint, "GET", "/health")
    assert status == 200


def write_adapter(folder: Path, model: Any, seed: int) -> Any:
    """A peft adapter of rank 4; returns the model with it."""
    generator = torch.Generator().manual_seed(seed)
    tensors, adapted = {}, copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if not re.search(r"[qv]_proj\.weight$", name):
            continue
        out, into = weight.shape
        a = torch.randn(4, into, generator=generator) * 0.2
        b = torch.randn(out, 4, generator=generator) * 0.2
        layer = name.removesuffix(".weight")
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b
        adapted.get_parameter(name).data += b @ a * 2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    config |= {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return adapted


async def test_a_call_keeps_the_adapter_that_it_began_with(
    server: Any,
    models: list[Any],
    endpoint: ServerEndpoint,
    compute_truth: ComputeTruth,
    tmp_path: Path,
) -> None:
    first, second = (write_adapter(tmp_path / str(i), models[0], i) for i in (1, 2))

    async def list_adapters() -> list[str]:
        _, text = await ask_without_client(endpoint, "GET", "/v1/models", endpoint.api_key)
        ids = [model["id"] for model in json.loads(text)["data"]]
        return [name for name in ids if name.startswith("agentrl-adapter-")]

    async def finish(stream: Any, pieces: list[Generation]) -> Generation:
        return join_pieces(pieces + [piece async for piece in stream])

    base = server.stream(PROMPT, Sampling(max_tokens=150, seed=1))
    base_pieces = [await anext(base)]
    with pytest.raises(EngineError, match="1 calls without one are in flight"):
        await server.load_adapter(tmp_path / "1", 2)
    plain = await finish(base, base_pieces)
    await server.load_adapter(tmp_path / "1", 2)
    await server.set_policy_version(2)
    long = server.stream(PROMPT, Sampling(max_tokens=150, seed=1))
    pieces = [await anext(long)]
    await server.load_adapter(tmp_path / "2", 3)
    await server.set_policy_version(3)
    assert len(await list_adapters()) == 2
    new = await server.generate(PROMPT, Sampling(max_tokens=20, seed=1))
    old = await finish(long, pieces)

    for generation, version, model in ((plain, 1, models[0]), (old, 2, first), (new, 3, second)):
        assert set(generation.versions) == {version}
        assert len(generation.versions) == len(generation.completion_ids)
        expected = compute_truth(model, PROMPT, generation, Sampling())
        assert find_gap(generation.rollout_logprobs, expected) < TOLERANCE
    assert await server.policy_version() == 3

    await server.load_adapter(tmp_path / "1", 4)
    loaded = await list_adapters()
    assert [name.endswith("-v4") for name in loaded] == [True]


async def test_a_server_whose_engine_process_hangs_is_not_well(
    server: Any, endpoint: ServerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other process, the one that listens, goes on answering /health."""
    core = find_engine_process(endpoint)
    monkeypatch.setattr("agentrl_cli.engine.engine_server._HEALTH_SECONDS", 1.0)
    core.suspend()
    try:
        status, _ = await ask_without_client(endpoint, "GET", "/health", endpoint.api_key)
        assert status == 200
        with pytest.raises(EngineTimeoutError, match="health check: vllm-0"):
            await server.check_health()
    finally:
        core.resume()
    monkeypatch.undo()
    await server.check_health()


def find_engine_process(endpoint: ServerEndpoint) -> psutil.Process:
    """The process of a server that computes."""
    port = str(urlsplit(endpoint.base_url).port)
    below = psutil.Process().children(recursive=True)
    [listener] = [
        process
        for process in below
        if port in process.cmdline()
        and not any("process_reaper.py" in part for part in process.cmdline())
    ]
    [core] = [p for p in listener.children() if "EngineCore" in " ".join(p.cmdline())]
    return core
