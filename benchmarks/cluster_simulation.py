"""How throughput grows with up to 1,000 engine servers, and what ends the growth: a simulation.

    python -m benchmarks.cluster_simulation [--seed N]
    python -m benchmarks.cluster_simulation --arithmetic

Simulates clusters of many sizes (``cluster_model``) with what was measured here (``cluster_costs``)
and what others say of GPUs, prints the tables and writes docs/results/cluster-simulation.md: the same
from the same seed and record. ``--arithmetic`` prints the table of docs/scaling.md instead, and
simulates nothing.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl_cli.rollout.workflow import Attempt
from benchmarks import cluster_costs as agent
from benchmarks.cluster_costs import Costs
from benchmarks.cluster_model import Cluster, Result, Simulation, Workload
from benchmarks.longtail import draw_delays

_PAGE = Path("docs/results/cluster-simulation.md")
_NUM_SERVERS = (1, 8, 64, 256, 1000)
_NUM_GPUS = (8, 64, 512, 4096)

# Theirs: NVIDIA's data sheet of the H100 SXM, and of the DGX H100, which has a port for each GPU.
_MEMORY_BYTES_PER_SECOND, _FLOPS, _PORT_BYTES_PER_SECOND = 3.35e12, 989e12, 50e9
# Theirs: the model card and configuration of Qwen2.5-7B.
_PARAMETERS, _CACHE_BYTES_PER_TOKEN = 7.62e9, 28 * 2 * 4 * 128 * 2
_WEIGHT_BYTES = 2 * _PARAMETERS
# Theirs: FSx for Lustre gives 1 GB/s for each TiB; this is one of 100 TiB.
_STORAGE_BYTES_PER_SECOND = 100e9
# Assumed: shares of those limits that kernels reach. Llama 3's paper says 38 to 43 % of training.
_MEMORY_SHARE, _PREFILL_SHARE, _TRAINING_SHARE = 0.6, 0.5, 0.4
#: For a token: 6 operations a parameter to learn from it, 2 to score it before.
_LEARN_SECONDS_PER_TOKEN = 8 * _PARAMETERS / (_TRAINING_SHARE * _FLOPS)

# Measured here: docs/results/benchmarks.md, "Rollout workers" (1 worker: 17.1 ms for three calls of
# 24 tokens), and `vllm_serving --parts null`: 2.81 ms a call with 12 to 36 tokens, 3.78 ms with
# `--new-tokens 180 220`, in the same hour.
_SHORT_CALL_SECONDS, _CPU_SECONDS_PER_TOKEN = 0.0171 / 3, (3.78e-3 - 2.81e-3) / (200 - 24)

_SEATS, _GROUPS_PER_SERVER, _N_SAMPLES, _SERVERS_PER_WORKER = 32, 2, 8, 8
_TRAJECTORIES_PER_SERVER = _GROUPS_PER_SERVER * _N_SAMPLES
_MAX_STALENESS, _MAX_AGE = 2, 8
_AS_IT_IS, _ONE_PUBLICATION, _NO_RECORDS = range(3)
_VARIANTS = (
    "As it is, with weights over NCCL",
    "With one broadcast and one announcement a publication",
    "And with records that rollout workers store themselves",
)


def build_cluster(num_servers: int, costs: Costs, variant: int = _AS_IT_IS) -> Cluster:
    """A server and a trainer's rank on a GPU each, and a rollout worker for eight servers."""
    num_workers = math.ceil(num_servers / _SERVERS_PER_WORKER)
    bytes_per_second = _MEMORY_SHARE * _MEMORY_BYTES_PER_SECOND
    call_seconds = _SHORT_CALL_SECONDS + agent.COMPLETION_TOKENS * _CPU_SECONDS_PER_TOKEN
    announce_seconds = costs.announce_seconds * num_servers**2 * num_workers
    num_tokens = num_servers * _TRAJECTORIES_PER_SERVER * agent.TRAJECTORY_TOKENS
    stored = costs.trainer_seconds - costs.plan_seconds
    is_apart = variant == _NO_RECORDS
    return Cluster(
        num_servers=num_servers,
        num_workers=num_workers,
        num_seats=_SEATS,
        step_seconds=_WEIGHT_BYTES / bytes_per_second,
        sequence_seconds=agent.TRAJECTORY_TOKENS / 2 * _CACHE_BYTES_PER_TOKEN / bytes_per_second,
        prefill_seconds=2 * _PARAMETERS / (_PREFILL_SHARE * _FLOPS),
        call_seconds=call_seconds + (stored / agent.NUM_CALLS if is_apart else 0.0),
        trajectory_seconds=costs.plan_seconds if is_apart else costs.trainer_seconds,
        # Of an announcement instead of two for each server.
        announce_seconds=announce_seconds / (1 if variant == _AS_IT_IS else 2 * num_servers),
        transfer="one_by_one" if variant == _AS_IT_IS else "at_once",
        transfer_seconds=_WEIGHT_BYTES / _PORT_BYTES_PER_SECOND,
        learn_seconds=num_tokens * _LEARN_SECONDS_PER_TOKEN / num_servers,
        max_concurrent=math.ceil(1.2 * _SEATS * num_servers),
    )


