"""What a call costs as a conversation grows: CPU of calls 2 and 200, and the session's memory.

    python -m benchmarks.long_conversations --output docs/results/long-conversations.md

One agent in this process calls a tool in every turn, on an engine that answers at once: what is
left is the SDK's and the gateway's own work. Run it with ``PYTHONPATH`` naming another checkout,
and this file by its path, to measure that one.

The memory is what the session holds while it lives (``tracemalloc``), in multiples of its distinct
tokens and text: every message once as JSON in UTF-8, every token's id in 4 bytes, and 16 more for
the logprob and the version of one that was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.models.tokenizer_training import load_chat_template, train_tokenizer
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

_NUM_TURNS = 200
#: Calls around the ones that are compared; their median is shown.
_NUM_AROUND = 3
_MIB = 2**20
_TEXT = "the sum of all numbers from one to ten is less than sixty and so the answer is known "
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
#: As Qwen3's: reasoning is shown until the user speaks again.
_QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' %}
{%- set ns.searching = false %}{% set ns.last_query_index = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + message.content }}
{%- else %}{{- '<|im_start|>assistant\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    name: str
    template: str
    reasons: bool = False
    uses_responses: bool = False


CASES = (
    Case("chat, tools", load_chat_template()),
    Case("chat, tools and reasoning", _QWEN3, reasons=True),
    Case("responses, tools and reasoning", _QWEN3, reasons=True, uses_responses=True),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """One session of ``_NUM_TURNS`` calls."""

    early_ms: float
    """CPU milliseconds of call 2, client and gateway."""
    late_ms: float
    """Of the last call."""
    gateway_early_ms: float
    """The gateway's part of it."""
    gateway_late_ms: float
    held_mib: float
    """What the session holds after its last call."""
    distinct_mib: float
    """Its distinct tokens and text."""


class InstantEngine:
    """Calls the tool in every turn, each time with other words."""

    model_name = "instant"
    max_model_len = 2**20

    def __init__(self, tokenizer: Any, reasons: bool) -> None:
        self._tokenizer = tokenizer
        self._reasons = reasons
        self._replies: list[Generation] = []

    def write(self, num_replies: int) -> None:
        """Makes the next replies, so that this takes none of the time that is measured."""
        for number in range(num_replies, 0, -1):
            query = json.dumps({"name": "look_up", "arguments": {"query": _say(number, 8)}})
            thought = f"<think>\n{_say(number, 40)}\n</think>\n\n" if self._reasons else ""
            text = f"{thought}{_say(number, 12)}\n<tool_call>\n{query}\n</tool_call>"
            ids = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
            logprobs = tuple(-0.001 * (number + n) for n in range(len(ids)))
            versions = (number // 50,) * len(ids)
            generation = Generation(
                completion_ids=tuple(ids),
                rollout_logprobs=logprobs,
                versions=versions,
                finish_reason="stop",
            )
            self._replies.append(generation)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """The next reply."""
        return self._replies.pop()

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """The next reply, in one piece."""
        yield self._replies.pop()


class _ClockedGateway(Gateway):
    """Adds up the CPU time of its own work."""

    seconds = 0.0

    async def answer(self, *request: Any) -> None:
        started = time.process_time()
        await super().answer(*request)
        self.seconds += time.process_time() - started


def _say(number: int, num_words: int) -> str:
    words = _TEXT.split() * (num_words + 3)
    return " ".join(words[number * 7 % 19 :: 1 + number % 3][:num_words])


async def talk(client: TrackingClient, case: Case, costs: list[tuple[float, float]]) -> None:
    """A session of ``_NUM_TURNS`` calls; CPU seconds of each, and the gateway's part of them."""
    gateway: Any = client.gateway
    messages: list[Any] = [{"role": "user", "content": _say(0, 60)}]
    response_tool = {"type": "function", **_TOOL["function"]}  # type: ignore[dict-item]
    for turn in range(_NUM_TURNS):
        gateway.seconds, started = 0.0, time.process_time()
        if case.uses_responses:
            response: Any = await client.responses.create(
                model="m",
                input=messages,
                tools=[response_tool],  # type: ignore[list-item]
            )
            costs.append((time.process_time() - started, gateway.seconds))
            messages += [item.model_dump(exclude_none=True) for item in response.output]
            call_id = response.output[-1].call_id
            result = {"type": "function_call_output", "call_id": call_id}
            messages.append({**result, "output": _say(turn, 80)})
        else:
            completion: Any = await client.chat.completions.create(
                model="m",
                messages=messages,
                tools=[_TOOL],  # type: ignore[list-item]
            )
            costs.append((time.process_time() - started, gateway.seconds))
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id}
            messages.append({**result, "content": _say(turn, 80)})


def _count_distinct_bytes(client: TrackingClient) -> int:
    last = client.interactions[-1]
    num_tokens = len(last.prompt_ids) + len(last.completion_ids)
    num_sampled = sum(i.num_completion_tokens for i in client.interactions)
    text = json.dumps([*last.messages, last.reply], ensure_ascii=False).encode()
    return len(text) + 4 * num_tokens + 16 * num_sampled


async def measure(case: Case, tokenizer: Any, *, num_rounds: int) -> Cost:
    """Medians over the rounds; the memory is that of one more session."""
    tokenizer.chat_template = case.template
    engine = InstantEngine(tokenizer, case.reasons)
    reasoning = "qwen3" if case.reasons else "none"
    gateway = _ClockedGateway(
        engine, tokenizer, tool_call_parser="hermes", reasoning_parser=reasoning
    )
    rounds = []
    for _ in range(num_rounds):
        costs: list[tuple[float, float]] = []
        engine.write(_NUM_TURNS)
        client = TrackingClient(gateway=gateway)
        await talk(client, case, costs)
        assert all(i.extends_parent for i in client.interactions[1:])
        await client.close()
        rounds.append(costs)
    engine.write(_NUM_TURNS)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    client = TrackingClient(gateway=gateway)
    await talk(client, case, [])
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    distinct = _count_distinct_bytes(client)
    await client.close()
    await gateway.close()
    # The first call of a round loads what the later ones find.
    early = [c for costs in rounds for c in costs[1 : 1 + _NUM_AROUND]]
    late = [c for costs in rounds for c in costs[-_NUM_AROUND:]]
    figures = [
        1e3 * statistics.median(c[part] for c in calls)
        for part in (0, 1)
        for calls in (early, late)
    ]
    return Cost(*figures, held / _MIB, distinct / _MIB)


async def run(num_rounds: int) -> str:
    """The table."""
    tokenizer = train_tokenizer([_say(n, 60) for n in range(40)], 500)
    lines = [
        "| conversation | call 2, CPU ms | call 200, CPU ms | of it the gateway | held, MiB "
        "| tokens and text, MiB | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        cost = await measure(case, tokenizer, num_rounds=num_rounds)
        lines.append(
            f"| {case.name} | {cost.early_ms:.1f} | {cost.late_ms:.1f} | "
            f"{cost.gateway_early_ms:.1f} → {cost.gateway_late_ms:.1f} | {cost.held_mib:.1f} | "
            f"{cost.distinct_mib:.2f} | {cost.held_mib / cost.distinct_mib:.1f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and writes it with ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    table = asyncio.run(run(options.rounds))
    print(table)
    if options.output is not None:
        options.output.write_text(f"# Long conversations\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
