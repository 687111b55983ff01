from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch import plan as plan_module
from agentrl_cli.launch.plan import PlannedProcess, format_plan
from agentrl_cli.launch.run_resolution import check_supported

NO_GPU = Machine(num_cores=8)


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


def build_plan(
    config: ExperimentConfig, machine: Machine, *, purpose: Any = "train", **more: Any
) -> list[PlannedProcess]:
    run = resolve_run(config, machine, purpose=purpose)
    run = run.model_copy(update={"untied_head": more.pop("untied_head", False)})
    return plan_module.build_plan(config, run, **more)


def check(config: ExperimentConfig, machine: Machine = NO_GPU) -> None:
    check_supported(config, resolve_run(config, machine, purpose="train"))


def with_gpus(*names: str) -> Machine:
    return Machine(gpu_ids=names, num_cores=8)


def servers_of(plan: list[PlannedProcess]) -> list[PlannedProcess]:
    return [process for process in plan if process.role == "engine"]


def value_of(process: PlannedProcess, flag: str) -> str:
    return process.argv[process.argv.index(flag) + 1]


def test_embedded_and_local_is_one_process() -> None:
    (process,) = build_plan(make_config(), NO_GPU)
    assert process.argv == ()
    assert process.devices == "cpu"
    assert "(this command)" in format_plan([process])


def test_a_run_on_gpus_has_servers_and_a_trainer_of_its_own() -> None:
    config = make_config(engine={"kind": "vllm", "num_servers": 3, "first_port": 9000})
    plan = build_plan(config, with_gpus("0", "1", "2", "3"))
    servers = ["vllm-0", "vllm-1", "vllm-2"]
    assert [p.name for p in plan] == ["command", *servers, "trainer", "rollout-0", "rollout-1"]
    trainer = plan[4]
    assert trainer.devices == "cuda:3"
    assert trainer.env == {"CUDA_VISIBLE_DEVICES": "3"}
    assert trainer.argv[-1].endswith("trainer_program")
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in servers_of(plan)] == ["0", "1", "2"]
    assert [value_of(s, "--port") for s in servers_of(plan)] == ["9000", "9001", "9002"]
    assert all(value_of(s, "--model") == "some/model" for s in servers_of(plan))
    assert all(value_of(s, "--host") == "127.0.0.1" for s in servers_of(plan))
    assert all(value_of(s, "--gpu-memory-utilization") == "0.9" for s in servers_of(plan))
    assert not any("--enable-sleep-mode" in s.argv for s in servers_of(plan))


@pytest.mark.parametrize(("share", "expected"), [(None, "0.4"), (0.6, "0.6")])
def test_one_gpu_is_shared(share: float | None, expected: str) -> None:
    config = make_config(engine={"kind": "vllm", "gpu_memory_utilization": share})
    _, server, trainer, *_ = build_plan(config, with_gpus("5"))
    assert server.devices == trainer.devices == "cuda:5"
    assert value_of(server, "--gpu-memory-utilization") == expected
    assert "--enable-sleep-mode" in server.argv


gpu_names = st.lists(
    st.integers(0, 30).map(str) | st.uuids().map(lambda u: f"GPU-{u}"), unique=True, max_size=12
)


@given(
    names=gpu_names,
    num_servers=st.integers(1, 6),
    size=st.integers(1, 4),
    purpose=st.sampled_from(["train", "eval"]),
)
def test_gpus_are_disjoint_while_there_are_enough(
    names: list[str], num_servers: int, size: int, purpose: Any
) -> None:
    engine = {"kind": "vllm", "device": "cuda"}
    engine |= {"num_servers": num_servers, "tensor_parallel_size": size}
    config, machine, needed = make_config(engine=engine), with_gpus(*names), num_servers * size
    if needed > len(names):
        with pytest.raises(UserInputError, match=r"Type engine\."):
            build_plan(config, machine, purpose=purpose)
        return
    plan = build_plan(config, machine, purpose=purpose)
    given_out = [s.env["CUDA_VISIBLE_DEVICES"].split(",") for s in servers_of(plan)]
    assert all(len(own) == size for own in given_out)
    assert len({gpu for own in given_out for gpu in own}) == needed, "servers never share"
    assert {gpu for own in given_out for gpu in own} <= set(names)
    if purpose == "eval":
        return
    trainers = [p.env["CUDA_VISIBLE_DEVICES"].split(",") for p in plan if p.role == "trainer"]
    assert len(trainers) == max(1, len(names) - needed)
    assert all(len(own) == 1 for own in trainers)
    trainer = [gpu for own in trainers for gpu in own]
    assert len(set(trainer)) == len(trainer), "trainers never share"
    shared = [bool(set(own) & set(trainer)) for own in given_out]
    assert sum(shared) == (1 if needed == len(names) else 0)
    assert shared == ["--enable-sleep-mode" in s.argv for s in servers_of(plan)]


