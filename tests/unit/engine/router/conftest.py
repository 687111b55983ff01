"""Servers that die, hang and lie, in a world whose clock runs only while everybody waits."""

from __future__ import annotations

import asyncio
import selectors
import zlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import (
    UNKNOWN_VERSION,
    EngineLoad,
    Generation,
    Sampling,
    ServerEndpoint,
    join_pieces,
)
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.router.server_mirror import MirrorEngine
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerBusyError, ServerDownError

END_ID = 2
#: A completion of a prompt that begins with it is as long as it may be.
ENDLESS_ID = 2000
MAX_MODEL_LEN = 512
TOKEN_SECONDS = 0.02


def sample_token(prefix: Sequence[int], weights: int) -> int:
    """What the model with these weights says next, always."""
    number = zlib.crc32(repr((weights, tuple(prefix))).encode())
    if number % 60 == 0 and prefix[0] != ENDLESS_ID:
        return END_ID
    return 3 + number % 1000


def compute_logprob(prefix: Sequence[int], weights: int) -> float:
    return -(zlib.crc32(repr((tuple(prefix), weights, "p")).encode()) % 1000) / 100


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self._loop._now += timeout
        return ready


@dataclass
class FakeProcess:
    """A server process: what it holds, and what is wrong with it."""

    weights: int = 0
    """Which weights it really holds; 0: those it was started with."""
    label: int = UNKNOWN_VERSION
    """What it says it holds."""
    is_alive: bool = True
    is_hung: bool = False
    is_paused: bool = False
    is_asleep: bool = False
    is_loading: bool = False
    load_seconds: float = 0.1
    refuses_key: bool = False
    refuses_weights: bool = False
    ignores_weights: bool = False
    ignores_version: bool = False
    refusals: Iterator[int] = field(default_factory=lambda: iter(()))
    """Statuses that the next calls are answered with."""
    num_aborted: int = 0
    num_running: int = 0
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    change: asyncio.Event = field(default_factory=asyncio.Event)

    def touch(self) -> None:
        """Wakes whatever waits for a change of the process."""
        self.change.set()
        self.change.clear()


