"""Agents in real worker processes: what each fault costs, and whom."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import (
    BuilderError,
    ConfigError,
    DatasetError,
    ImportPathError,
    RolloutFailedError,
)
from agentrl_cli.records import Boundary
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workers.worker_pool import LOG_NAME
from agentrl_cli.rollout.workers.worker_process import AgentWorker
from agentrl_cli.rollout.workflow_building import build_workflow, open_workers

PROJECT = Path(__file__).parents[3]

AGENTS = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
import openai
from beside import ANSWER   # The user's folder is importable, as in the main process.

def speak(data):
    """The environment as it is now, as plain code reads it."""
    client = openai.OpenAI(max_retries=0)
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": data["question"]}])
    return reply

AT_IMPORT = openai.OpenAI(max_retries=0)

def find_sockets():
    """Of a process whose clients are gone: the channel, and the event loop's own."""
    AT_IMPORT.close()
    names = [name for name in os.listdir("/proc/self/fd")]
    return [int(n) for n in names if os.path.islink(f"/proc/self/fd/{n}")
            and os.readlink(f"/proc/self/fd/{n}").startswith("socket:")]

def close_all():
    for number in find_sockets():
        os.close(number)
    time.sleep(600)

def write_nonsense():
    for number in find_sockets():
        os.write(number, b'{"op": "done"}\\n')
    time.sleep(600)

def fill_memory():
    held = []
    while True:
        held.append(bytearray(b"1") * 20_000_000)
        time.sleep(0.005)

def fill_memory_by_a_child():
    code = "held = bytearray(b'1') * 700_000_000; import time; time.sleep(60)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)

def leave_a_child():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("child", "w").write(str(child.pid))
    os._exit(0)

def leave_a_writer():
    # One line surely, whatever the machine is busy with.
    subprocess.run(["echo", "no end"])
    subprocess.Popen(["yes", "no end"], start_new_session=True)
    os._exit(0)

def solve(data):
    """Does what the question says, in Python."""
    print("about to", data["question"])
    print("in", os.getpid())
    speak(data)
    returned = eval(data["question"])
    return 1 if returned is None else returned

async def reward_by_client(data, client, model):
    first = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "one"}])
    second = await client.with_options(timeout=60).chat.completions.create(
        model=model, messages=[{"role": "user", "content": "two"}])
    client.set_reward(first.id, 0.25)
    try:
        client.set_reward("chatcmpl-nope", 1.0)
    except KeyError as error:
        print("refused:", error)
    client.set_final_reward(True)

def reward_by_blocking_client(data, client):
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "one"}])
    client.set_reward(reply.id, 0.5)

def reward_by_dict(data):
    return {speak(data).id: 1.5, speak(data).id: float("nan")}

def tell_environment(data, base_url, api_key):
    assert os.environ["OPENAI_BASE_URL"] == base_url and base_url.endswith("/v1")
    assert os.environ["ANTHROPIC_BASE_URL"] == base_url.removesuffix("/v1")
    assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == api_key
    assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost,model.agentrl.invalid"
    assert os.environ["HTTP_PROXY"] == "http://proxy"
    # The Agents SDK sends no traces, and no settings of another model.
    assert os.environ["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    assert not os.environ["OPENAI_DEFAULT_MODEL"].startswith("gpt")
    os.environ["LEFT_BEHIND"] = os.environ.get("LEFT_BEHIND", "") + "x"
    speak(data)
    return f"{os.getpid()} {os.environ['LEFT_BEHIND']} {ANSWER}"

async def fork_and_exit(data):
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    return speak(data) and 1

def use_client_of_import(data):
    AT_IMPORT.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}])
    return 1

def build(name="solve"): return globals()[name]