def test_ranks_are_planned_beside_the_engine_that_is_in_the_first() -> None:
    config = make_config(engine={"kind": "embedded"}, train={"num_processes": 3})
    plan = build_plan(config, NO_GPU)
    assert [p.name for p in plan] == ["command", "trainer", "trainer-1", "trainer-2"]
    assert len({p.argv for p in plan[1:]}) == 1, "they run one program"
    assert all(p.devices == "cpu" and p.argv[-1].endswith("trainer_program") for p in plan[1:])
    on_gpus = build_plan(config, with_gpus("0", "1", "2", "3"))
    assert [p.devices for p in on_gpus[1:]] == ["cuda:0", "cuda:1", "cuda:2"]


def test_an_evaluation_or_a_plain_run_has_no_ranks() -> None:
    config = make_config(engine={"kind": "embedded"}, train={"num_processes": 3})
    assert len(build_plan(config, NO_GPU, purpose="eval")) == 1
    assert len(build_plan(make_config(engine={"kind": "embedded"}), with_gpus("0", "1"))) == 1
    served = build_plan(make_config(engine={"kind": "vllm"}), with_gpus("0"), purpose="eval")
    assert [p.name for p in served] == ["command", "vllm-0", "rollout-0", "rollout-1"]


def test_a_server_on_cpu_gets_what_vllm_needs_there() -> None:
    engine = {"kind": "vllm", "num_servers": 3, "cpu_kv_cache_gib": 0.5}
    plan = build_plan(make_config(engine=engine), NO_GPU, untied_head=True)
    server = servers_of(plan)[0]
    assert value_of(server, "--kv-cache-memory-bytes") == str(2**29)
    assert value_of(server, "--distributed-executor-backend") == "uni"
    assert value_of(server, "--load-format") == "dummy"
    assert json.loads(value_of(server, "--hf-overrides")) == {"tie_word_embeddings": False}
    assert "--enforce-eager" in server.argv
    assert "--gpu-memory-utilization" not in server.argv
    assert server.env["OMP_NUM_THREADS"] == "2", "8 cores for three servers"
    assert server.env["VLLM_TARGET_DEVICE"] == "cpu"
    assert server.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert server.env["CUDA_VISIBLE_DEVICES"] == ""
    assert (Path(server.env["PYTHONPATH"]) / "agentrl_vllm_auth.py").is_file()
    assert "HF_HUB_OFFLINE" not in server.env, "the model may have to be fetched"


