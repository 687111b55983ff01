"""A script for Slurm's ``sbatch`` that runs a training command on the nodes of a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.torchrun import count_server_gpus

#: Before the time limit, for the step in progress; torchrun kills a little sooner.
_NOTICE_SECONDS = 300
_SHUTDOWN_SECONDS = _NOTICE_SECONDS - 30

#: The batch script runs on the first node; this starts a program on each of the others.
_ON_OTHERS = r"""srun --relative=1 --nodes="$((SLURM_NNODES - 1))" \
    --ntasks="$((SLURM_NNODES - 1))" \
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1"""

_ADDRESS = """# Where the nodes meet: at the first one, at a port that other jobs do not use.
head=$(hostname -I | cut -d ' ' -f 1)
port=$((20000 + SLURM_JOB_ID % 10000))
"""

_DRAIN = """# Before the time limit the run finishes its step and saves, and the job goes back into
# the queue. The command alone gets the signal; srun would pass it on to all that runs on a node.
run=
is_due=
drain() { if [ -n "$run" ]; then kill -TERM "$run" 2>/dev/null; fi; }
trap 'is_due=yes; drain' USR1
# With scancel Slurm itself signals every process.
trap : TERM
"""

_WAIT = """# A signal ends the wait, and not the run.
wait "$run"
status=$?
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    status=$?
done
if [ -n "$is_due" ] && [ "$status" -ne 0 ]; then
    # The same command resumes.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""

_ALONE = """agentrl ARGUMENTS &
run=$!
"""

_RAY = r"""# Other users of the cluster reach Ray's ports, and the token keeps them out.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
ray start --head --node-ip-address="$head" --port="$port" --include-dashboard=false \
    --disable-usage-stats --block &
ON_OTHERS \
    ray start --address="$head:$port" --block &
count_nodes() {
    python -c 'import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' "$head:$port" 2>/dev/null | tail -n 1
}
# agentrl plans with what the cluster has when it starts.
until [ "$(count_nodes)" = "$SLURM_NNODES" ]; do
    if [ "$SECONDS" -gt 600 ]; then
        echo "after 600 s Ray does not run on all $SLURM_NNODES nodes" >&2
        exit 1
    fi
    sleep 2
done
agentrl ARGUMENTS launcher.address="$head:$port" &
run=$!
"""

_TORCHRUN = r"""command=(-m agentrl_cli ARGUMENTS)
shared=(--nnodes="$SLURM_NNODES" --max-restarts=3 --master-addr="$head" --master-port="$port")
torchrun "${shared[@]}" --node-rank=0 --nproc-per-node=NUM_FIRST \
    --shutdown-timeout=SHUTDOWN_SECONDS "${command[@]}" &
run=$!
"""

_TORCHRUN_OTHERS = r"""# Once another node has given up, the first one would wait for it in vain.
(ON_OTHERS \
    bash -c 'exec torchrun --node-rank="$((SLURM_PROCID + 1))" "$@"' torchrun \
    "${shared[@]}" --nproc-per-node=NUM_OTHER "${command[@]}" || drain) &
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What is asked of Slurm; None: its default."""

    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int | None = None
    """None: nodes that nobody else uses, with all their cores."""
    time: str | None = None
    partition: str | None = None


def format_sbatch(
    config: ExperimentConfig,
    job: SlurmJob,
    arguments: Sequence[str],
    *,
    folder: Path,
    bin_dir: Path,
) -> str:
    """The script.

    Args:
        config: the experiment.
        job: what is asked of Slurm.
        arguments: of ``agentrl``, with ``train``.
        folder: where they are typed.
        bin_dir: of the environment with agentrl, which all nodes see.

    Raises:
        UserInputError: the launcher cannot use such nodes.
    """
    head = "\n".join(("#!/bin/bash", *_list_directives(config, job)))
    place = (
        f'cd {shlex.quote(str(folder))} || exit\nexport PATH={shlex.quote(str(bin_dir))}:"$PATH"'
    )
    start = _format_start(config, job, shlex.join(arguments))
    return "\n".join((f"{head}\n", f"{place}\n", _DRAIN, *start, _WAIT))


def _list_directives(config: ExperimentConfig, job: SlurmJob) -> list[str]:
    name = f"{config.experiment_name}-{config.trial_name}"
    cores = f"--cpus-per-task={job.cpus_per_node}" if job.cpus_per_node else "--exclusive"
    found = [
        *(f"--job-name={name}", f"--nodes={job.num_nodes}", "--ntasks-per-node=1", cores),
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--time={job.time}"] if job.time else []),
        *([f"--partition={job.partition}"] if job.partition else []),
        *("--output=slurm-%j.log", "--open-mode=append"),
    ]
    return [
        *(f"#SBATCH {option}" for option in found),
        "# Before the time limit this script alone gets a signal; see drain.",
        f"#SBATCH --signal=B:USR1@{_NOTICE_SECONDS}",
        "# A job that was preempted, or lost a node, starts again, and the run resumes.",
        "#SBATCH --requeue",
    ]


def _format_start(config: ExperimentConfig, job: SlurmJob, arguments: str) -> list[str]:
    """Starts the run, whose process is then ``$run``."""
    kind, is_spread = config.launcher.kind, job.num_nodes > 1
    values = {"ON_OTHERS": _ON_OTHERS, "SHUTDOWN_SECONDS": str(_SHUTDOWN_SECONDS)}
    parts = [_ALONE]
    if kind == "torchrun":
        num_first, num_other = _count_ranks(config, job)
        values |= {"NUM_FIRST": str(num_first), "NUM_OTHER": str(num_other)}
        parts = [_ADDRESS, _TORCHRUN, *([_TORCHRUN_OTHERS] if is_spread else [])]
    elif kind == "ray" and is_spread:
        parts = [_ADDRESS, _RAY]
    elif is_spread:
        raise UserInputError(
            f"--nodes {job.num_nodes}: launcher.kind: local runs everything on one machine. Type "
            "launcher.kind=torchrun or launcher.kind=ray, or --nodes 1"
        )
    # Last, what the user typed: it may hold one of these names.
    for name, value in (*values.items(), ("ARGUMENTS", arguments)):
        parts = [part.replace(name, value) for part in parts]
    return parts


def _count_ranks(config: ExperimentConfig, job: SlurmJob) -> tuple[int, int]:
    """How many ranks torchrun starts on the first node, which has the engine servers, and on each
    of the others.

    Raises:
        UserInputError: another number was asked for, or the servers need more GPUs.
    """
    num_taken = count_server_gpus(config, has_gpus=job.gpus_per_node > 0)
    if num_taken > job.gpus_per_node:
        raise UserInputError(
            f"--gpus-per-node {job.gpus_per_node}: engine.num_servers: {config.engine.num_servers} "
            f"with engine.tensor_parallel_size: {config.engine.tensor_parallel_size} need "
            f"{num_taken} GPUs of the first node. Type --gpus-per-node {num_taken + 1}, or a lower "
            "engine.num_servers"
        )
    first, other = max(1, job.gpus_per_node - num_taken), max(1, job.gpus_per_node)
    count, wanted = first + other * (job.num_nodes - 1), config.train.num_processes
    if wanted not in (None, count):
        raise UserInputError(
            f"train.num_processes: {wanted}, and {job.num_nodes} nodes with {job.gpus_per_node} "
            f"GPUs each come to {count} ranks. Type train.num_processes=null"
        )
    return first, other
