"""Ranks that torchrun starts: each is ``agentrl train``, typed on every node by torchrun.

Rank 0 is also the command: it holds the run folder, and has engine servers and rollout workers on
its machine.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Gpus, Machine, ResolvedRun, resolve_run
from agentrl_cli.errors import AgentrlError, NotFiniteError, RunError, UserInputError, build_error
from agentrl_cli.train.rendezvous import RankLostError, Rendezvous

_PREFIX = "TORCHELASTIC_"
_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunRank:
    """Which of the processes that torchrun has started this one is."""

    local_index: int
    """Among those of this node."""
    num_local: int
    rendezvous: Rendezvous

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Self | None:
        """From the variables of torchrun, of which none is left: an agent's own torch would take
        itself for a rank. None: torchrun has not started this process."""
        if f"{_PREFIX}RUN_ID" not in environment:
            return None
        names = [name for name in environment if name in _VARIABLES or name.startswith(_PREFIX)]
        found = {name: environment.pop(name) for name in names}
        return cls(
            local_index=int(found["LOCAL_RANK"]),
            num_local=int(found["LOCAL_WORLD_SIZE"]),
            rendezvous=Rendezvous(
                index=int(found["RANK"]),
                count=int(found["WORLD_SIZE"]),
                address=f"tcp://{found['MASTER_ADDR']}:{found['MASTER_PORT']}",
                has_store=found[f"{_PREFIX}USE_AGENT_STORE"] == "True",
            ),
        )

    @property
    def is_first(self) -> bool:
        """True for rank 0."""
        return self.rendezvous.index == 0


def place_rank(
    config: ExperimentConfig, rank: TorchrunRank | None
) -> tuple[ResolvedRun, Rendezvous]:
    """What the configuration comes to for a rank, which sees its own GPU alone from now on.

    Raises:
        UserInputError: the processes that torchrun has started cannot be used for it.
    """
    if rank is None:
        raise UserInputError(
            "launcher.kind: torchrun, and torchrun has not started this process. Type, on every "
            "node: torchrun --nnodes=NODES --node-rank=0_TO_NODES-1 --nproc-per-node=RANKS "
            "--master-addr=HOST_OF_NODE_0 --master-port=29500 -m agentrl_cli train --config FILE "
            "launcher.kind=torchrun; or launcher.kind=local"
        )
    _check_rank(config, rank)
    machine = Machine.detect()
    num_taken = count_server_gpus(config, has_gpus=bool(machine.gpu_ids))
    if rank.rendezvous.index != rank.local_index:
        # Of another machine than that of rank 0, which has the servers.
        machine = replace(machine, gpu_ids=("elsewhere",) * num_taken + machine.gpu_ids)
    left = machine.gpu_ids[num_taken:] or machine.gpu_ids[-1:]
    if left and rank.num_local > len(left):
        raise UserInputError(
            f"torchrun has started {rank.num_local} ranks on {socket.gethostname()}, and each "
            f"needs a GPU of its own: engine servers leave {len(left)}. Type "
            f"--nproc-per-node={len(left)} there, or give engine servers fewer "
            "(engine.num_servers, engine.tensor_parallel_size)"
        )
    update = {"num_processes": rank.num_local}
    local = config.model_copy(update={"train": config.train.model_copy(update=update)})
    run = resolve_run(local, machine, purpose="train")
    own: Gpus = run.trainers[rank.local_index][:1]
    if own:
        # Before torch looks for GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = own[0]
    return run.model_copy(update={"by_torchrun": True, "trainers": (own,)}), rank.rendezvous


def count_server_gpus(config: ExperimentConfig, *, has_gpus: bool) -> int:
    """GPUs that the engine servers take, of a machine that has some or none."""
    engine = config.engine
    has_servers = (engine.kind or ("vllm" if has_gpus else "embedded")) != "embedded"
    on_gpu = (engine.device or ("cuda" if has_gpus else "cpu")) == "cuda"
    return engine.num_servers * engine.tensor_parallel_size if has_servers and on_gpu else 0


def _check_rank(config: ExperimentConfig, rank: TorchrunRank) -> None:
    kind, count, wanted = config.launcher.kind, rank.rendezvous.count, config.train.num_processes
    if kind != "torchrun":
        raise UserInputError(
            f"launcher.kind: {kind}, and torchrun has started {count} processes, each of which "
            "would be a run of its own. Type launcher.kind=torchrun, or agentrl train without "
            "torchrun"
        )
    if wanted not in (None, count):
        raise UserInputError(
            f"train.num_processes: {wanted}, and torchrun has started {count} ranks. Type "
            f"train.num_processes=null, or give torchrun --nnodes and --nproc-per-node for {wanted}"
        )


@contextmanager
def reported_once(rank: TorchrunRank | None) -> Iterator[None]:
    """Lets one process report an error that several have: rank 0 all of its own, the first rank of
    another node those that rank 0 may not have, the others none but crashes."""
    try:
        yield
    except RankLostError as error:
        if rank is None or not rank.is_first:
            raise SystemExit(RunError.exit_code) from error
        raise RunError(
            f"{error}. torchrun says which one and why. It starts all of them again as often as "
            "its --max-restarts allows, and they resume from the last checkpoint"
        ) from error
    except AgentrlError as error:
        if rank is None or rank.is_first:
            raise
        if isinstance(error, NotFiniteError) or rank.local_index > 0:
            raise SystemExit(error.exit_code) from error
        text = f"rank {rank.rendezvous.index} on {socket.gethostname()}: {error}"
        raise build_error(type(error).__name__, text, error.exit_code) from error
    except Exception:
        if rank is None or rank.is_first:
            raise
        # It has no log in the run folder.
        traceback.print_exc()
        raise SystemExit(1) from None
