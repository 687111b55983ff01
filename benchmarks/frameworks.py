"""Agents of three turns through agentrl's gateway, beside the framework alone.

    python -m benchmarks.frameworks

All ways run in this process, on an engine that answers at once: two tool calls, then the answer.

* ``agentrl``: each trajectory opens a session, is rendered, tokenized, sampled, parsed and
  recorded, and gets its reward and credit; its agent is made anew, as builders that take
  ``client`` do.
* ``alone``: the framework's own client on the same engine, behind the least that can serve it: the
  chat template and the tokenizer over the whole of each request, the reply's call read by one
  expression. Nothing is checked, nothing is kept. The agent is made once.
* ``ready bytes``: the framework's own client and nothing else: its transport hands out finished
  replies by the number of tool results in the request, without tokens or an engine.

Rounds of the ways alternate, short ones, as other programs on the machine disturb them; the
figures are medians over the rounds, and a share is the median of the shares of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.models.tokenizer_training import train_tokenizer
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
        self.generations = [
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
        return self.generations[turn]

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """The same in one piece."""
        yield await self.generate(prompt_ids, sampling, session_id=session_id)


class NullTransport(httpx2.AsyncBaseTransport):
    """Ready replies of OpenAI's and Anthropic's APIs, by how many tool results a request has."""

    def __init__(self) -> None:
        turns = range(len(_REPLIES))
        self._chat = [_build_ready(_build_completion, turn) for turn in turns]
        self._messages = [_build_ready(_build_message, turn) for turn in turns]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The reply, without reading more of the request than its results."""
        body = await request.aread()
        if request.url.path.endswith("/messages"):
            content = self._messages[body.count(b'"tool_use_id"')]
        else:
            content = self._chat[body.count(b'"tool_call_id"')]
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=content)


class PlainServer(httpx2.AsyncBaseTransport):
    """OpenAI's and Anthropic's APIs over the engine's tokens, by no more work than it takes."""

    def __init__(self, engine: NullEngine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The engine's reply to the rendered conversation."""
        body = json.loads(await request.aread())
        speaks_messages = request.url.path.endswith("/messages")
        messages = _to_chat(body) if speaks_messages else _parse_arguments(body["messages"])
        prompt_ids = self._tokenizer.apply_chat_template(
            messages, tools=_to_chat_tools(body["tools"]), add_generation_prompt=True
        )["input_ids"]
        turn = sum(message["role"] == "tool" for message in messages)
        completion_ids = self._engine.generations[turn].completion_ids
        text = self._tokenizer.decode(completion_ids, skip_special_tokens=True)
        found = _TOOL_CALL.search(text)
        call = json.loads(found[1])["arguments"] if found else None
        build = _build_message if speaks_messages else _build_completion
        reply = build(turn, call, text, len(prompt_ids), len(completion_ids))
        headers = {"content-type": "application/json"}
        return httpx2.Response(200, headers=headers, content=json.dumps(reply).encode())


_TOOL_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")


def _parse_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as the template reads them: arguments as objects."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def _to_chat(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Anthropic's messages as chat messages."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": body["system"]}]
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
            continue
        for block in content:
            if block["type"] == "tool_result":
                messages.append({"role": "tool", "content": block["content"]})
            elif block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": block["input"]}
                messages.append({"role": "assistant", "tool_calls": [{"function": function}]})
    return messages


def _to_chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        tool
        if "function" in tool
        else {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
    ]


def _build_ready(build: Callable[..., dict[str, Any]], turn: int) -> bytes:
    call = CALLS[turn] if turn < len(CALLS) else None
    return json.dumps(build(turn, call, ANSWER, 200, 30)).encode()


def _build_completion(
    turn: int, call: dict[str, Any] | None, text: str, num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if call is not None:
        function = {"name": "add", "arguments": json.dumps(call)}
        message["content"] = None
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    finish_reason = "stop" if call is None else "tool_calls"
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _build_message(
    turn: int, call: dict[str, Any] | None, text: str, num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": text}
    if call is not None:
        block = {"type": "tool_use", "id": f"toolu_{turn}", "name": "add", "input": call}
    return {
        "id": f"msg_{turn}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [block],
        "stop_reason": "end_turn" if call is None else "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt, "output_tokens": num_sampled},
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """One way, one round."""

    trajectories_per_second: float
    cpu_ms: float
    """CPU milliseconds of this process per trajectory."""


#: Runs one trajectory.
Way = Callable[[], Awaitable[None]]


def build_alone(framework: Framework, http: httpx2.AsyncClient) -> Way:
    """The trajectory by the framework's own client; it checks that it was the right one."""
    agent = framework.build_alone(http)

    async def alone() -> None:
        answer = await agent()
        assert answer == ANSWER, answer

    return alone


def build_tracked(framework: Framework, gateway: Gateway) -> Way:
    """The trajectory through the gateway, which checks its record as well."""

    async def tracked() -> None:
        session = gateway.open_session(sampling=Sampling(max_tokens=64))
        client = TrackingClient(gateway=gateway, session=session)
        answer = await framework.build_tracked(client)()
        client.set_final_reward(1.0)
        client.apply_reward_discount(1.0)
        await client.close()
        interactions = client.interactions
        assert answer == ANSWER, answer
        assert [i.mismatch_cause for i in interactions] == [None] * len(_REPLIES)
        assert all(i.extends_parent for i in interactions[1:])

    return tracked


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
        return f"| {framework.name} | skipped: {error} |" + " |" * 7
    tokenizer = train_tokenizer([QUESTION, *_REPLIES], 512)
    engine = NullEngine(tokenizer)
    gateway = Gateway(engine, tokenizer)  # type: ignore[arg-type]
    costs: dict[str, list[Cost]] = {}
    async with (
        httpx2.AsyncClient(transport=PlainServer(engine, tokenizer), timeout=None) as plain,
        httpx2.AsyncClient(transport=NullTransport(), timeout=None) as ready,
    ):
        ways = {
            "agentrl": build_tracked(framework, gateway),
            "alone": build_alone(framework, plain),
            "ready bytes": build_alone(framework, ready),
        }
        for number in range(arguments.rounds + 1):
            for name, way in ways.items():
                cost = await measure(way, arguments.trajectories, arguments.concurrent)
                if number:  # the first round warms up
                    costs.setdefault(name, []).append(cost)
    await gateway.close()
    rates = [statistics.median(c.trajectories_per_second for c in costs[n]) for n in ways]
    cpus = [statistics.median(c.cpu_ms for c in costs[n]) for n in ways]
    shares = [_compute_share(costs["agentrl"], costs[name]) for name in ("alone", "ready bytes")]
    cells = [
        *(f"{rate:,.0f}" for rate in rates),
        *(f"{share:.2f}" for share in shares),
        *(f"{cpu:.2f}" for cpu in cpus),
    ]
    return f"| {framework.name} | {' | '.join(cells)} |"


def _compute_share(own: Sequence[Cost], other: Sequence[Cost]) -> float:
    return statistics.median(
        one.trajectories_per_second / two.trajectories_per_second
        for one, two in zip(own, other, strict=True)
    )


async def run(arguments: argparse.Namespace) -> None:
    """Every framework, one after the other."""
    print(
        f"{arguments.trajectories} trajectories of {len(_REPLIES)} turns a round, "
        f"{arguments.concurrent} at a time, {arguments.rounds} rounds; goal: {_GOAL} of alone"
    )
    print(
        "| framework | agentrl, trajectories/s | alone | ready bytes | of alone | of ready bytes "
        "| agentrl, CPU ms a trajectory | alone | ready bytes |"
    )
    print("|---" * 9 + "|")
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
