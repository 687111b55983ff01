"""A cluster on a clock of its own: a discrete-event simulation around the real StepPlanner.

Servers whose sequences share a decoding step, rollout workers and a trainer's process that do one
thing at a time, publications that freeze servers. ``cluster_simulation`` says how large and how
fast they are. Everything is drawn from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl_cli.rollout.dataset import TaskStream
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.workflow import Attempt

#: ``one_by_one``: a group for each server, one after the other, as NcclTransfer has it;
#: ``at_once``: one broadcast to all.
Transfer = Literal["one_by_one", "at_once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What runs, and how long it takes: seconds."""

    num_servers: int
    num_workers: int
    num_seats: int
    """Sequences that a server decodes at a time."""
    step_seconds: float
    """Of a server's decoding step, without its sequences..."""
    sequence_seconds: float
    """...and for each of them."""
    prefill_seconds: float
    """For a token of a prompt."""
    call_seconds: float
    """CPU of a rollout worker for a call: agent, SDK, gateway and router."""
    trajectory_seconds: float
    """CPU of the trainer's process for a trajectory."""
    announce_seconds: float = 0.0
    """CPU of the trainer's process for a publication."""
    transfer: Transfer = "at_once"
    transfer_seconds: float = 0.0
    """Of the weights, to one server or to all at once."""
    learn_seconds: float = 0.0
    """Of a step."""
    max_concurrent: int
    """Trajectories in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be done."""

    num_groups: int
    """Of a step."""
    n_samples: int
    max_staleness: int
    max_age: int
    num_warm: int
    """Steps before those that are timed."""
    num_timed: int
    num_ahead: int
    """Rounds after the last step, so that it does not wait for the slowest."""
    first_prompt_tokens: int
    next_prompt_tokens: int
    """New ones of each further call."""
    draw_tokens: Callable[[random.Random], float]
    """Those that a call samples."""
    draw_tools: Callable[[Attempt, random.Random], list[float]]
    """Seconds of the tool after each call."""
    num_rows: int = 0
    """Of the dataset; 0: as many as are used."""

    def build_planner(self, seed: int) -> StepPlanner:
        """The real one."""
        num_rounds = self.num_warm + self.num_timed + self.num_ahead
        num_rows = self.num_rows or num_rounds * self.num_groups
        return StepPlanner(
            TaskStream([{}] * num_rows, batch_size=self.num_groups, shuffle=True, seed=seed),
            n_samples=self.n_samples,
            max_staleness=self.max_staleness,
            max_trajectory_age=self.max_age,
            first_step=1,
            last_step=num_rounds,
        )


@dataclass(slots=True, eq=False)
class _Run:
    """A trajectory in progress."""

    attempt: Attempt
    worker: _Worker
    tools: list[float]
    server: _Server | None = None
    context: float = 0.0
    versions: list[int] = field(default_factory=list)


class _Worker:
    """A rollout worker: one interpreter, and its own view of the servers."""

    def __init__(self, num_servers: int) -> None:
        self.free_at = self.busy = 0.0
        self.num_running = 0
        self._running = [0] * num_servers
        self._calls = [0] * num_servers
        self._order = [(0, 0, number) for number in range(num_servers)]

    def choose(self) -> int:
        """As the router does: the server with the fewest of this worker's calls."""
        while True:
            running, calls, number = self._order[0]
            if (running, calls) == (self._running[number], self._calls[number]):
                return number
            heapq.heappop(self._order)

    def count(self, number: int, change: Literal[1, -1]) -> None:
        """A call begins or ends."""
        self._running[number] += change
        self._calls[number] += change > 0
        heapq.heappush(self._order, (self._running[number], self._calls[number], number))


class _Server:
    """Sequences that advance together, by one token a step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.version = 0
        self.waiting: deque[tuple[float, _Run]] = deque()
        self.running: list[tuple[float, int, _Run]] = []
        """By the number of the server's step in which they end."""
        self.clock = 0.0
        """Until when it is simulated: ahead of the others while it prefills or is frozen."""
        self.steps = 0.0
        self.epoch = 0
        self.context = 0.0
        self.idle = self.frozen = self.tokens = self.seats = 0.0
        self.most_running = 0


