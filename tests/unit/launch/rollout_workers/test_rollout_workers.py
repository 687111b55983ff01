"""Trajectories that other processes make: whole, balanced, and lost by no fault but their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.errors import BuilderError, DatasetError, EngineError, RunError
from agentrl_cli.launch.rollout_workers.rollout_pool import RemoteWorkflow, share_limits
from agentrl_cli.records import Boundary

Sites = Callable[..., Any]
PROJECT = Path(__file__).parents[4]


def test_trajectories_are_made_elsewhere_and_arrive_whole(site: Sites) -> None:
    s = site()
    s.start(num_workers=2)
    s.wait_until_ready()
    trajectories = s.run(*(f"{number} / 10" for number in range(8)))
    for number, trajectory in enumerate(trajectories):
        assert trajectory.failure is None
        assert trajectory.reward == number / 10
        assert trajectory.id == f"1.{number}/0"
        assert trajectory.step == 1
        [interaction] = trajectory.interactions
        assert list(interaction.completion_ids) == s.servers[0].reply_ids
        assert set(interaction.versions) == {0}
    # Each has had a share, and both keep their calls' caches together.
    logs = [(s.log_dir / f"rollout-{n}.log").read_text() for n in range(2)]
    assert [log.count("about to") for log in logs] == [4, 4]
    assert len(set(s.servers[0].salts)) == 1
    s.publish(1)
    assert set(s.run("1")[0].interactions[0].versions) == {1}
    assert len(set(s.servers[0].salts)) == 2


@pytest.mark.slow
def test_a_retry_goes_on_from_the_turns_that_another_worker_has_finished(site: Sites) -> None:
    s = site()
    s.start(num_workers=1, retry_from="finished_turns")
    s.wait_until_ready(1)
    [first] = s.run("1")
    num_calls = s.servers[0].num_calls
    again = s.submit("1", earlier=first.interactions).result(240)
    assert s.servers[0].num_calls == num_calls
    [before], [after] = first.interactions, again.interactions
    assert list(after.completion_ids) == list(before.completion_ids)
    assert list(after.rollout_logprobs) == list(before.rollout_logprobs)
    assert before.id != after.id


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_trajectories_a_retry(site: Sites) -> None:
    s = site()
    s.start(num_workers=2)
    s.wait_until_ready()
    questions = ["once()", *["await asyncio.sleep(1.0)"] * 7]
    trajectories = s.run(*questions)
    assert [t.failure for t in trajectories] == [None] * 8
    [text] = [text for text in s.messages.texts if "again" in text]
    assert "is started again: it ended with exit status 7" in text
    assert "  | about to once()" in text, "the last lines of its log"
    s.wait_until_ready()


@pytest.mark.slow
def test_an_agent_that_kills_every_worker_fails_alone_and_then_ends_the_run(site: Sites) -> None:
    s = site()
    s.start(num_workers=1)
    [lost, other] = s.run("os._exit(9)", "await asyncio.sleep(30)")
    for trajectory in (lost, other):
        assert trajectory.failure.boundary is Boundary.AGENT
        assert trajectory.failure.kind == "WorkerLostError"
        assert "exit status 9" in trajectory.failure.message
    [alone] = s.run("2")
    assert alone.reward == 2.0
    s.run("os._exit(9)")
    with pytest.raises(RunError, match="rollout-0 has ended 4 times") as raised:
        s.run("1")
    assert "agent_mode=subprocess" in str(raised.value)
    assert "about to os._exit(9)" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["time.sleep(600)", "exec('while True: pass')"])
def test_blocking_code_stalls_its_worker_alone_and_is_named(site: Sites, code: str) -> None:
    s = site()
    s.start(num_workers=2, timeout_seconds=600)
    s.wait_until_ready()
    blocked = s.submit(f"(HERE / 'blocked').touch() or {code}", number=77)
    s.wait_for((s.folder / "blocked").exists, "it does not begin")
    # Some go to the worker that nobody knows is blocked, and come back from there.
    sooner = [s.submit("4", number=number) for number in range(4)]
    s.wait_for(lambda: any("blocked" in text for text in s.messages.texts), "nobody is told")
    [text] = [text for text in s.messages.texts if "blocked" in text]
    assert "by code of trajectory 1.77/0" in text
    assert "returned = eval(question)" in text, "the user's line"
    assert "agent_mode=subprocess" in text
    # All go to the other worker, and weights are published without waiting for it.
    assert [t.reward for t in s.run(*["1", "2", "3"])] == [1.0, 2.0, 3.0]
    assert [call.result(240).reward for call in sooner] == [4.0] * 4
    s.publish(1)
    # The others did not wait for it.
    assert not blocked.done()
    assert s.workers._workers[0].num_running + s.workers._workers[1].num_running == 1


@pytest.mark.slow
def test_a_worker_that_is_blocked_beyond_every_deadline_is_replaced(site: Sites) -> None:
    s = site()
    s.start(num_workers=1, timeout_seconds=600)
    s.wait_until_ready(1)
    s.workers._max_stall_seconds = 7.0
    other = s.submit("await asyncio.sleep(1.0)", number=1)
    culprit = s.submit("time.sleep(600)", number=0).result(240)
    assert culprit.failure.boundary is Boundary.TIMEOUT
    assert "blocked for" in culprit.failure.message
    assert "returned = eval(question)" in culprit.failure.message
    # What stood beside it is made once more.
    assert other.result(240).failure is None


@pytest.mark.slow
def test_a_worker_that_awaits_again_gets_trajectories_again(site: Sites) -> None:
    s = site()
    s.start(num_workers=1)
    s.wait_until_ready(1)
    blocked, waiting = s.submit("time.sleep(8)"), None
    s.wait_for(lambda: any("blocked" in text for text in s.messages.texts), "nobody is told")
    waiting = s.submit("2", number=1)
    assert blocked.result(240).failure is None
    assert waiting.result(240).reward == 2.0
    assert any("answers again" in text for text in s.messages.texts)


def test_a_mistake_of_the_users_crosses_as_it_is(site: Sites) -> None:
    s = site()
    s.start(num_workers=1)
    with pytest.raises(DatasetError, match=r"^row 3: this one cannot be used$"):
        s.run("refuse()")


@pytest.mark.slow
def test_a_builder_that_cannot_be_used_there_is_told_as_in_the_trainer(site: Sites) -> None:
    s = site()
    s.start(num_workers=2, builder="build_refused")
    with pytest.raises(BuilderError, match=r"agent_builder_path: .*a key: 3 is not allowed"):
        s.run("1")


@pytest.mark.slow
def test_what_ends_the_engine_ends_calls_in_workers(site: Sites) -> None:
    s = site()
    s.start(num_workers=1)
    s.servers[0].delay_seconds = 60
    call = s.submit("1")
    s.wait_for(lambda: s.servers[0].num_calls, "no call")
    s.router.fail(EngineError("vllm-0 died too often"))
    trajectory = call.result(240)
    assert trajectory.failure.boundary is Boundary.ENGINE
    assert "died too often" in trajectory.failure.message


@pytest.mark.slow
def test_a_server_that_dies_costs_no_trajectory(site: Sites) -> None:
    s = site(num_servers=2)
    s.start(num_workers=2)
    s.wait_until_ready()
    for server in s.servers:
        server.delay_seconds = 2.0
    calls = [s.submit("1", number=number) for number in range(8)]
    s.wait_for(lambda: sum(server.num_calls for server in s.servers) == 8, "no calls")
    s.background.run(s.servers[0].close(), 10)
    assert [call.result(240).failure for call in calls] == [None] * 8
    metrics = s.router.take_fault_metrics()
    assert metrics["server_failures"] == 1
    assert metrics["resampled_calls"] >= 1
    s.background.run(s.servers[0].open(), 10)
    s.wait_for(lambda: s.router.take_fault_metrics()["num_unhealthy_servers"] == 0, "it is back")


@pytest.mark.slow
def test_a_cancelled_trajectory_ends_there_too(site: Sites) -> None:
    s = site()
    s.start(num_workers=1)
    s.wait_until_ready(1)
    call = s.submit("await asyncio.sleep(600)")
    s.wait_for(lambda: s.servers[0].num_calls, "no call")
    call.cancel()
    s.wait_for(lambda: s.workers._workers[0].num_running == 0, "it still runs")
    [trajectory] = s.run("1")
    assert trajectory.failure is None


@pytest.mark.slow
def test_closing_leaves_no_process_and_waits_for_nothing(site: Sites) -> None:
    s = site()
    s.start(num_workers=2)
    s.wait_until_ready()
    s.submit("time.sleep(600)")
    s.submit("await asyncio.sleep(600)", number=1)
    s.wait_for(lambda: s.servers[0].num_calls == 2, "no calls")
    below = [p for pid in s.pids for p in psutil.Process(pid).children(recursive=True)]
    assert len(below) == 2
    started = time.monotonic()
    s.workers.close()
    assert time.monotonic() - started < 15
    assert not any(process.is_running() for process in below)


@pytest.mark.slow
def test_no_worker_outlives_a_killed_trainer(site: Sites) -> None:
    s = site()
    code = """
        import pathlib, sys, time
        from transformers import PreTrainedTokenizerFast
        from agentrl_cli.config.experiment import ExperimentConfig
        from agentrl_cli.config.resolved_run import Machine, resolve_run
        from agentrl_cli.engine.protocol import ServerEndpoint
        from agentrl_cli.launch.processes.trainer_protocol import RunningServers
        from agentrl_cli.launch.rollout_workers.rollout_pool import RolloutWorkers
        from agentrl_cli.log import SilentObserver
        from agentrl_cli.rollout.background_loop import BackgroundLoop
        config = ExperimentConfig.model_validate_json(sys.argv[1])
        endpoint = ServerEndpoint(name="vllm-0", base_url="http://127.0.0.1:9", api_key="k")
        run = resolve_run(config, Machine(), purpose="train")
        workers = RolloutWorkers(config, 2, ["train"], SilentObserver())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model.path)
        servers = RunningServers(run=run, endpoints=(endpoint,))
        workers.start(BackgroundLoop(), servers, config.model.path, tokenizer, pathlib.Path("logs"))
        while len(workers._workers) < 2:
            time.sleep(0.05)
        print("ready", flush=True)
        time.sleep(600)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), s.configure().model_dump_json()],
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"ready\n"
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert len(below) == 4, "a reaper and a worker each"
    finally:
        trainer.kill()
        trainer.communicate()
    s.wait_for(lambda: not any(map(is_alive, below)), "they live on")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_worker_has_its_share_of_what_all_may_start(site: Sites) -> None:
    config = site().configure(
        reward_workers=3, subprocess={"max_processes": 8}, agent_mode="subprocess"
    )
    shares = [share_limits(config, index, 3).rollout for index in range(3)]
    assert [share.subprocess.max_processes for share in shares] == [3, 3, 2]
    assert [share.reward_workers for share in shares] == [1, 1, 1]
    assert {share.num_workers for share in shares} == {0}


def test_rows_that_would_not_arrive_as_they_are_are_refused() -> None:
    class Local:
        def check_rows(self, rows: Any, where: str) -> None:
            """All are good."""

    workflow = RemoteWorkflow(None, "train", Local())  # type: ignore[arg-type]
    workflow.check_rows([{"question": "x", "n": [1, {"a": None}]}], "train_dataset")
    with pytest.raises(DatasetError, match=r"row 2 .*image is bytes.*type rollout.num_workers=0"):
        workflow.check_rows([{"question": "x"}, {"image": b"x"}], "train_dataset")