class FakeServer:
    """Stands for the client of a process that others kill, hang and start again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoint = ServerEndpoint(name=name, base_url="http://here:1", api_key="sk-1")
        self.process = FakeProcess()
        self.is_closed = False
        self.cache_salt: str | None = None

    def kill(self) -> None:
        self.process.is_alive = False
        self.process.touch()

    def move(self, endpoint: ServerEndpoint) -> None:
        """Other processes that call it elsewhere do so without a word."""
        self.endpoint = endpoint

    def take_cache_salt(self, salt: str | None) -> None:
        self.cache_salt = salt

    def start_again(self, **faults: Any) -> None:
        self.kill()
        self.process = FakeProcess(**faults)

    def hang(self, is_hung: bool = True) -> None:
        self.process.is_hung = is_hung
        self.process.touch()

    async def _reach(self, process: FakeProcess, seconds: float, leg: str) -> None:
        """Waits like a request that takes ``seconds``, with a deadline."""
        try:
            async with asyncio.timeout(5.0):
                await self._let_pass(process, seconds)
        except TimeoutError:
            raise EngineTimeoutError(f"{leg}: {self.name} did not finish") from None

    async def _let_pass(self, process: FakeProcess, seconds: float) -> None:
        """Time passes in the process, unless it hangs."""
        while True:
            if not process.is_alive:
                raise ServerDownError(f"{self.name} closed the connection")
            change = process.change
            if process.is_hung:
                await change.wait()
                continue
            try:
                async with asyncio.timeout(seconds):
                    await change.wait()
            except TimeoutError:
                return

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stream_interval: int = 1
    ) -> AsyncIterator[Generation]:
        process, ids = self.process, list(prompt_ids)
        process.prompts.append(tuple(prompt_ids))
        process.samplings.append(sampling)
        for status in process.refusals:
            raise ServerBusyError(f"{self.name}: {status}", is_rate_limit=status == 429)
        process.num_running += 1
        max_tokens = min(MAX_MODEL_LEN - len(ids), sampling.max_tokens or MAX_MODEL_LEN)
        new_ids: list[int] = []
        logprobs: list[float] = []
        labels: list[int] = []
        reason = None
        try:
            while reason is None:
                await self._let_pass(process, TOKEN_SECONDS)
                while process.is_paused or process.is_asleep:
                    await self._let_pass(process, TOKEN_SECONDS)
                logprobs.append(compute_logprob(ids, process.weights))
                new_ids.append(sample_token(ids, process.weights))
                ids.append(new_ids[-1])
                labels.append(process.label)
                reason = "length" if len(labels) == max_tokens else None
                reason = "stop" if ids[-1] == END_ID else reason
                if reason or len(labels) == 1 or len(new_ids) >= stream_interval:
                    tops = tuple((pair,) for pair in zip(new_ids, logprobs, strict=True))
                    yield Generation(
                        completion_ids=tuple(new_ids),
                        rollout_logprobs=tuple(logprobs),
                        versions=tuple(labels) if reason else (),
                        finish_reason=reason,
                        top_logprobs=tops if sampling.num_top_logprobs else (),
                    )
                    new_ids, logprobs = [], []
        finally:
            process.num_running -= 1
            process.num_aborted += reason is None

    async def policy_version(self) -> int:
        process = self.process
        # Whoever loads weights answers nothing else.
        seconds = process.load_seconds if process.is_loading else 0.002
        await self._reach(process, seconds, "version")
        return process.label

    async def check_health(self) -> int:
        process = self.process
        seconds = process.load_seconds if process.is_loading else 0.002
        await self._reach(process, seconds, "health")
        if process.refuses_key:
            raise EngineError(f"health: {self.name} refused the key")
        return process.label

    async def read_load(self) -> EngineLoad:
        await self._reach(self.process, 0.002, "reading its load")
        return EngineLoad(
            num_seats=16,
            num_running=self.process.num_running,
            num_waiting=1,
            cache_use=0.25 * self.process.num_running,
        )

    async def pause(self) -> None:
        process = self.process
        await self._reach(process, 0.01, "pause")
        process.is_paused = True

    async def sleep(self) -> None:
        process = self.process
        while process.num_running:
            await self._let_pass(process, TOKEN_SECONDS)
        process.is_asleep = True

    async def wake(self) -> None:
        await self._reach(self.process, 0.01, "wake")
        self.process.is_asleep = False

    async def resume(self) -> None:
        process = self.process
        await self._reach(process, 0.01, "resume")
        process.is_paused = False

    async def load_weights(self, folder: Path) -> None:
        process = self.process
        assert process.is_paused
        process.is_loading = True
        await self._let_pass(process, process.load_seconds)
        process.is_loading = False
        process.touch()
        if process.refuses_weights:
            raise EngineError(f"load: {self.name} answered 500: no space left")
        if not process.ignores_weights:
            process.weights = int(folder.name)

    async def set_policy_version(self, version: int) -> None:
        process = self.process
        await self._reach(process, 0.005, "set version")
        if not process.ignores_version:
            process.label = version

    async def close(self) -> None:
        self.is_closed = True


class _Client:
    """Another client of a server: what is its own is the salt."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self.cache_salt: str | None = "none yet"

    def move(self, endpoint: ServerEndpoint) -> None:
        """Other processes that call it elsewhere do so without a word."""
        self.endpoint = endpoint

    def take_cache_salt(self, salt: str | None) -> None:
        self.cache_salt = salt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@dataclass(frozen=True)
class FakeUpdate:
    weights: int

    async def apply(self, server: FakeServer) -> None:
        await server.load_weights(Path(str(self.weights)))


class FakeTransfer:
    def __init__(self) -> None:
        self.is_closed = False

    async def prepare(self, version: int, weights: Mapping[str, Any]) -> FakeUpdate:
        await asyncio.sleep(0.05)
        return FakeUpdate(weights.get("number", version))

    async def close(self) -> None:
        self.is_closed = True