def build_workload(num_servers: int) -> Workload:
    """Steps that grow with the servers; tools as slow as those of the benchmark ``longtail``."""
    # A logarithm's deviation of 0.6, and the mean that the costs were measured with.
    location = math.log(agent.COMPLETION_TOKENS) - 0.6**2 / 2
    return Workload(
        num_groups=_GROUPS_PER_SERVER * num_servers,
        n_samples=_N_SAMPLES,
        max_staleness=_MAX_STALENESS,
        max_age=_MAX_AGE,
        num_warm=2,
        num_timed=20 if num_servers < 64 else 4,
        num_ahead=_MAX_STALENESS,
        first_prompt_tokens=agent.FIRST_PROMPT_TOKENS,
        next_prompt_tokens=agent.NEXT_PROMPT_TOKENS,
        draw_tokens=lambda chance: chance.lognormvariate(location, 0.6),
        draw_tools=lambda attempt: draw_delays(attempt.id),
    )


# -- runs that were measured -----------------------------------------------------------------

_NO_TIME = Cluster(
    num_servers=1,
    num_workers=1,
    num_seats=256,
    step_seconds=0.0,
    sequence_seconds=0.0,
    prefill_seconds=0.0,
    call_seconds=0.0,
    trajectory_seconds=0.0,
    max_concurrent=256,
)


def simulate_longtail(max_staleness: int, cluster: Cluster) -> float:
    """Seconds a step of ``benchmarks.longtail``, with the same tasks and the same slow tools."""
    attempts = Counter[str]()

    def draw_tools(attempt: Attempt) -> list[float]:
        question = f"Say {attempt.task.task_id}."
        attempts[question] += 1
        return draw_delays(f"{question} {attempts[question]}")

    work = Workload(
        num_groups=8,
        n_samples=4,
        max_staleness=max_staleness,
        max_age=8,
        num_warm=1,
        num_timed=10,
        num_ahead=4,
        first_prompt_tokens=0,
        next_prompt_tokens=0,
        draw_tokens=lambda _: 16,
        draw_tools=draw_tools,
        num_rows=400,
    )
    return 8 * 4 / Simulation(cluster, work, 1).run().trajectories


def simulate_workers(num_workers: int, cpu_seconds: float, trainer_seconds: float) -> float:
    """Trajectories a second of ``benchmarks.rollout_workers``."""
    cluster = replace(
        _NO_TIME,
        num_workers=num_workers,
        call_seconds=cpu_seconds / 3,
        trajectory_seconds=trainer_seconds,
        max_concurrent=32,
    )
    work = Workload(
        num_groups=200,
        n_samples=1,
        max_staleness=0,
        max_age=0,
        num_warm=1,
        num_timed=5,
        num_ahead=0,
        first_prompt_tokens=0,
        next_prompt_tokens=0,
        draw_tokens=lambda _: 24,
        draw_tools=lambda _: [0.0] * 3,
    )
    return Simulation(cluster, work, 1).run().trajectories


def format_validation() -> str:
    """What the pages of results hold beside what is simulated of the same runs."""
    # CPU of a call with AsyncOpenAI in process, from "The gateway beside the bare engine"; the
    # trainer sleeps, or learns as long as the picture shows; vLLM with a tiny model at 64 and 256
    # sessions, from "Serving through gateway and router".
    null = replace(_NO_TIME, call_seconds=1.6e-3, learn_seconds=0.5)
    at_64, at_256 = 64 / (163 * 24), 256 / (238 * 24)
    each = (at_256 - at_64) / (256 - 64)
    vllm = replace(null, step_seconds=at_64 - 64 * each, sequence_seconds=each, learn_seconds=0.52)
    rows = [
        *(
            (f"slow tools, {name}, `max_staleness` {staleness}", "s a step", measured, simulated)
            for name, cluster, found in (
                ("no engine", null, {0: 11.05, 1: 2.27, 2: 1.64, 4: 2.33}),
                ("one vLLM server", vllm, {0: 11.19, 1: 2.85, 2: 1.79, 4: 1.25}),
            )
            for staleness, measured in found.items()
            for simulated in [simulate_longtail(staleness, cluster)]
        ),
        ("1 rollout worker", "trajectories/s", 59.3, simulate_workers(1, 0.0171, 0.0004)),
        ("2 rollout workers", "trajectories/s", 111.7, simulate_workers(2, 0.0159, 0.0006)),
    ]
    lines = ["| run | unit | measured | simulated | ratio |", "|---|---|---|---|---|"]
    for name, unit, measured, simulated in rows:
        ratio = simulated / measured
        lines.append(f"| {name} | {unit} | {measured} | {simulated:.2f} | {ratio:.2f} |")
    return "\n".join(lines)