def build_raising(): raise RuntimeError("no weather today")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one."""
    (tmp_path / "beside.py").write_text("ANSWER = 42\n")
    (tmp_path / "my_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "a person's own")
    monkeypatch.setenv("OPENAI_DEFAULT_MODEL", "gpt-5")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def configure(builder: str = "my_agents.build", **options: Any) -> ExperimentConfig:
    limits = {"max_processes": 2, **options.pop("limits", {})}
    return ExperimentConfig(
        experiment_name="x",
        model={"path": "builtin:calculator"},
        train_dataset={"path": "x.jsonl"},
        agent_builder_path=builder,
        rollout={"agent_mode": "subprocess", "subprocess": limits, **options.pop("rollout", {})},
        **options,
    )


@pytest.fixture
def run(folder, chat_tokenizer, scripted_engine, open_client):
    """Runs one agent on a row for each question; the trajectories, in order."""

    async def run_questions(*questions, name="solve", timeout_seconds=600.0, **limits):
        rollout = {"timeout_seconds": timeout_seconds}
        config = configure(limits=limits, rollout=rollout, agent_builder_kwargs={"name": name})
        rows = [{"question": question} for question in questions]
        with open_workers(config) as workers:
            workflow = build_workflow(
                config, chat_tokenizer, open_client=open_client, workers=workers
            )
            workflow.log_to(folder)
            workflow.check_rows(rows, "train_dataset")
            try:
                return await run_tasks(
                    workflow, scripted_engine(lambda _: "4"), build_eval_tasks(rows),
                    n_samples=1, max_concurrent=8,
                )  # fmt: skip
            except RolloutFailedError as error:
                return error.trajectories

    return run_questions


@pytest.mark.slow
async def test_each_fault_is_one_trajectorys_own(run, folder):
    faults = {
        "ctypes.string_at(0)": (Boundary.AGENT, "AgentCrashError", "killed by SIGSEGV"),
        "os._exit(3)": (Boundary.AGENT, "AgentExitError", "exit status 3"),
        "sys.exit('enough')": (Boundary.AGENT, "RuntimeError", "the agent called exit('enough')"),
        "os.kill(os.getpid(), 9)": (Boundary.AGENT, "AgentCrashError", "ran out of memory"),
        "time.sleep(600)": (Boundary.TIMEOUT, "DeadlineError", "its process was killed"),
        "{}['state']": (Boundary.AGENT, "KeyError", "state"),
        "leave_a_writer()": (Boundary.AGENT, "AgentExitError", "exit status 0"),
        "close_all()": (Boundary.AGENT, "AgentProcessError", "the connection to the trainer"),
        "write_nonsense()": (Boundary.AGENT, "AgentProcessError", "wrote to"),
        "'x' * 34_000_000": (Boundary.AGENT, "TypeError", "bytes are too many"),
        "input('name? ')": (Boundary.AGENT, "EOFError", "EOF"),
        "object()": (Boundary.AGENT, "TypeError", "object"),
    }
    questions = [q for fault in faults for q in (fault, "1")]
    trajectories = await run(*questions, timeout_seconds=8)
    assert "my_agents" not in sys.modules, "what may crash is imported by workers alone"
    for question, trajectory in zip(questions, trajectories, strict=True):
        # What was sampled is kept, whatever happened afterwards.
        assert trajectory.num_turns == 1, (question, trajectory.failure)
        if question == "1":
            assert (trajectory.failure, trajectory.reward) == (None, 1.0)
            continue
        boundary, kind, words = faults[question]
        failure = trajectory.failure
        assert (failure.boundary, failure.kind) == (boundary, kind), failure
        assert words in failure.message
        if kind in ("AgentCrashError", "AgentExitError") or boundary is Boundary.TIMEOUT:
            # The last lines that it, or what it has started, wrote.
            if question == "leave_a_writer()":
                question = "no end"
            assert question in failure.message.partition("\n")[2]
    # The traceback of the other process, with the user's own line.
    assert "returned = eval(" in trajectories[10].failure.traceback
    lines = (folder / LOG_NAME).read_text().splitlines()
    assert f"{trajectories[0].id} | about to ctypes.string_at(0)" in lines
    assert f"{trajectories[1].id} | about to 1" in lines


@pytest.mark.slow
async def test_memory_is_limited_with_what_an_agent_starts(run):
    questions = ("fill_memory()", "fill_memory_by_a_child()", "1")
    alone, child, answer = await run(*questions, max_memory_gib=0.5, timeout_seconds=30)
    for trajectory in (alone, child):
        failure = trajectory.failure
        assert (failure.boundary, failure.kind) == (Boundary.AGENT, "AgentMemoryError")
        assert "rollout.subprocess.max_memory_gib is 0.5" in failure.message
    assert answer.failure is None


@pytest.mark.slow
async def test_lines_keep_the_name_of_their_trajectory_whoever_reads_late(run, folder, monkeypatch):
    copy = AgentWorker._copy_output

    def copy_late(worker: AgentWorker) -> None:
        worker._reaper.wait()
        copy(worker)

    monkeypatch.setattr(AgentWorker, "_copy_output", copy_late)
    questions = ["1", "2", "3"]
    trajectories = await run(*questions, max_processes=1)
    lines = (folder / LOG_NAME).read_text().splitlines()
    for question, trajectory in zip(questions, trajectories, strict=True):
        assert f"{trajectory.id} | about to {question}" in lines


@pytest.mark.slow
async def test_agents_give_rewards_as_they_do_inline(run, folder):
    (by_client,) = await run("a", name="reward_by_client")
    (blocking,) = await run("a", name="reward_by_blocking_client")
    (by_dict,) = await run("a", name="reward_by_dict")
    assert [i.reward for i in by_client.interactions] == [0.25, 1.0], by_client.failure
    assert [i.turn_return for i in by_client.interactions] == [0.25, 1.0]
    assert by_client.reward == 1.0
    assert (blocking.reward, blocking.failure) == (0.5, None)
    assert [i.reward for i in by_dict.interactions] == [1.5, None], by_dict.failure
    assert "no completed interaction 'chatcmpl-nope'" in (folder / LOG_NAME).read_text()


@pytest.mark.slow
async def test_a_worker_whose_agent_left_something_is_replaced_and_nothing_outlives_it(run, folder):
    questions = ["subprocess.Popen(['sleep', '600']) and None", "{}['state']", "1", "1"]
    trajectories = await run(*questions, "leave_a_child()", max_processes=1)
    assert [t.reward for t in trajectories] == [1.0, None, 1.0, 1.0, None]
    assert trajectories[-1].failure.kind == "AgentExitError"
    wait_until_gone([int((folder / "child").read_text())])
    pids = [int(line.split("in ")[1]) for line in (folder / LOG_NAME).read_text().splitlines()
            if " in " in line]  # fmt: skip
    assert [pids.index(pid) for pid in pids] == [0, 1, 1, 1, 1]


@pytest.mark.slow
async def test_the_environment_is_each_trajectorys_own(run):
    trajectories = await run(*"abc", name="tell_environment", max_processes=1, max_tasks=2)
    answers = [t.final_answer.split() for t in trajectories if t.final_answer]
    # Nothing gives a reward; that is judged when the agent has answered.
    assert {t.failure.boundary for t in trajectories} == {Boundary.REWARD}
    assert [a[1:] for a in answers] == [["x", "42"]] * 3
    assert len({a[0] for a in answers}) == 2


@pytest.mark.slow
async def test_a_client_made_at_import_is_right_for_every_trajectory(run):
    options = {"name": "use_client_of_import", "max_processes": 1}
    trajectories = await run("a", "b", **options)
    assert [t.failure for t in trajectories] == [None, None]
    # Kept for the next trajectory it has the key of the one before, which opens nothing.
    first, second = await run("a", "b", modules="kept", **options)
    assert first.failure is None
    assert second.failure.boundary is Boundary.GATEWAY
    assert second.failure.kind == "AuthenticationError"


async def test_a_process_that_an_agent_forks_does_not_answer_for_it(run):
    (trajectory,) = await run("x", name="fork_and_exit")
    assert (trajectory.reward, trajectory.failure) == (1.0, None)


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while left := list(filter(is_running, pids)):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_no_worker_outlives_a_killed_trainer(folder: Path) -> None:
    code = """
        import os, time
        from agentrl_cli.config.experiment import ExperimentConfig
        from agentrl_cli.rollout.workflow_building import open_workers
        config = ExperimentConfig(
            experiment_name="x", model={"path": "m"}, train_dataset={"path": "x"},
            agent_builder_path="my_agents.build",
            rollout={"agent_mode": "subprocess", "subprocess": {"max_processes": 2}},
        )
        with open_workers(config):
            print("ready", flush=True)
            time.sleep(600)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while len(below := psutil.Process(trainer.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline, "a reaper and a worker"
            time.sleep(0.05)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
    wait_until_gone([process.pid for process in below])


@pytest.mark.parametrize(
    ("builder", "error"),
    [("my_agents.build_raising", BuilderError), ("my_agents.biuld", ImportPathError)],
)
def test_a_wrong_builder_is_refused_in_the_words_of_a_run_inline(
    folder, monkeypatch, builder, error
):
    monkeypatch.setenv("OPENAI_API_KEY", "for the client that is made at import")
    monkeypatch.syspath_prepend(str(folder))
    config = configure(builder)
    with pytest.raises(error) as inline:
        build_workflow(config, None)
    with pytest.raises(error) as remote, open_workers(config):
        pass
    assert str(remote.value) == str(inline.value)
    for name in ("my_agents", "beside"):
        sys.modules.pop(name, None)


def test_a_builder_that_kills_its_process_is_a_mistake_of_the_users(folder):
    (folder / "deadly.py").write_text("import os\nprint('farewell')\nos._exit(7)\n")
    with (
        pytest.raises(BuilderError, match=r"exit status 7(.|\n)*farewell"),
        open_workers(configure("deadly.py:build")),
    ):
        pass


async def test_what_cannot_reach_another_process_is_refused(folder):
    with (
        pytest.raises(ConfigError, match=r"agent_builder_kwargs\.day: .* is date"),
        open_workers(configure(agent_builder_kwargs={"day": datetime.date(2026, 1, 1)})),
    ):
        pass
    config = configure()
    with open_workers(config) as workers:
        workflow = build_workflow(config, None, workers=workers)
        workflow.check_rows([{"question": "x", "n": [1, {"a": None}]}], "train_dataset")
        with pytest.raises(DatasetError, match=r"row 2 .*meta\.when\[0\] is datetime"):
            workflow.check_rows(
                [{"question": "x"}, {"question": "x", "meta": {"when": [datetime.datetime.now()]}}],
                "train_dataset",
            )
