"""How throughput grows with up to 1,000 engine servers, and what ends the growth: a simulation.

    python -m benchmarks.cluster_simulation [--seed N]
    python -m benchmarks.cluster_simulation --arithmetic

Simulates clusters of many sizes (``cluster_model``) with what was measured here
(``cluster_costs``) and what others say of GPUs, prints the tables and writes
docs/results/cluster-simulation.md: the same from the same seed and record. ``--arithmetic`` prints
the table of docs/scaling.md instead, and simulates nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
from collections import Counter
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

_SEATS, _GROUPS_PER_SERVER, _N_SAMPLES, _SERVERS_PER_WORKER = 32, 3, 8, 8
_TRAJECTORIES_PER_SERVER = _GROUPS_PER_SERVER * _N_SAMPLES
_MAX_STALENESS, _MAX_AGE = 2, 8
#: Of a tool's seconds: median 0.2, p99 5, as in the benchmark ``longtail``.
_TOOL = math.log(0.2), math.log(5 / 0.2) / statistics.NormalDist().inv_cdf(0.99)
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
        num_timed={1: 40, 8: 20, 64: 6, 256: 4}.get(num_servers, 2),
        num_ahead=_MAX_STALENESS,
        first_prompt_tokens=agent.FIRST_PROMPT_TOKENS,
        next_prompt_tokens=agent.NEXT_PROMPT_TOKENS,
        draw_tokens=lambda chance: chance.lognormvariate(location, 0.6),
        draw_tools=lambda _, chance: [chance.lognormvariate(*_TOOL) for _ in range(3)],
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

    def draw_tools(attempt: Attempt, _: random.Random) -> list[float]:
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
        draw_tools=lambda *_: [0.0] * 3,
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


# -- tables ------------------------------------------------------------------------------------


def format_table(results: dict[int, Result]) -> str:
    """What servers of each number did, and how far from one server's share each is."""
    lines = [
        "| servers | trajectories/s | of linear | tokens/s sampled | trained | seats in use "
        "| frozen | idle | trainer's process | workers | learning | age: mean | largest |",
        "|" + "---|" * 13,
    ]
    one = next(iter(results.values())).trajectories
    for num_servers, r in results.items():
        shares = (r.seats, r.frozen, r.idle, r.trainer, r.workers, r.learning)
        cells = [
            f"{num_servers:,}",
            f"{r.trajectories:,.1f}",
            f"{r.trajectories / one / num_servers:.2f}",
            f"{r.sampled:,.0f}",
            f"{r.trajectories * agent.TRAJECTORY_TOKENS:,.0f}",
            *(f"{100 * share:.0f} %" for share in shares),
            f"{r.mean_age:.1f}",
            str(r.max_age),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def name_bottleneck(results: dict[int, Result]) -> str:
    """Where less than 0.8 of linear growth is left, and what is busiest there."""
    one = next(iter(results.values())).trajectories
    for num_servers, r in results.items():
        if r.trajectories / one / num_servers < 0.8:
            busy = {
                "the freeze of servers by publications": r.frozen,
                "the trainer's process, one interpreter": r.trainer,
                "the rollout workers": r.workers,
                "the trainer's GPUs": r.learning,
            }
            name = max(busy, key=lambda one: busy[one])
            return (
                f"At {num_servers:,} servers less than 0.8 of linear growth is left; busiest is "
                f"{name}."
            )
    return "At all sizes at least 0.8 of linear growth is left."


def format_arithmetic(costs: Costs) -> str:
    """The table of docs/scaling.md: what a cluster needs whose servers are always busy."""
    columns = []
    for num_gpus in _NUM_GPUS:
        cluster = build_cluster(num_gpus // 2, costs)
        pair = f"{cluster.num_servers:,}"
        seat_seconds = cluster.step_seconds + _SEATS * cluster.sequence_seconds
        num_new = agent.TRAJECTORY_TOKENS - agent.SAMPLED_TOKENS
        spent = agent.SAMPLED_TOKENS * seat_seconds / _SEATS + num_new * cluster.prefill_seconds
        rate = cluster.num_servers / spent
        num_trajectories = cluster.num_servers * _TRAJECTORIES_PER_SERVER
        learned = agent.TRAJECTORY_TOKENS * _LEARN_SECONDS_PER_TOKEN * rate / cluster.num_servers
        columns.append(
            {
                "engine servers, trainer ranks": f"{pair}, {pair}",
                "rollout workers": f"{cluster.num_workers:,}",
                "tokens/s sampled": f"{rate * agent.SAMPLED_TOKENS:,.0f}",
                "tokens/s trained": f"{rate * agent.TRAJECTORY_TOKENS:,.0f}",
                "trainer's GPUs, busy": f"{100 * learned:.0f} %",
                "trajectories of a step": f"{num_trajectories:,}",
                "trajectories/s": f"{rate:,.1f}",
                "seconds from step to step": f"{num_trajectories / rate:.1f}",
                "weights, NCCL, one server after another": _format_seconds(
                    cluster.num_servers * cluster.transfer_seconds
                ),
                "weights, one broadcast": _format_seconds(cluster.transfer_seconds),
                "weights, shared storage": _format_seconds(
                    _WEIGHT_BYTES / _PORT_BYTES_PER_SECOND
                    + cluster.num_servers * _WEIGHT_BYTES / _STORAGE_BYTES_PER_SECOND
                ),
                "announcements of a publication, CPU": _format_seconds(cluster.announce_seconds),
                "trainer's process, cores for trajectories": f"{rate * costs.trainer_seconds:.2f}",
                "of which admission": f"{rate * costs.plan_seconds:.3f}",
                "agents and gateways, cores": f"{rate * 3 * cluster.call_seconds:.1f}",
                "records to the trainer, MB/s": f"{rate * costs.record_bytes / 1e6:,.1f}",
                "store: trajectories appended/s": f"{rate:,.0f}",
                "store: Parquet, MB/s": f"{rate * costs.parquet_bytes / 1e6:,.1f}",
                "store: Parquet, GB a day": f"{rate * costs.parquet_bytes * 86400 / 1e9:,.0f}",
            }
        )
    head = [f"| GPUs | {' | '.join(f'{n:,}' for n in _NUM_GPUS)} |", "|---" * 5 + "|"]
    rows = [f"| {name} | {' | '.join(c[name] for c in columns)} |" for name in columns[0]]
    return "\n".join([*head, *rows])


def _format_seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def format_page(seed: int) -> str:
    """The page of results."""
    costs = Costs.load()
    parts = [_HEAD.format(seed=seed, validation=format_validation(), costs=format_costs(costs))]
    for variant, name in enumerate(_VARIANTS):
        results = {}
        for num_servers in _NUM_SERVERS:
            cluster = build_cluster(num_servers, costs, variant)
            results[num_servers] = Simulation(cluster, build_workload(num_servers), seed).run()
        parts.append(f"### {name}\n\n{format_table(results)}\n\n{name_bottleneck(results)}\n")
    return "\n".join(parts)


def format_costs(costs: Costs) -> str:
    """Every constant, and where it comes from."""
    cluster, tokens = build_cluster(1, costs), agent.TRAJECTORY_TOKENS

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.3g} ms"

    def size(num_bytes: float) -> str:
        return f"{num_bytes / 1e3:.0f} kB, {num_bytes / tokens:.0f} bytes a token"

    rows = {
        "decoding step": (
            ms(cluster.step_seconds),
            "the weights' 15.2 GB (Qwen2.5-7B, bfloat16) at 60 % of an H100's 3.35 TB/s",
        ),
        "and for each sequence": (
            ms(cluster.sequence_seconds),
            "its cache, half a trajectory of 57,344 bytes a token, likewise",
        ),
        "prefill of a token": (
            ms(cluster.prefill_seconds),
            "2 operations a parameter at 50 % of 989 TFLOP/s",
        ),
        "learning from a token, one GPU": (
            ms(_LEARN_SECONDS_PER_TOKEN),
            "8 operations a parameter at 40 % of them, as Llama 3's paper reports",
        ),
        "weights to a server": (
            ms(cluster.transfer_seconds),
            "a port of 400 Gb/s for each GPU, as a DGX H100 has",
        ),
        "call: agent, SDK, gateway, router": (
            ms(cluster.call_seconds),
            'here: [benchmarks.md](benchmarks.md), "Rollout workers", and what a token adds in '
            "`vllm_serving --parts null --new-tokens 180 220`",
        ),
        "trajectory: planner": (ms(costs.plan_seconds), "here: `cluster_costs`"),
        "trajectory: reading its record": (ms(costs.receive_seconds), "here"),
        "trajectory: the pending file": (ms(costs.keep_seconds), "here"),
        "trajectory: its step's Parquet": (ms(costs.write_seconds), "here"),
        "trajectory: its record": (size(costs.record_bytes), "here"),
        "trajectory: in Parquet": (size(costs.parquet_bytes), "here"),
        "announcements of a publication": (
            f"{1e6 * costs.announce_seconds:.3g} µs × servers² × workers",
            "here: the real router with 128 servers that do nothing, and 16 workers",
        ),
    }
    lines = ["| what | constant | source |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {name} | {value} | {source} |" for name, (value, source) in rows.items())]
    )


