"""Sessions of several turns against a server, from a process of its own.

    python -m benchmarks.load

Reads one job a line, as JSON, and answers with its figures, as JSON. It lives as long as its
standard input, and keeps its connections from job to job.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any

import aiohttp


async def talk_in_tokens(
    http: aiohttp.ClientSession,
    job: dict[str, Any],
    key: str,
    lengths: list[int],
    seconds: list[float],
) -> None:
    """The turns as token ids, to vLLM itself."""
    prompt_ids = list(job["prompt_ids"])
    for length in lengths:
        params = {**job["sampling_params"], "max_tokens": length}
        body = {"token_ids": prompt_ids, "sampling_params": params}
        reply = await _post(http, job["url"], key, body, seconds)
        prompt_ids += reply["choices"][0]["token_ids"] + job["next_ids"]


async def talk_in_messages(
    http: aiohttp.ClientSession,
    job: dict[str, Any],
    key: str,
    lengths: list[int],
    seconds: list[float],
) -> None:
    """The turns as messages, to a gateway."""
    messages = [job["question"]]
    for length in lengths:
        body = {"model": "m", "messages": messages, "max_tokens": length}
        reply = await _post(http, job["url"], key, body, seconds)
        message = reply["choices"][0]["message"]
        messages += [{"role": "assistant", "content": message["content"]}, job["question"]]


async def _post(
    http: aiohttp.ClientSession, url: str, key: str, body: object, seconds: list[float]
) -> Any:
    started = time.perf_counter()
    data = json.dumps(body, separators=(",", ":")).encode()
    async with http.post(url, data=data, headers={"Authorization": f"Bearer {key}"}) as response:
        reply = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {reply[:500]!r}")
    seconds.append(time.perf_counter() - started)
    return json.loads(reply)


async def run(job: dict[str, Any], http: aiohttp.ClientSession) -> dict[str, float]:
    """One session for each key, ``num_concurrent`` at any time, as a rollout has them."""
    talk = talk_in_tokens if "prompt_ids" in job else talk_in_messages
    durations: list[float] = []
    started = time.perf_counter()
    sessions = zip(job["keys"], job["lengths"], strict=True)

    async def work() -> None:
        for key, lengths in sessions:
            await talk(http, job, key, lengths, durations)

    await asyncio.gather(*(work() for _ in range(job["num_concurrent"])))
    seconds = time.perf_counter() - started
    return {
        "requests_per_second": len(durations) / seconds,
        "p50_ms": 1e3 * statistics.median(durations),
    }


async def main() -> None:
    """Works off the jobs."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await run(json.loads(line), http)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
