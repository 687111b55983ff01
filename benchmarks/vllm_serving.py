"""What gateway and router cost before a vLLM server, and what servers themselves cost.

    python -m benchmarks.vllm_serving
    python -m benchmarks.vllm_serving --parts null        # no vLLM needed

Three figures, each from one run of this module:

- requests/s, added latency and CPU of three-turn sessions through gateway and router, beside a
  plain aiohttp client that sends the same token ids to the server itself, and beside the same
  through a bare proxy, which hands bytes on; on a server that answers at once (``null``) and on
  real vLLM (``vllm``). Rounds of the ways alternate; the figures are medians over the rounds.
  Client, server, and gateway with router are processes of their own: the CPU time is that of
  gateway and router (or of the proxy) alone.
- ``publish``: a publication of new weights to real vLLM through the file, beside one copy of
  the same bytes in memory.
- the time from nothing to the first token of a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import torch
from aiohttp import web
from transformers.utils import logging

from agentrl_cli.engine.protocol import Sampling, ServerEndpoint
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.vllm.vllm_server import GENERATE_PATH
from agentrl_cli.rollout.background_loop import frozen_heap
from agentrl_cli.tracking.gateway import Gateway
from benchmarks.served_model import (
    QUESTION,
    build_config,
    build_server_group,
    build_tokenizer,
    build_transfer,
    open_router,
    save_model,
)

_NUM_TURNS = 3
#: Sessions of a round for each that is open at the same time: when one ends, another begins.
_NUM_SUCCESSORS = 3


@dataclass(frozen=True, slots=True)
class Round:
    """One way, one round."""

    requests_per_second: float
    p50_ms: float
    """Median duration of a request, seen by the client."""
    cpu_ms: float
    """CPU milliseconds of this process, which holds gateway and router, for a request."""


@asynccontextmanager
async def open_process(*argv: str) -> AsyncIterator[Process]:
    """A Python module that runs for as long as the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *argv), stdin=PIPE, stdout=PIPE, limit=2**24
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def open_proxy(url: str) -> AsyncIterator[str]:
    """The address of a proxy, in this process, that hands on what it gets and does nothing else."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def hand_on(request: web.Request) -> web.Response:
            headers = {"Content-Type": "application/json"}
            async with http.post(url, data=await request.read(), headers=headers) as reply:
                return web.Response(body=await reply.read(), content_type="application/json")

        app = web.Application()
        app.router.add_post("/", hand_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}/"
        finally:
            await runner.cleanup()


class Comparison:
    """The same sessions on the bare server, through a bare proxy, through gateway and router."""

    def __init__(
        self,
        router: EngineRouter,
        endpoint: ServerEndpoint,
        load: Process,
        new_tokens: tuple[int, int],
    ) -> None:
        self._new_tokens = new_tokens
        self._gateway = Gateway(router, build_tokenizer())
        self._endpoint = endpoint
        self._load = load

    async def run(self, num_concurrent: int, num_rounds: int) -> dict[str, Round]:
        """Medians over the rounds, by way."""
        rounds: dict[str, list[Round]] = {
            "bare server": [],
            "bare proxy": [],
            "gateway + router": [],
        }
        for number in range(num_rounds + 1):
            lengths = self._draw_lengths(num_concurrent * _NUM_SUCCESSORS, seed=number)
            job = {"lengths": lengths, "num_concurrent": num_concurrent}
            bare_job = job | self._build_bare_job(len(lengths))
            bare = await self._measure(bare_job)
            async with open_proxy(bare_job["url"]) as url:
                proxied = await self._measure(bare_job | {"url": url})
            sessions = [self._gateway.open_session() for _ in lengths]
            routed = await self._measure(
                job
                | {
                    "url": f"{await self._gateway.serve()}/chat/completions",
                    "keys": [session.key for session in sessions],
                    "question": QUESTION,
                }
            )
            for session in sessions:
                self._gateway.close_session(session)
            if number:  # the first round warms up
                rounds["bare server"].append(bare)
                rounds["bare proxy"].append(proxied)
                rounds["gateway + router"].append(routed)
        return {way: _compute_median(measured) for way, measured in rounds.items()}

    def _build_bare_job(self, num_sessions: int) -> dict[str, Any]:
        template = self._gateway.template
        empty = {"role": "assistant", "content": ""}
        first, second = (
            template.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            for messages in ([QUESTION], [QUESTION, empty, QUESTION])
        )
        return {
            "url": f"{self._endpoint.base_url}{GENERATE_PATH}",
            "keys": [self._endpoint.api_key] * num_sessions,
            "prompt_ids": list(template.encode(first)),
            "next_ids": list(template.encode(second.removeprefix(first))),
            "sampling_params": {"temperature": 1.0, "logprobs": 0, "detokenize": False},
        }

    async def _measure(self, job: Mapping[str, Any]) -> Round:
        assert self._load.stdin is not None
        assert self._load.stdout is not None
        cpu = time.process_time()
        self._load.stdin.write(json.dumps(job).encode() + b"\n")
        line = await self._load.stdout.readline()
        cpu = time.process_time() - cpu
        if not line:
            raise RuntimeError("the client failed; its message stands above")
        figures = json.loads(line)
        num_requests = len(job["keys"]) * _NUM_TURNS
        return Round(**figures, cpu_ms=1e3 * cpu / num_requests)

    def _draw_lengths(self, num_sessions: int, seed: int) -> list[list[int]]:
        """How many tokens each session's turns sample."""
        random = Random(seed)
        return [
            [random.randint(*self._new_tokens) for _ in range(_NUM_TURNS)]
            for _ in range(num_sessions)
        ]

    async def close(self) -> None:
        """Closes the gateway."""
        await self._gateway.close()