_HEAD = f"""# A cluster, simulated

Made by `python -m benchmarks.cluster_simulation --seed {{seed}}`. **No cluster and no GPU was
used.** A discrete-event simulation around the real `StepPlanner`: an agent of {agent.NUM_CALLS}
calls of {agent.COMPLETION_TOKENS} sampled tokens (log-normal), {agent.TRAJECTORY_TOKENS:,} tokens
with its prompts, after each call a tool (median 0.2 s, p99 5 s); servers of one H100 and {_SEATS}
seats with a model of 7.6 billion parameters; for each server a trainer's GPU and
{_TRAJECTORIES_PER_SERVER} trajectories of a step, so that steps grow with the cluster; a rollout
worker for {_SERVERS_PER_WORKER} servers, groups of {_N_SAMPLES}, `max_staleness` {_MAX_STALENESS},
`max_trajectory_age` {_MAX_AGE}.

## Against runs that were measured

The same simulation with the constants of those runs: [longtail.md](longtail.md) with its own tasks
and its own slow tools, and [benchmarks.md](benchmarks.md). The vLLM server has the rates of a tiny
model that benchmarks.md gives at 64 and 256 sessions, and a trainer that learns for 0.52 s a step,
as the picture shows. Nothing was fitted; but the CPU of a trajectory in the last two rows was
measured in those very runs.

{{validation}}

The measured runs without an engine spread widely from round to round: at `max_staleness` 4 they are
slower than the same with a real server.

## Constants

Rates of GPUs and networks are the vendors' (NVIDIA's data sheets of the H100 SXM and the DGX H100),
and the shares of them that are reached are assumed. What says *here* was measured: CPU of one core
of a shared machine, the least of 3 rounds, all of it counted as time of one interpreter, although
Parquet's compression leaves that to others.

{{costs}}

Left out: how the trainer scales over its ranks (taken as linear), its own Python (samples, packing,
the broadcast of a batch), probes, reading every server's load each second, failures, and the
network between workers and servers.

## Growth

*Of linear*: beside the throughput of one server, times the servers. *Frozen*: share of the servers'
time in publications; what they compute again after them is part of it. *Idle*: without a sequence.
*Trainer's process*: its interpreter, for trajectories and announcements. *Age*: weight updates
between the start of a call and the step that trains on it.
"""


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arithmetic", action="store_true", help="print another page's table")
    options = parser.parse_args()
    if options.arithmetic:
        print(format_arithmetic(Costs.load()))
        return
    # Millions of small objects, none in a circle that matters: a third of the time.
    gc.disable()
    page = format_page(options.seed)
    print(page)
    _PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {_PAGE}")


if __name__ == "__main__":
    main()
