"""What trajectories and publications cost the trainer's process: the constants of the simulation.

    python -m benchmarks.cluster_costs

Measures the real parts and writes docs/results/cluster-costs.json, which ``cluster_simulation``
reads, so that its results depend on nothing but this record and a seed. CPU times are the minimum
of some rounds, as other programs only ever add to them.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import ServerEndpoint, WeightUpdate
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.router.server_mirror import ServerMirror
from agentrl_cli.process_channel import Message, encode_message
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.rollout.dataset import TaskStream
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_record import format_record, parse_record
from benchmarks.growth import build_config, rename

_RECORD = Path("docs/results/cluster-costs.json")
_ROUNDS = 3
_NUM_STORED = 64
_VOCABULARY = 150_000

#: What an agent does: calls of the model, and tokens of each (the prompt's are those that are new).
NUM_CALLS, COMPLETION_TOKENS, FIRST_PROMPT_TOKENS, NEXT_PROMPT_TOKENS = 3, 600, 500, 200
SAMPLED_TOKENS = NUM_CALLS * COMPLETION_TOKENS
TRAJECTORY_TOKENS = FIRST_PROMPT_TOKENS + (NUM_CALLS - 1) * NEXT_PROMPT_TOKENS + SAMPLED_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured; CPU seconds of one core, bytes of one trajectory."""

    plan_seconds: float
    """The planner's part of a trajectory: its start, its end, its share of a step."""
    receive_seconds: float
    """Reading the record that a rollout worker sends."""
    keep_seconds: float
    """Writing it to the pending file."""
    write_seconds: float
    """Its share of a step's Parquet file."""
    record_bytes: float
    """As it is sent, and kept as pending."""
    parquet_bytes: float
    announce_seconds: float
    """Of a publication, for each pair of servers and each rollout worker: every server's state
    changes twice, and each change sends the state of all servers to every worker."""

    @property
    def trainer_seconds(self) -> float:
        """What a trajectory costs the trainer's process in all."""
        return self.plan_seconds + self.receive_seconds + self.keep_seconds + self.write_seconds

    @classmethod
    def load(cls, path: Path = _RECORD) -> Self:
        """The record that is committed."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def build_trajectory(chance: random.Random) -> Trajectory:
    """A trajectory of random tokens, which compress as little as a real one's logprobs."""
    interactions: list[Interaction] = []
    ids: list[int] = []
    messages: list[dict[str, Any]] = []
    for number in range(NUM_CALLS):
        num_new = NEXT_PROMPT_TOKENS if number else FIRST_PROMPT_TOKENS
        ids += [chance.randrange(_VOCABULARY) for _ in range(num_new)]
        messages.append({"role": "user", "content": _say(chance, num_new)})
        completion = [chance.randrange(_VOCABULARY) for _ in range(COMPLETION_TOKENS)]
        reply = {"role": "assistant", "content": _say(chance, COMPLETION_TOKENS)}
        interactions.append(
            Interaction(
                id=f"chatcmpl-{chance.getrandbits(96):024x}",
                parent_id=interactions[-1].id if interactions else None,
                extends_parent=bool(interactions),
                messages=tuple(messages),
                reply=reply,
                prompt_ids=tuple(ids),
                completion_ids=tuple(completion),
                rollout_logprobs=tuple(-chance.expovariate(2.0) for _ in completion),
                versions=(7,) * COMPLETION_TOKENS,
                finish_reason="stop",
            )
        )
        ids += completion
        messages.append(reply)
    return Trajectory(
        id="000001.000/0",
        group_id="000001.000",
        task_id="0",
        step=1,
        task={"question": messages[0]["content"]},
        interactions=tuple(interactions),
        reward=1.0,
    )


def _say(chance: random.Random, num_tokens: int) -> str:
    """Text of about so many tokens: a word to a token."""
    return " ".join(f"{chance.getrandbits(18):x}" for _ in range(num_tokens))


