"""Agents of three turns through agentrl's gateway, beside the framework alone.

    python -m benchmarks.frameworks

Both ways run in this process, on an engine that answers at once: two tool calls, then the
answer. Alone, the framework's own client gets them from the thinnest server there can be, a
transport that hands out ready bytes by the number of tool results in the request: no parsing, no
tokens, no records. Through agentrl each trajectory opens a session, is rendered, tokenized,
sampled, parsed and recorded, and gets its reward and credit; its agent is made anew, as builders
that take ``client`` do, while the agent alone is made once. Rounds of the two ways alternate, short
ones, as other programs on the machine disturb them; the figures are medians over the rounds, and
a share is the median of the shares of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.models.tokenizer import train_tokenizer
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway
from benchmarks.framework_agents import ANSWER, CALLS, FRAMEWORKS, MODEL, QUESTION, Framework

_GOAL = 0.8
_REPLIES = (
    *(f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(c)}}}\n</tool_call>' for c in CALLS),
    ANSWER,
)


class NullEngine:
    """Gives a session its replies one after the other, at once."""

    model_name = MODEL
    max_model_len = 8192

    def __init__(self, tokenizer: Any) -> None:
        self._generations = [
            self._build_generation((*tokenizer.encode(text), tokenizer.eos_token_id))
            for text in _REPLIES
        ]
        self._turns: Counter[str] = Counter()

    @staticmethod
    def _build_generation(ids: Sequence[int]) -> Generation:
        return Generation(
            completion_ids=tuple(ids),
            rollout_logprobs=(-1.0,) * len(ids),
            versions=(0,) * len(ids),
            finish_reason="stop",
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """The session's next reply."""
        turn = self._turns[session_id]
        if turn == len(_REPLIES) - 1:
            del self._turns[session_id]
        else:
            self._turns[session_id] += 1
        return self._generations[turn]

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """The same in one piece."""
        yield await self.generate(prompt_ids, sampling, session_id=session_id)


class NullTransport(httpx2.AsyncBaseTransport):
    """Ready replies of OpenAI's and Anthropic's APIs, by how many tool results a request has."""

    def __init__(self) -> None:
        self._chat = [json.dumps(_build_completion(turn)).encode() for turn in range(3)]
        self._messages = [json.dumps(_build_message(turn)).encode() for turn in range(3)]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The reply, without reading more of the request than its results."""
        body = await request.aread()
        if request.url.path.endswith("/messages"):
            content = self._messages[body.count(b'"tool_use_id"')]
        else:
            content = self._chat[body.count(b'"tool_call_id"')]
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=content)


def _build_completion(turn: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ANSWER, "refusal": None}
    if turn < len(CALLS):
        function = {"name": "add", "arguments": json.dumps(CALLS[turn])}
        message["content"] = None
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    finish_reason = "tool_calls" if turn < len(CALLS) else "stop"
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 30, "total_tokens": 230},
    }


def _build_message(turn: int) -> dict[str, Any]:
    calls = turn < len(CALLS)
    block: dict[str, Any] = {"type": "text", "text": ANSWER}
    if calls:
        block = {"type": "tool_use", "id": f"toolu_{turn}", "name": "add", "input": CALLS[turn]}
    return {
        "id": f"msg_{turn}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [block],
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 200, "output_tokens": 30},
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """One way, one round."""

    trajectories_per_second: float
    cpu_ms: float
    """CPU milliseconds of this process per trajectory."""


#: Runs one trajectory.
Way = Callable[[], Awaitable[None]]


def build_ways(framework: Framework, gateway: Gateway, http: httpx2.AsyncClient) -> dict[str, Way]:
    """The trajectory alone and through the gateway; each checks that it was the right one."""
    agent = framework.build_alone(http)

    async def alone() -> None:
        answer = await agent()
        assert answer == ANSWER, answer

    async def tracked() -> None:
        session = gateway.open_session(sampling=Sampling(max_tokens=64))
        client = TrackingClient(gateway=gateway, session=session)
        answer = await framework.build_tracked(client)()
        client.set_final_reward(1.0)
        client.apply_reward_discount(1.0)
        await client.close()
        interactions = client.interactions
        assert answer == ANSWER, answer
        assert [i.break_cause for i in interactions] == [None] * len(_REPLIES)
        assert all(i.extends_parent for i in interactions[1:])

    return {"alone": alone, "agentrl": tracked}


async def measure(way: Way, num_trajectories: int, num_concurrent: int) -> Cost:
    """The cost of trajectories, ``num_concurrent`` at a time."""
    left = iter(range(num_trajectories))

    async def work() -> None:
        for _ in left:
            await way()

    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(num_concurrent)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Cost(num_trajectories / seconds, 1e3 * cpu / num_trajectories)


async def compare(framework: Framework, arguments: argparse.Namespace) -> str:
    """One row of the table."""
    try:
        importlib.import_module(framework.package)
    except ImportError as error:
        return f"| {framework.name} | skipped: {error} | | | | | |"
    tokenizer = train_tokenizer([QUESTION, *_REPLIES], 512)
    gateway = Gateway(NullEngine(tokenizer), tokenizer)  # type: ignore[arg-type]
    costs: dict[str, list[Cost]] = {}
    async with httpx2.AsyncClient(transport=NullTransport(), timeout=None) as http:
        ways = build_ways(framework, gateway, http)
        for number in range(arguments.rounds + 1):
            for name, way in ways.items():
                cost = await measure(way, arguments.trajectories, arguments.concurrent)
                if number:  # the first round warms up
                    costs.setdefault(name, []).append(cost)
    await gateway.close()
    rates = {n: statistics.median(c.trajectories_per_second for c in costs[n]) for n in ways}
    cpus = {n: statistics.median(c.cpu_ms for c in costs[n]) for n in ways}
    pairs = list(zip(costs["alone"], costs["agentrl"], strict=True))
    share = statistics.median(
        tracked.trajectories_per_second / alone.trajectories_per_second for alone, tracked in pairs
    )
    cpu_share = statistics.median(alone.cpu_ms / tracked.cpu_ms for alone, tracked in pairs)
    return (
        f"| {framework.name} | {rates['alone']:,.0f} | {rates['agentrl']:,.0f} | {share:.2f} "
        f"| {cpus['alone']:.2f} | {cpus['agentrl']:.2f} | {cpu_share:.2f} |"
    )


async def run(arguments: argparse.Namespace) -> None:
    """Every framework, one after the other."""
    print(
        f"{arguments.trajectories} trajectories of {len(_REPLIES)} turns a round, "
        f"{arguments.concurrent} at a time, {arguments.rounds} rounds; goal: {_GOAL} of alone"
    )
    print(
        "| framework | alone, trajectories/s | agentrl | of alone "
        "| alone, CPU ms a trajectory | agentrl | of alone |"
    )
    print("|---|---|---|---|---|---|---|")
    for framework in FRAMEWORKS:
        if arguments.only is None or arguments.only in framework.name:
            print(await compare(framework, arguments), flush=True)


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="frameworks whose name holds this")
    # CAMEL warns of every model whose name it does not know.
    logging.disable(logging.WARNING)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