def test_cpu_flags_stay_off_the_gpu() -> None:
    server = servers_of(build_plan(make_config(engine={"kind": "vllm"}), with_gpus("0", "1")))[0]
    assert not {"--enforce-eager", "--distributed-executor-backend"} & set(server.argv)
    assert not [name for name in server.env if "CPU" in name or name == "OMP_NUM_THREADS"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server.env


@pytest.mark.parametrize(
    ("num_servers", "num_threads", "expected"),
    [(1, None, "8"), (2, None, "4"), (3, None, "2"), (20, None, "1"), (1, 5, "5")],
)
def test_servers_on_the_cpu_leave_a_core_to_the_agents_and_do_not_sample_in_step(
    num_servers: int, num_threads: int | None, expected: str
) -> None:
    machine = dataclasses.replace(NO_GPU, num_cores=9)
    engine = {"kind": "vllm", "num_servers": num_servers, "num_threads": num_threads}
    servers = servers_of(build_plan(make_config(engine=engine, seed=2**40), machine))
    assert [s.env["OMP_NUM_THREADS"] for s in servers] == [expected] * num_servers
    seeds = {int(value_of(server, "--seed")) for server in servers}
    assert len(seeds) == num_servers
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_local_model_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    config = make_config(engine={"kind": "vllm"})
    plan = build_plan(config, NO_GPU, model_folder=str(tmp_path))
    server = servers_of(plan)[0]
    assert server.env["HF_HUB_OFFLINE"] == "1"
    assert value_of(server, "--model") == str(tmp_path)
    assert value_of(server, "--served-model-name") == "some/model"
    with_hub_tokenizer = make_config(engine={"kind": "vllm"}, tokenizer_path="some/tokenizer")
    server = servers_of(build_plan(with_hub_tokenizer, NO_GPU, model_folder=str(tmp_path)))[0]
    assert "HF_HUB_OFFLINE" not in server.env
    assert value_of(server, "--tokenizer") == "some/tokenizer"


@pytest.mark.parametrize(("rank", "allocated"), [(1, "8"), (16, "16"), (20, "32"), (512, "512")])
def test_adapters_get_a_rank_that_vllm_allocates(rank: int, allocated: str) -> None:
    model = {"path": "some/model", "lora": {"rank": rank}}
    server = servers_of(build_plan(make_config(model=model, engine={"kind": "vllm"}), NO_GPU))[0]
    assert "--enable-lora" in server.argv
    assert value_of(server, "--max-lora-rank") == allocated
    assert server.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(
    ("gpus", "lora", "expected"),
    [(("0", "1"), None, True), (("0",), None, False), (("0", "1"), {}, False), ((), None, False)],
)
def test_servers_are_ready_for_nccl_where_it_may_be_used(
    gpus: tuple[str, ...], lora: Any, expected: bool
) -> None:
    config = make_config(model={"path": "m", "lora": lora}, engine={"kind": "vllm"})
    server = servers_of(build_plan(config, with_gpus(*gpus)))[0]
    assert ("--weight-transfer-config" in server.argv) is expected


def test_the_users_interpreter_paths_and_arguments_are_taken_over() -> None:
    engine = {"python": "~/vllm/bin/python", "server_args": ["--block-size", "32"]}
    config = make_config(engine={"kind": "vllm", **engine})
    server, trainer = build_plan(config, Machine(python_path="/mine:/other"))[1:]
    assert server.argv[0] == str(Path.home() / "vllm/bin/python")
    assert trainer.argv[0] != server.argv[0]
    assert server.argv[-2:] == ("--block-size", "32"), "behind ours"
    assert server.env["PYTHONPATH"].endswith("vllm/plugin:/mine:/other")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_no_key_is_in_a_plan(kind: str) -> None:
    text = format_plan(build_plan(make_config(engine={"kind": kind}), with_gpus("0", "1")))
    assert kind in text
    assert "API_KEY" not in text
    assert "--api-key" not in text


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_servers_leave_behind_lies_where_the_next_start_removes_it(kind: str) -> None:
    config, run = make_config(engine={"kind": kind}), with_gpus("0", "1")
    [server] = servers_of(build_plan(config, run, private_dir="/private"))
    assert server.env["TMPDIR"] == "/private"
    assert not server.env["TORCHINDUCTOR_CACHE_DIR"].startswith("/private")
    # The address of a socket there would be too long for the system.
    [server] = servers_of(build_plan(config, run, private_dir=f"/{'a' * 80}"))
    assert "TMPDIR" not in server.env


def test_an_sglang_server_is_named_and_placed() -> None:
    config = make_config(engine={"kind": "sglang", "tensor_parallel_size": 2})
    server = servers_of(build_plan(config, with_gpus("3", "4", "7"), private_dir="/keys"))[0]
    assert server.name == "sglang-0"
    assert server.env["CUDA_VISIBLE_DEVICES"] == "3,4"
    flags = ("--config", "--model-path", "--mem-fraction-static")
    expected = ["/keys/sglang-0.yaml", "some/model", "0.9"]
    assert [value_of(server, flag) for flag in flags] == expected


@pytest.mark.parametrize(
    ("sections", "typed"),
    [
        (
            {"rollout": {"agent_mode": "subprocess"}, "workflow_path": "mine.Flow"},
            "Type rollout.agent_mode=inline",
        ),
        ({"engine": {"kind": "sglang"}}, "engine.kind=vllm"),
        (
            {"engine": {"kind": "embedded", "num_servers": 2}},
            "Type engine.kind=vllm or engine.num_servers=1",
        ),
        ({"engine": {"kind": "vllm", "server_args": ["--port", "1"]}}, "engine.first_port"),
        ({"engine": {"kind": "vllm", "server_args": ["--api-key=x"]}}, "--api-key is set by"),
        ({"engine": {"kind": "vllm", "tool_call_parser": "hermez"}}, "did you mean 'hermes'?"),
    ],
)
def test_what_cannot_run_says_what_to_type(sections: dict[str, Any], typed: str) -> None:
    with pytest.raises(UserInputError) as error_info:
        check(make_config(**sections))
    assert typed in str(error_info.value)


def test_what_can_run_passes() -> None:
    check(make_config())
    check(make_config(engine={"kind": "vllm", "num_servers": 2}))
    check(make_config(), with_gpus("0"))
    check(make_config(engine={"kind": "sglang"}), with_gpus("0", "1"))
    with pytest.raises(UserInputError, match=r"apart from the trainer's.* Type engine\.kind=vllm"):
        check(make_config(engine={"kind": "sglang"}), with_gpus("0"))