def measure_planning(num_groups: int = 512, n_samples: int = 8, num_steps: int = 4) -> float:
    """CPU seconds of the planner for a trajectory, with steps of 4,096."""
    planner = StepPlanner(
        TaskStream([{}] * 50_000, batch_size=num_groups, shuffle=True, seed=1),
        n_samples=n_samples,
        max_staleness=2,
        max_trajectory_age=8,
        first_step=1,
        last_step=num_steps,
    )
    started = time.process_time()
    for step in range(1, num_steps + 1):
        planner.publish(step - 1)
        while (attempt := planner.start()) is not None:
            planner.finish(attempt.begin_trajectory(reward=float(attempt.sample_index % 2)))
            planner.take_step()
    return (time.process_time() - started) / (num_groups * n_samples * num_steps)


def measure_storing(made: list[Trajectory]) -> dict[str, float]:
    """Seconds and bytes of a trajectory that arrives, is kept, and is written with its step."""
    records = [format_record(trajectory) for trajectory in made]
    receive = _time(lambda: [parse_record(record) for record in records]) / len(made)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.create_or_resume(build_config(Path(path)))

        def keep() -> None:
            for trajectory in made:
                folder.add_pending(trajectory)
            folder.flush()

        def write() -> None:
            folder.write_trajectories(1, made)
            folder.flush()

        kept, written = _time(keep) / len(made), _time(write) / len(made)
        parquet = sum(p.stat().st_size for p in (folder.path / "trajectories").iterdir())
        folder.close()
    return {
        "receive_seconds": receive,
        "keep_seconds": kept,
        "write_seconds": written,
        "record_bytes": sum(map(len, records)) / len(made),
        "parquet_bytes": parquet / len(made),
    }


def _time(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


class _Server:
    """A server that takes weights at once."""

    cache_salt = "0" * 32

    def __init__(self, number: int) -> None:
        self.name = f"server-{number}"
        self.endpoint = ServerEndpoint(
            name=self.name, base_url=f"http://10.0.0.1:{number}", api_key="none"
        )
        self._version = 0

    async def check_health(self) -> int:
        return self._version

    async def policy_version(self) -> int:
        return self._version

    async def set_policy_version(self, version: int) -> None:
        self._version = version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class _NoTransfer:
    """There are no weights: the router's own work is left."""

    async def prepare(self, version: int, weights: object) -> WeightUpdate:
        async def apply(server: object) -> None: ...

        return WeightUpdate(version, apply)

    async def close(self) -> None: ...


async def measure_publication(num_servers: int, num_workers: int) -> float:
    """CPU seconds of the trainer's router for one publication; what workers do is not in it."""
    servers = [_Server(number) for number in range(num_servers)]
    router = EngineRouter(
        servers,  # type: ignore[arg-type]
        EngineConfig(kind="vllm"),
        model_name="none",
        transfer=_NoTransfer(),
    )
    await router.start(0)
    loop = asyncio.get_running_loop()

    def connect() -> None:
        mirror: list[ServerMirror] = []

        def send(message: Message) -> None:
            encode_message(message)
            seen = {"op": "seen", "number": message["number"]}
            loop.call_soon(lambda: mirror[0].receive(seen))

        mirror.append(router.add_mirror(send))

    for _ in range(num_workers):
        connect()
    await asyncio.sleep(0)
    started = time.process_time()
    await router.publish_weights(1, {})
    spent = time.process_time() - started
    await router.close()
    return spent


def measure() -> Costs:
    """All of them."""
    chance = random.Random(1)
    made = [rename(build_trajectory(chance), 1, number) for number in range(_NUM_STORED)]
    stored = [measure_storing(made) for _ in range(_ROUNDS)]
    num_servers, num_workers = 128, 16
    alone = min(asyncio.run(measure_publication(num_servers, 0)) for _ in range(_ROUNDS))
    told = min(asyncio.run(measure_publication(num_servers, num_workers)) for _ in range(_ROUNDS))
    return Costs(
        plan_seconds=min(measure_planning() for _ in range(_ROUNDS)),
        announce_seconds=(told - alone) / (num_servers**2 * num_workers),
        **{name: min(one[name] for one in stored) for name in stored[0]},
    )


def main() -> None:
    """Measures and writes the record."""
    costs = {name: float(f"{value:.3g}") for name, value in asdict(measure()).items()}
    _RECORD.write_text(json.dumps(costs, indent=2) + "\n", encoding="utf-8")
    print(_RECORD.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
