from __future__ import annotations

import pytest

from agentrl_cli.engine.server import ServerEndpoint
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.handover import RunningServers, TrainerOrders


def make_orders() -> TrainerOrders:
    endpoint = ServerEndpoint(
        name="vllm-0", base_url="http://127.0.0.1:8940", api_key="secret-1", log_path="x.log"
    )
    servers = RunningServers(kind="vllm", endpoints=(endpoint,), untied_head=True, num_gpus=0)
    return TrainerOrders(
        owner_pid=7,
        events_descriptor=5,
        servers=servers,
        secrets=[["agent_builder_kwargs", "api_key", "secret-2"]],
    )


def test_orders_arrive_and_their_keys_do_not_stay_in_the_environment() -> None:
    orders = make_orders()
    environment = {"HOME": "/home/x", **orders.environment()}
    assert "secret-1" in "".join(environment.values())
    assert TrainerOrders.take(orders.arguments(), environment) == orders
    assert environment == {"HOME": "/home/x"}


def test_keys_are_on_no_command_line_and_in_no_log() -> None:
    orders = make_orders()
    assert "secret" not in " ".join(orders.arguments())
    assert "secret-1" not in repr(orders.servers)


@pytest.mark.parametrize("arguments", [(), ("7", "5")])
def test_a_trainer_that_nobody_started_says_what_to_type(arguments) -> None:
    with pytest.raises(UserInputError, match="agentrl train --config"):
        TrainerOrders.take(arguments, {})
