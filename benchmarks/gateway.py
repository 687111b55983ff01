"""What the gateway costs: three-turn sessions through it, beside the same calls on the bare engine.

    python -m benchmarks.gateway

Two engines: one that answers at once, so that only the gateway's own work is left, and
the embedded engine with a small model. Every way makes the same token-level calls; rounds
of the ways alternate, and the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Sampling
from agentrl_cli.models.tokenizer_training import train_tokenizer
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway
from benchmarks.embedded_engine import build_model

_NUM_TURNS = 3
_NUM_NEW_TOKENS = 24
_QUESTION = "What is the sum of the numbers from one to ten? Answer with a number."


class InstantEngine:
    """Answers every call at once with the same tokens."""

    model_name = "instant"
    max_model_len = 4096

    def __init__(self, completion_ids: Sequence[int]) -> None:
        count = len(completion_ids)
        self._generation = Generation(
            completion_ids=tuple(completion_ids),
            rollout_logprobs=(-1.0,) * count,
            versions=(0,) * count,
            finish_reason="stop",
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """The same completion every time."""
        return self._generation

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """The same completion in one piece."""
        yield self._generation


@dataclass(frozen=True, slots=True)
class Cost:
    """One way, one round."""

    requests_per_second: float
    cpu_ms: float
    """CPU milliseconds of this process per request."""
    p50_ms: float
    """Median duration of one call."""


async def measure(session: Callable[[list[float]], Awaitable[None]], num_sessions: int) -> Cost:
    """The cost of ``num_sessions`` sessions at once."""
    durations: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(session(durations) for _ in range(num_sessions)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    num_requests = num_sessions * _NUM_TURNS
    return Cost(
        num_requests / seconds, 1e3 * cpu / num_requests, 1e3 * statistics.median(durations)
    )


def build_ways(
    engine: InferenceEngine, gateway: Gateway, base_url: str
) -> dict[str, Callable[[list[float]], Awaitable[None]]]:
    """The same three turns: on the engine, through the in-process client, through a socket."""
    template = gateway.template
    sampling = Sampling(max_tokens=_NUM_NEW_TOKENS)
    first = {"role": "user", "content": _QUESTION}

    async def bare(durations: list[float]) -> None:
        text = template.tokenizer.apply_chat_template(
            [first], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = template.encode(text)
        for _ in range(_NUM_TURNS):
            started = time.perf_counter()
            generation = await engine.generate(prompt_ids, sampling)
            durations.append(time.perf_counter() - started)
            prompt_ids += generation.completion_ids + template.encode(_QUESTION)

    async def talk(client: openai.AsyncOpenAI, durations: list[float]) -> None:
        messages: list[Any] = [first]
        for _ in range(_NUM_TURNS):
            started = time.perf_counter()
            reply = await client.chat.completions.create(model="m", messages=messages)
            durations.append(time.perf_counter() - started)
            content = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": content}, first]

    async def in_process(durations: list[float]) -> None:
        session = gateway.open_session(sampling=sampling)
        client = TrackingClient(gateway=gateway, session=session)
        await talk(client, durations)
        await client.close()

    shared = openai.AsyncOpenAI(api_key="later", base_url=base_url, max_retries=0)

    async def socket(durations: list[float]) -> None:
        session = gateway.open_session(sampling=sampling)
        await talk(shared.with_options(api_key=session.key), durations)
        gateway.close_session(session)

    return {"bare engine": bare, "in process": in_process, "socket": socket}


async def compare(
    name: str, engine: InferenceEngine, tokenizer: Any, num_sessions: int, rounds: int
) -> None:
    """Measures the ways in turns and prints a table."""
    gateway = Gateway(engine, tokenizer)
    ways = build_ways(engine, gateway, await gateway.serve())
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, session in ways.items():
            cost = await measure(session, num_sessions)
            if number:  # the first round warms up
                costs[way].append(cost)
    await gateway.close()
    print(f"\n{name}, {num_sessions} sessions of {_NUM_TURNS} turns at once, {rounds} rounds")
    print("| way | requests/s | of bare | CPU ms a request | p50 ms | added p50 ms |")
    print("|---|---|---|---|---|---|")
    base: Cost | None = None
    for way, measured in costs.items():
        rate, cpu, p50 = (
            statistics.median(getattr(cost, field) for cost in measured)
            for field in ("requests_per_second", "cpu_ms", "p50_ms")
        )
        base = base or Cost(rate, cpu, p50)
        share = rate / base.requests_per_second
        print(
            f"| {way} | {rate:,.0f} | {share:.3f} | {cpu:.2f} | {p50:.1f} "
            f"| {p50 - base.p50_ms:.1f} |"
        )


async def run(num_sessions: list[int], rounds: int) -> None:
    """Both engines, every load."""
    tokenizer = train_tokenizer([_QUESTION, "The answer is fifty-five."], 512)
    reply_ids = [*tokenizer.encode("The answer is 55."), tokenizer.eos_token_id]
    for count in num_sessions:
        await compare("instant engine", InstantEngine(reply_ids), tokenizer, count, rounds)
    config = EngineConfig(kind="embedded", max_model_len=1024, max_num_seqs=max(num_sessions))
    engine = EmbeddedEngine(build_model(128, 4), tokenizer, config, model_name="small")
    try:
        for count in num_sessions:
            await compare("embedded engine", engine, tokenizer, count, max(1, rounds // 2))
    finally:
        await engine.close()


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.sessions, arguments.rounds))


if __name__ == "__main__":
    main()
