"""A trainer process that follows the first of several.

    python -m agentrl_cli.launch.rank_process RUN_DIR OWNER_PID EVENTS_DESCRIPTOR

Started by the command beside the first rank; it reads the run folder, which the command holds.
What goes wrong is in its log, and the command sees that it has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from agentrl_cli.errors import AgentrlError, UserInputError
from agentrl_cli.launch.handover import TrainerOrders, resolve_config
from agentrl_cli.launch.loading import load_learner
from agentrl_cli.launch.machine import count_visible_gpus
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.loading import resolve_model_folder
from agentrl_cli.models.tokenizer_check import load_tokenizer_of
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.commands import follow
from agentrl_cli.train.process_ranks import open_ranks


def main(argv: list[str]) -> int:
    """Trains as the first rank commands; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        orders = TrainerOrders.take(argv[1:], os.environ)
        _follow(Path(argv[0]), orders)
    except AgentrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _follow(run_dir: Path, orders: TrainerOrders) -> None:
    if orders.place is None:
        raise UserInputError("a rank is started by the command. Type agentrl train --config FILE")
    config = resolve_config(run_dir, orders)
    folder = RunFolder.open(run_dir)
    model_folder = resolve_model_folder(config.model.path, SilentObserver())
    tokenizer = load_tokenizer_of(model_folder, config.tokenizer_path)
    num_gpus = orders.servers.num_gpus if orders.servers is not None else count_visible_gpus()
    with open_ranks(orders.place) as ranks:
        learner = load_learner(config, model_folder, tokenizer, num_gpus=num_gpus, ranks=ranks)
        follow(learner, ranks, folder.read_trajectories, folder.write_micro_batch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
