"""One worker, as the trainer sees it: given a task, listened to, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentrl_cli.agents.runner import AgentOutcome
from agentrl_cli.errors import UserInputError, build_error
from agentrl_cli.records import Boundary, Failure
from agentrl_cli.rollout.worker_channel import Channel, ChannelError, Message
from agentrl_cli.rollout.worker_errors import (
    AgentProcessError,
    AgentRunError,
    build_process_error,
    format_tail,
)
from agentrl_cli.rollout.worker_process import AgentSpec
from agentrl_cli.tracking.client import TrackingClient

#: Between the end of a process and the word of its host.
_REPORT_SECONDS = 5.0
#: What a process has said before its end may still be on its way.
_DRAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One trajectory's work."""

    agent: AgentSpec
    row: Mapping[str, Any]
    model: str
    base_url: str
    api_key: str
    max_turns: int


class WorkerLease:
    """A worker. Its methods belong to one event loop.

    Args:
        number: what its host calls it.
        channel: to it.
        kill: has its host kill it.
        max_memory_gib: for messages.
    """

    def __init__(
        self,
        number: int,
        channel: Channel,
        kill: Callable[[int], None],
        max_memory_gib: float | None,
    ) -> None:
        self.number = number
        self.num_tasks = 0
        self.state: Literal["idle", "running", "finished", "spoilt"] = "idle"
        """``finished``: it may work again; ``spoilt``: its agent failed."""
        self.modules: list[str] = []
        """Libraries that its agents have imported besides those it began with."""
        self.on_done: Callable[[], None] | None = None
        """Called when its agent has ended, before the trajectory is judged."""
        self.end: Message | None = None
        """How it ended, as its host tells."""
        self._channel = channel
        self._kill = kill
        self._max_memory_gib = max_memory_gib
        self._ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """True when its process is no more."""
        return self._ended.is_set()

    def set_ended(self, end: Message | None) -> None:
        """Takes its host's word; None: the host itself is gone."""
        self.end = end
        self._ended.set()

    async def begin(self, modules: list[str], timeout_seconds: float) -> bool:
        """True when it is ready for work; False: it ended, or is not ready in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                if self.num_tasks == 0:
                    await self._channel.send_async({"op": "preload", "modules": modules})
                message = await self._receive()
        except (TimeoutError, OSError, ChannelError):
            await self.kill()
            return False
        except BaseException:
            self._channel.close()
            raise
        if message is None or message["op"] != "idle":
            await self.kill()
            return False
        self.state = "idle"
        return True

    async def run(self, task: AgentTask, client: TrackingClient) -> AgentOutcome:
        """What the agent ended with. Cancelled, it kills the process first.

        Raises:
            AgentRunError: the agent raised.
            AgentProcessError: the process ended before the agent.
            UserInputError: a mistake that would repeat itself in every trajectory.
        """
        self.state = "running"
        self.num_tasks += 1
        try:
            return await self._run(task, client)
        except asyncio.CancelledError:
            await self.kill()
            raise
        finally:
            if self.on_done is not None:
                self.on_done()

    async def _run(self, task: AgentTask, client: TrackingClient) -> AgentOutcome:
        try:
            await self._channel.send_async({"op": "run", **asdict(task)})
            while (message := await self._receive()) is not None:
                if message["op"] in ("done", "failed", "refused"):
                    return self._finish(message)
                await self._channel.send_async(_answer(message, client))
        except ChannelError as error:
            await self.kill()
            raise AgentProcessError(f"the agent's process was killed: {error}") from None
        except OSError:
            # It has closed its end.
            await self._wait_for_end()
        raise build_process_error(self.end, self._max_memory_gib)

    def _finish(self, message: Message) -> AgentOutcome:
        self.state = "spoilt"
        try:
            if message["op"] == "done":
                answer, returned = message["final_answer"], message["returned"]
                self.modules = [str(name) for name in message["modules"]]
                self.state = "finished"
                return AgentOutcome(final_answer=answer, returned=returned)
            error: Exception
            if message["op"] == "refused":
                error = build_error(message["error"], message["message"], UserInputError.exit_code)
            else:
                told = message["failure"]
                failure = Failure(**{**told, "boundary": Boundary(told["boundary"])})
                error = AgentRunError(failure)
        except (KeyError, TypeError, ValueError):
            text = f"a line is no message of a worker: {str(message)[:80]}"
            raise ChannelError(text) from None
        raise error

    async def _receive(self) -> Message | None:
        """The next message; None: the process has ended."""
        receiving = asyncio.ensure_future(self._channel.receive_async())
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=_DRAIN_SECONDS)
            message = receiving.result() if receiving.done() else None
        except ConnectionError:
            message = None
        finally:
            for waiting in (receiving, ending):
                waiting.cancel()
            await asyncio.gather(receiving, ending, return_exceptions=True)
        if message is None:
            await self._wait_for_end()
        return message

    async def _wait_for_end(self) -> None:
        """Waits for the host's word; a process that has only closed its channel is killed."""
        try:
            await asyncio.wait_for(self._ended.wait(), _DRAIN_SECONDS)
        except TimeoutError:
            await self.kill()

    async def retire(self, timeout_seconds: float) -> None:
        """Lets it clean up and end by itself, and kills it after a while."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._channel.send_async({"op": "end"})
                await self._ended.wait()
        except (TimeoutError, OSError):
            await self.kill()
        finally:
            self._channel.close()

    async def kill(self) -> None:
        """Has it killed, and waits for the host's word."""
        if not self._ended.is_set():
            self._kill(self.number)
            try:
                await asyncio.wait_for(self._ended.wait(), _REPORT_SECONDS)
            except TimeoutError:
                # The host is stuck or gone: nothing more is learned about this worker.
                self._ended.set()
        self._channel.close()

    def close_channel(self) -> None:
        """Lets go of the channel of a worker that is gone."""
        self._channel.close()

    def describe_late(self) -> str:
        """A clause for an agent that passed its deadline."""
        return f": its process was killed{format_tail(self.end)}"


def _answer(message: Message, client: TrackingClient) -> Message:
    """Does what a worker asks of the trajectory's client."""
    op = message["op"]
    try:
        if op == "set_reward":
            client.set_reward(message["id"], message["reward"])
        elif op == "set_final_reward":
            client.set_final_reward(message["reward"])
        elif op == "apply_reward_discount":
            client.apply_reward_discount(message["turn_discount"])
        else:
            raise ChannelError(f"a worker said {op!r}, which means nothing")
    except (KeyError, ValueError, TypeError) as error:
        text = str(error.args[0]) if error.args else str(error)
        return {"op": "error", "error": type(error).__name__, "message": text}
    return {"op": "ok"}