class Simulation:
    """One run. ``taken``: the steps, each the ids of its trajectories; ``started``: all ids."""

    def __init__(self, cluster: Cluster, work: Workload, seed: int) -> None:
        self.cluster, self.work = cluster, work
        self.now = 0.0
        self.taken: list[list[str]] = []
        self.started: list[str] = []
        self.ages: list[int] = []
        """Of calls of the timed steps: weight updates from a call's start to its step."""
        self.servers = [_Server(number) for number in range(cluster.num_servers)]
        self._chance = random.Random(seed)
        self._workers = [_Worker(cluster.num_servers) for _ in range(cluster.num_workers)]
        self._runs: dict[str, _Run] = {}
        self._num_running = 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._is_learning = False
        self._trainer_free_at = self._trainer_busy = 0.0
        self._marks: list[dict[str, float]] = []
        self._num_steps = work.num_warm + work.num_timed
        self.planner = work.build_planner(seed)

    def run(self) -> Result:
        """Simulates until the last timed step is taken."""
        self._published(0)
        while len(self.taken) < self._num_steps:
            self.now, _, happen, what = heapq.heappop(self._events)
            happen(what)
        first, last = self._marks[-1 - self.work.num_timed], self._marks[-1]
        spent = {name: last[name] - first[name] for name in last}
        seconds, num_servers = spent["now"], self.cluster.num_servers
        return Result(
            trajectories=self.work.num_groups * self.work.n_samples * self.work.num_timed / seconds,
            sampled=spent["tokens"] / seconds,
            idle=spent["idle"] / seconds / num_servers,
            frozen=spent["frozen"] / seconds / num_servers,
            seats=spent["seats"] / seconds / num_servers,
            trainer=spent["trainer"] / seconds,
            workers=spent["workers"] / seconds / self.cluster.num_workers,
            learning=self.cluster.learn_seconds * self.work.num_timed / seconds,
            mean_age=statistics.fmean(self.ages),
            max_age=max(self.ages),
        )

    def _at(self, when: float, happen: Callable[[Any], None], what: Any = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen, what))

    # -- the trainer's process -------------------------------------------------------------

    def _occupy_trainer(self, seconds: float) -> float:
        self._trainer_free_at = max(self.now, self._trainer_free_at) + seconds
        self._trainer_busy += seconds
        return self._trainer_free_at

    def _published(self, version: int) -> None:
        self.planner.publish(version)
        self._is_learning = False
        self._go_on()

    def _go_on(self) -> None:
        """Starts what may start, and takes the next step if it is there."""
        while self._num_running < self.cluster.max_concurrent:
            attempt = self.planner.start()
            if attempt is None:
                break
            self._num_running += 1
            worker = min(self._workers, key=lambda one: one.num_running)
            worker.num_running += 1
            run = _Run(attempt, worker, self.work.draw_tools(attempt, self._chance)[::-1])
            self._runs[attempt.id] = run
            self.started.append(attempt.id)
            self._call(run)
        if self._is_learning or len(self.taken) == self._num_steps:
            return
        step = self.planner.next_step
        trajectories = self.planner.take_step()
        if trajectories is None:
            return
        self.taken.append([t.id for t in trajectories])
        ages = [step - 1 - v for one in self.taken[-1] for v in self._runs.pop(one).versions]
        if step > self.work.num_warm:
            self.ages += ages
        self._mark()
        self._is_learning = True
        self._at(self.now + self.cluster.learn_seconds, self._learned, step)

    def _learned(self, version: int) -> None:
        """Publishes: all servers are frozen at once, and each until it has its weights."""
        self._at(self._occupy_trainer(self.cluster.announce_seconds), self._transfer, version)

    def _transfer(self, version: int) -> None:
        last = self.now
        for number, server in enumerate(self.servers, start=1):
            seconds = self.cluster.transfer_seconds
            if self.cluster.transfer == "one_by_one":
                seconds *= number
            self._advance(server)
            # What frozen calls had computed is computed again.
            refill = server.context * self.cluster.prefill_seconds
            server.frozen += seconds + refill
            server.clock = max(server.clock, self.now + seconds) + refill
            server.version = version
            last = max(last, self.now + seconds)
            self._schedule(server)
        self._at(last, self._published, version)

    def _end(self, run: _Run) -> None:
        attempt = run.attempt
        # Different in a group, so that there is something to learn.
        self.planner.finish(attempt.begin_trajectory(reward=float(attempt.sample_index % 2)))
        self._num_running -= 1
        run.worker.num_running -= 1
        self._go_on()

    def _mark(self) -> None:
        """Notes what was spent until now."""
        for server in self.servers:
            self._advance(server)
        names = ("idle", "frozen", "tokens", "seats")
        mark = {name: math.fsum(getattr(s, name) for s in self.servers) for name in names}
        mark["now"] = self.now
        # What is still before them was counted when it was given to them.
        mark["trainer"] = self._trainer_busy - max(0.0, self._trainer_free_at - self.now)
        mark["workers"] = math.fsum(w.busy - max(0.0, w.free_at - self.now) for w in self._workers)
        self._marks.append(mark)

    # -- rollout workers and servers -------------------------------------------------------

    def _call(self, run: _Run) -> None:
        worker = run.worker
        worker.free_at = max(self.now, worker.free_at) + self.cluster.call_seconds
        worker.busy += self.cluster.call_seconds
        self._at(worker.free_at, self._arrive, run)

    def _arrive(self, run: _Run) -> None:
        if run.server is None:
            run.server = self.servers[run.worker.choose()]
        run.worker.count(run.server.number, 1)
        server = run.server
        self._advance(server)
        tokens = self.work.draw_tokens(self._chance)
        if len(server.running) < self.cluster.num_seats:
            self._start(server, tokens, run)
            self._schedule(server)
        else:
            server.waiting.append((tokens, run))

    def _start(self, server: _Server, tokens: float, run: _Run) -> None:
        is_first = not run.versions
        num_new = self.work.first_prompt_tokens if is_first else self.work.next_prompt_tokens
        run.versions.append(server.version)
        run.context += num_new + tokens
        server.context += run.context
        server.clock += num_new * self.cluster.prefill_seconds
        server.tokens += tokens
        heapq.heappush(server.running, (server.steps + tokens, next(self._order), run))
        server.most_running = max(server.most_running, len(server.running))

    def _step_seconds(self, server: _Server) -> float:
        return self.cluster.step_seconds + len(server.running) * self.cluster.sequence_seconds

    def _advance(self, server: _Server) -> None:
        """Simulates a server until now, where it is not ahead of that; before any change to it."""
        seconds = self.now - server.clock
        if seconds <= 0:
            return
        if not server.running:
            server.idle += seconds
        elif (step_seconds := self._step_seconds(server)) > 0:
            server.steps += seconds / step_seconds
            server.seats += seconds * len(server.running) / self.cluster.num_seats
        server.clock = self.now

    def _schedule(self, server: _Server) -> None:
        """Says when the next sequence ends, if nothing changes before."""
        server.epoch += 1
        if server.running:
            left = max(0.0, server.running[0][0] - server.steps)
            when = server.clock + left * self._step_seconds(server)
            self._at(when, self._decoded, (server, server.epoch))

    def _decoded(self, what: tuple[_Server, int]) -> None:
        server, epoch = what
        if epoch != server.epoch:
            return
        self._advance(server)
        server.steps, _, run = heapq.heappop(server.running)
        server.context -= run.context
        if server.waiting:
            self._start(server, *server.waiting.popleft())
        self._schedule(server)
        run.worker.count(server.number, -1)
        then = self.now + run.tools.pop()
        if run.tools:
            self._at(then, self._call, run)
        else:
            self._at(then, self._hand_over, run)

    def _hand_over(self, run: _Run) -> None:
        self._at(self._occupy_trainer(self.cluster.trajectory_seconds), self._end, run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a simulation showed of its timed steps; shares of their time."""

    trajectories: float
    """A second, trained on."""
    sampled: float
    """Tokens a second."""
    idle: float
    """Of a server, without a sequence; what is frozen is not in it."""
    frozen: float
    """Of a server, in publications: until it has the weights, and has computed again what it had
    computed of the calls that it froze."""
    seats: float
    """Of the servers, that decode."""
    trainer: float
    """Of the trainer's process, in rollout's and publication's Python."""
    workers: float
    learning: float
    """Of the trainer's GPUs."""
    mean_age: float
    """Of a call, in weight updates from its start to its step."""
    max_age: int
