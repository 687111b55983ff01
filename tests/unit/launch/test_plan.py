from __future__ import annotations

from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.plan import (
    build_plan,
    check_supported,
    count_visible_gpus,
    format_plan,
    resolve_engine_kind,
)


def make_config(**sections: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": "some/model"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
        }
        | sections
    )


def test_embedded_and_local_is_one_process() -> None:
    (process,) = build_plan(make_config())
    assert process.argv == ()
    assert process.devices == "cpu"
    assert "(this command)" in format_plan([process])


def test_the_engine_follows_the_machine_unless_it_is_named() -> None:
    assert resolve_engine_kind(make_config(), num_gpus=0) == "embedded"
    assert resolve_engine_kind(make_config(), num_gpus=1) == "vllm"
    assert resolve_engine_kind(make_config(engine={"kind": "embedded"}), num_gpus=1) == "embedded"


def test_servers_get_gpus_and_ports_of_their_own() -> None:
    config = make_config(engine={"kind": "vllm", "num_servers": 3})
    trainer, *servers = build_plan(config, num_gpus=4)
    assert trainer.devices == "cuda:3"
    assert [s.env for s in servers] == [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(3)]
    ports = {s.argv[s.argv.index("--port") + 1] for s in servers}
    assert len(ports) == 3
    assert all("some/model" in s.argv for s in servers)
    assert all(s.argv[s.argv.index("--host") + 1] == "127.0.0.1" for s in servers)


def test_too_few_gpus_are_shared() -> None:
    config = make_config(engine={"kind": "sglang", "num_servers": 2})
    assert [p.devices for p in build_plan(config, num_gpus=1)] == ["cuda:0"] * 3
    assert [p.devices for p in build_plan(config, num_gpus=0)] == ["cpu"] * 3


def test_ray_plans_the_same_processes() -> None:
    config = make_config(engine={"kind": "vllm", "num_servers": 2}, launcher={"kind": "ray"})
    assert [p.name for p in build_plan(config)] == ["command", "trainer", "vllm-0", "vllm-1"]


@pytest.mark.parametrize(
    ("sections", "typed"),
    [
        ({"engine": {"kind": "vllm"}}, "engine.kind=embedded"),
        ({"launcher": {"kind": "ray"}}, "launcher.kind=local"),
        ({"rollout": {"agent_mode": "subprocess"}}, "rollout.agent_mode=inline"),
    ],
)
def test_what_cannot_run_says_what_to_type(sections: dict[str, Any], typed: str) -> None:
    with pytest.raises(UserInputError, match=f"Type {typed}"):
        check_supported(make_config(**sections))
    check_supported(make_config())


def test_a_gpu_without_a_named_engine_is_explained() -> None:
    with pytest.raises(UserInputError, match="because this machine has a GPU"):
        check_supported(make_config(), num_gpus=1)


@pytest.mark.parametrize(
    ("visible", "expected"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2), ("GPU-abc, GPU-def", 2)]
)
def test_visible_gpus_are_counted(visible: str, expected: int) -> None:
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected
