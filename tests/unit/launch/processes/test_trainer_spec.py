from __future__ import annotations

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.processes.trainer_spec import RunningServers, TrainerSpec
from agentrl_cli.train.ranks import Rendezvous

CONFIG = ExperimentConfig.model_validate(
    {
        "experiment_name": "exp",
        "model": {"path": "m"},
        "agent_builder_path": "a.b",
        "train_dataset": {"path": "d"},
        "engine": {"kind": "vllm"},
    }
)


def make_spec() -> TrainerSpec:
    endpoint = ServerEndpoint(
        name="vllm-0", base_url="http://127.0.0.1:8940", api_key="secret-1", log_path="x.log"
    )
    run = resolve_run(CONFIG, Machine(), purpose="train")
    servers = RunningServers(run=run, endpoints=(endpoint,))
    return TrainerSpec(
        owner_pid=7,
        events_descriptor=5,
        servers=servers,
        secrets=[["agent_builder_kwargs", "api_key", "secret-2"]],
        rendezvous_path="/tmp/ranks/rendezvous",
    )


def test_a_spec_arrives_and_does_not_stay_in_the_environment() -> None:
    spec = make_spec()
    environment = {"HOME": "/home/x", **spec.environment()}
    assert "secret-1" in "".join(environment.values())
    assert TrainerSpec.take(environment) == (spec, None)
    assert environment == {"HOME": "/home/x"}


def test_several_ranks_are_told_apart_as_torchrun_does() -> None:
    spec = make_spec()
    environment = spec.environment(rank=2, world_size=4)
    assert environment.items() >= {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items()
    _, rendezvous = TrainerSpec.take(environment)
    assert rendezvous == Rendezvous(index=2, count=4, path=spec.rendezvous_path)
    assert environment == {}


def test_keys_are_in_no_log() -> None:
    assert "secret-1" not in repr(make_spec().servers)


def test_a_trainer_that_nobody_started_says_what_to_type() -> None:
    with pytest.raises(UserInputError, match="agentrl train --config"):
        TrainerSpec.take({})