def _compute_median(rounds: list[Round]) -> Round:
    return Round(
        *(
            statistics.median(getattr(measured, field) for measured in rounds)
            for field in ("requests_per_second", "p50_ms", "cpu_ms")
        )
    )


async def compare(
    title: str,
    router: EngineRouter,
    endpoint: ServerEndpoint,
    arguments: argparse.Namespace,
) -> None:
    """All ways at every load, as a table."""
    print(f"\n{title}: sessions of {_NUM_TURNS} turns, {arguments.rounds} rounds\n")
    print(
        "| at once | way | requests/s | of bare | p50 ms | added ms | CPU ms a request "
        "| of the proxy's |"
    )
    print("|---|---|---|---|---|---|---|---|")
    async with open_process("benchmarks.load") as load:
        comparison = Comparison(router, endpoint, load, tuple(arguments.new_tokens))
        for num_sessions in arguments.sessions:
            figures = await comparison.run(num_sessions, arguments.rounds)
            bare, proxy = figures["bare server"], figures["bare proxy"]
            for way, figure in figures.items():
                print(
                    f"| {num_sessions} | {way} | {figure.requests_per_second:,.0f} "
                    f"| {figure.requests_per_second / bare.requests_per_second:.2f} "
                    f"| {figure.p50_ms:.1f} | {figure.p50_ms - bare.p50_ms:.1f} "
                    f"| {figure.cpu_ms if figure is not bare else 0.0:.2f} "
                    f"| {figure.cpu_ms / proxy.cpu_ms if figure is not bare else 0.0:.2f} |",
                    flush=True,
                )
        await comparison.close()


async def measure_null(folder: Path, arguments: argparse.Namespace) -> None:
    """Gateway and router before a server that answers at once."""
    config = build_config(str(folder), str(folder), max(arguments.sessions))
    async with open_process(
        "benchmarks.null_server", str(sum(arguments.new_tokens) // 2)
    ) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(await process.stdout.readline())}"
        endpoint = ServerEndpoint(name="null-0", base_url=url, api_key="none")
        async with open_router(config, build_transfer(config, folder), [endpoint]) as router:
            with frozen_heap():
                await compare("A server that answers at once", router, endpoint, arguments)


async def measure_vllm(folder: Path, arguments: argparse.Namespace) -> None:
    """Gateway and router before real vLLM."""
    save_model(folder, 128, 4)
    config = build_config(str(folder), str(folder), max(arguments.sessions))
    server_group = build_server_group(config, folder)
    started = time.perf_counter()
    try:
        server_group.start()
        await asyncio.to_thread(server_group.wait)
        async with open_router(
            config, build_transfer(config, folder), server_group.endpoints
        ) as router:
            await router.generate([1, 2, 3], Sampling(max_tokens=1))
            seconds = time.perf_counter() - started
            print(f"\nFrom the start of one vLLM server to its first token: {seconds:.1f} s")
            with frozen_heap():
                await compare("Real vLLM", router, server_group.endpoints[0], arguments)
    finally:
        await asyncio.to_thread(server_group.stop)


async def measure_publication(folder: Path, arguments: argparse.Namespace) -> None:
    """A publication to real vLLM beside a copy in memory."""
    model = save_model(folder, 1024, arguments.publish_layers)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    config = build_config(str(folder), str(folder), 8)
    server_group, transfer = build_server_group(config, folder), build_transfer(config, folder)
    copying, writing, publishing = [], [], []
    # Each of the folders that take turns is written twice before it is as fast as later.
    num_warming = 6
    try:
        server_group.start()
        await asyncio.to_thread(server_group.wait)
        async with open_router(config, transfer, server_group.endpoints) as router:
            for number in range(arguments.rounds + num_warming):
                started = time.perf_counter()
                for name, tensor in weights.items():
                    copies[name].copy_(tensor)
                copied = time.perf_counter()
                await router.publish_weights(number + 1, weights)
                if number >= num_warming:
                    copying.append(copied - started)
                    writing.append(transfer.prepare_seconds)
                    publishing.append(time.perf_counter() - copied)
                await router.generate([1, 2, 3], Sampling(max_tokens=1))
    finally:
        await asyncio.to_thread(server_group.stop)
    copy, written, published = map(statistics.median, (copying, writing, publishing))
    print(f"\nA publication of {num_bytes / 1e6:.0f} MB to real vLLM, {arguments.rounds} rounds\n")
    print("| memory copy ms | publication ms | of which until the file is written | ratio |")
    print("|---|---|---|---|")
    print(
        f"| {1e3 * copy:.0f} | {1e3 * published:.0f} | {1e3 * written:.0f} "
        f"| {published / copy:.1f} |",
        flush=True,
    )


_PARTS = {"null": measure_null, "vllm": measure_vllm, "publish": measure_publication}


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--new-tokens",
        type=int,
        nargs=2,
        default=[12, 36],
        metavar=("FROM", "TO"),
        help="length of completions; those above 64 are streamed from the server. Equal ones "
        "would make all sessions send at once",
    )
    parser.add_argument("--publish-layers", type=int, default=4, help="48 MB each")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            asyncio.run(_PARTS[part](Path(folder), arguments))


if __name__ == "__main__":
    main()