class World:
    """Servers, a router over them, and the loop they live in.

    With ``news_seconds`` calls are made by an engine of another process, which hears of the servers
    through a mirror that much later.
    """

    end_id = END_ID
    sample_token = staticmethod(sample_token)
    compute_logprob = staticmethod(compute_logprob)

    def __init__(
        self,
        num_servers: int,
        shares_gpu: bool = False,
        news_seconds: float | None = None,
        **config: Any,
    ) -> None:
        self.servers = [FakeServer(f"fake-{index}") for index in range(num_servers)]
        self.transfer = FakeTransfer()
        config = {"generate_timeout_seconds": 600.0, "start_timeout_seconds": 100.0, **config}
        self._config = EngineConfig(kind="vllm", max_model_len=MAX_MODEL_LEN, **config)
        self._shares_gpu = shares_gpu
        self._news_seconds = news_seconds
        self.router: Any = None
        self.engine: Any = None
        """What the calls go to."""
        self.mirror: Any = None

    @staticmethod
    def run(story: Coroutine[Any, Any, None]) -> None:
        """Plays a story; the clock is virtual."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(story)

    @property
    def num_unhealthy(self) -> int:
        return self.router.take_fault_metrics()["num_unhealthy_servers"]

    async def ask_versions(self) -> set[int]:
        """What the servers report that serve; those restarted unnoticed are noticed by it."""
        versions = set()
        for replica in self.router.replicas:
            with suppress(ServerDownError):
                versions.add(await replica.policy_version())
        return versions

    @asynccontextmanager
    async def started(self, version: int | None = 0) -> AsyncIterator[World]:
        self.router = EngineRouter(
            self.servers,
            self._config,
            model_name="fake",
            transfer=self.transfer,
            shares_gpu=self._shares_gpu,
        )
        try:
            self.engine = self.router
            if self._news_seconds is not None:
                self._add_mirror(self._news_seconds)
            await self.router.start(version)
            async with asyncio.timeout(20_000):
                yield self
        finally:
            await self.router.close()

    def _add_mirror(self, news_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        clients: Any = [_Client(server) for server in self.servers]
        self.engine = engine = MirrorEngine(
            clients,
            self._config,
            model_name="fake",
            report=lambda m: loop.call_later(news_seconds, self.mirror.receive, m),
        )
        self.mirror = self.router.add_mirror(
            lambda m: loop.call_later(news_seconds, engine.take_state, m)
        )

    async def generate(
        self, prompt: Sequence[int], max_tokens: int = 100, **sampling: Any
    ) -> Generation:
        """One checked completion."""
        session_id = sampling.pop("session_id", "")
        generation = await self.engine.generate(
            prompt, Sampling(max_tokens=max_tokens, **sampling), session_id=session_id
        )
        self.check(prompt, generation, max_tokens)
        return generation

    async def stream(
        self, prompt: Sequence[int], max_tokens: int = 100, **sampling: Any
    ) -> tuple[Generation, int]:
        """One checked completion, read along, and in how many pieces it came."""
        pieces = [
            piece
            async for piece in self.engine.stream(
                prompt, Sampling(max_tokens=max_tokens, **sampling)
            )
        ]
        generation = join_pieces(pieces)
        assert all(p.finish_reason is None for p in pieces[:-1])
        self.check(prompt, generation, max_tokens)
        return generation, len(pieces)

    def check(self, prompt: Sequence[int], generation: Generation, max_tokens: int) -> None:
        """Each token is what the weights of its version say behind the tokens before it."""
        ids, versions = generation.completion_ids, generation.versions
        logprobs = generation.rollout_logprobs
        assert len(ids) == len(logprobs) == len(versions) >= 1
        prefix = list(prompt)
        for token, logprob, version in zip(ids, logprobs, versions, strict=True):
            assert token == sample_token(prefix, version)
            assert logprob == compute_logprob(prefix, version)
            prefix.append(token)
        assert END_ID not in ids[:-1]
        assert len(prefix) <= MAX_MODEL_LEN
        if ids[-1] == END_ID:
            assert generation.finish_reason == "stop"
        else:
            assert generation.finish_reason == "length"
            assert len(ids) == min(max_tokens, MAX_MODEL_LEN - len(prompt))


def pytest_asyncio_loop_factories() -> dict[str, type[VirtualLoop]]:
    """Time is virtual in all tests here."""
    return {"virtual": VirtualLoop}


@pytest.fixture(scope="session")
def world() -> type[World]:
    """Makes worlds; with servers that have faults from the beginning, say."""
    return World


@pytest.fixture
async def w(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A world whose router has started; arguments of another one by indirect parametrization."""
    options = {"num_servers": 2, "version": 0, **getattr(request, "param", {})}
    version = options.pop("version")
    async with World(**options).started(version) as world:
        yield world
