"""What strangers do to a gateway from another process, and how long its agents wait meanwhile."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import httpx2
import psutil
import pytest

from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
_SECONDS = 12.0
#: Behind strangers that are served first, a call would wait for their deadlines.
_MAX_WAIT_SECONDS = 4.0
_MIB = 2**20
ATTACKER = """
import asyncio, contextlib, resource, sys
attack, port, num = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
START = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\n"
async def strike(writer):
    if attack == "half-open connections":
        writer.write(START)
        await asyncio.sleep(3600)
    line = b"a: b\\r\\n" * 1000
    if attack == "64 MB bodies":
        writer.write(START + b"content-length: 67108864\\r\\n\\r\\n")
        line = b" " * 65536
    else:
        writer.write(START)
    with contextlib.suppress(OSError):
        while True:
            writer.write(line)
            await writer.drain()
async def attack_for_ever():
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            striking = asyncio.ensure_future(strike(writer))
            await reader.read()
            striking.cancel()
            writer.close()
        except OSError:
            pass
        await asyncio.sleep(0.05)
async def main():
    await asyncio.gather(*[attack_for_ever() for _ in range(num)])
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "num_connections"),
    [("half-open connections", 1500), ("endless headers", 200), ("64 MB bodies", 64)],
)
async def test_strangers_cost_a_run_next_to_nothing(
    open_client: Open, attack: str, num_connections: int
) -> None:
    client = open_client(*["hello"] * 100_000, max_kept=20)
    url = f"{await client.gateway.serve()}/chat/completions"
    port = str(httpx2.URL(url).port)
    process = psutil.Process()
    waits: list[float] = []

    async def ask(seconds: float) -> tuple[int, float]:
        """An agent that opens a connection for each call; the maximum of files and of MiB."""
        max_files, max_memory = 0, 0.0
        headers = {"Authorization": f"Bearer {client.session_key}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.perf_counter()
            async with httpx2.AsyncClient(timeout=60.0) as http:
                reply = await http.post(url, json=body, headers=headers)
            assert reply.status_code == 200
            waits.append(time.perf_counter() - started)
            max_files = max(max_files, process.num_fds())
            max_memory = max(max_memory, process.memory_info().rss / _MIB)
            await asyncio.sleep(0.05)
        return max_files, max_memory

    quiet_files, quiet_memory = await ask(2.0)
    longest: list[float] = []
    # Other work on the machine makes calls wait as well, but not in each of three attacks.
    while len(longest) < 3 and min(longest, default=_MAX_WAIT_SECONDS) >= _MAX_WAIT_SECONDS:
        waits.clear()
        attacker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ATTACKER, attack, port, str(num_connections)
        )
        try:
            max_files, max_memory = await ask(_SECONDS)
            assert attacker.returncode is None
        finally:
            attacker.kill()
            await attacker.wait()
        longest.append(max(waits))
        more_files, more_memory = max_files - quiet_files, max_memory - quiet_memory
        print(
            f"{attack} x {num_connections}: {len(waits)} calls of an honest client waited "
            f"{longest[-1]:.2f} s at most; {more_memory:.0f} MiB and {more_files} files more"
        )
        assert more_memory < 64
        assert more_files <= num_connections + 16
    assert min(longest) < _MAX_WAIT_SECONDS
