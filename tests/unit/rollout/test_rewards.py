"""Reward functions of every kind: called by keyword, judged by what they return."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import signal
import threading

import numpy as np
import pytest
import torch
from pebble import ProcessPool

from agentrl_cli.config.experiment import RolloutConfig, count_usable_cores
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.errors import DatasetError, RewardError, RewardSignatureError
from agentrl_cli.rollout.reward_process import parse_reward_result
from agentrl_cli.rollout.rewards import (
    MAX_STUCK_THREADS,
    AsyncRewardWrapper,
    find_import_path,
)
from rewards.gsm8k import gsm8k_reward_fn

WORKER_FILE = """
import os, time

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def pid(**kwargs):
    return os.getpid()

def group(**kwargs):
    return os.getpgid(0)

def fail(completions):
    raise ValueError(f"cannot judge {completions}")

def fail_oddly():
    raise Odd(1, 2)

def hang(completions):
    time.sleep(60 if completions == "slow" else 0)
    return 1.0

def late_of_its_own():
    raise TimeoutError("my own")

def die(completions):
    if completions == "slow":
        os._exit(3)
    return 1.0

def leave(completions):
    raise SystemExit(0)

async def leave_async(completions):
    raise SystemExit(0)

def work(completions):
    time.sleep(0.3)
    return 1.0

def count(**kwargs):
    return {"reward": len(kwargs), "first": 1}
"""


@pytest.fixture
def wrap(tmp_path):
    """Wraps a function of a file outside the import path, as ``path/to/file.py:name``."""
    path = tmp_path / "my_rewards.py"
    path.write_text(WORKER_FILE)
    wrappers = []

    def build(name, **options):
        import_path = f"{path}:{name}"
        fn = import_object(import_path, "reward_fn_path")
        wrappers.append(AsyncRewardWrapper(fn, import_path=import_path, **options))
        return wrappers[-1]

    yield build
    for wrapper in wrappers:
        wrapper.close()


@pytest.mark.parametrize("result", ["1.0", [1.0], float("inf"), torch.zeros(2)])
def test_what_is_no_number_is_refused(result):
    with pytest.raises(RewardError, match="Allowed: a number"):
        parse_reward_result(result)


def test_parts_are_kept_and_reward_is_required():
    assert parse_reward_result(float("nan")) == (None, {})
    parts = {"reward": 1, "format": True, "style": np.float32(0.5), "unknown": None}
    assert parse_reward_result(parts) == (1.0, {"format": 1.0, "style": 0.5})
    with pytest.raises(RewardError, match=r"without 'reward'.*it has: total"):
        parse_reward_result({"total": 1})


async def test_async_functions_are_awaited_here_with_what_they_name():
    async def reward_fn(completions, answer, bonus=2):
        return (completions == answer) + bonus

    wrapper = AsyncRewardWrapper(reward_fn)
    assert await wrapper(completions="4", answer="4", prompt="2+2", question="x") == 3.0
    with pytest.raises(RewardSignatureError, match="needs answer; supplied were: completions"):
        await wrapper(completions="4")


async def test_async_deadline_is_told_from_the_functions_own_timeout():
    async def hang():
        await asyncio.sleep(60)

    async def own():
        raise TimeoutError("my own")

    with pytest.raises(RewardError, match=r"did not finish in 0.05 seconds"):
        await AsyncRewardWrapper(hang, timeout_seconds=0.05)()
    with pytest.raises(TimeoutError, match="my own"):
        await AsyncRewardWrapper(own, timeout_seconds=5)()


async def test_blocking_functions_run_in_another_process(wrap):
    wrapper = wrap("pid")
    assert await wrapper(completions="") != os.getpid()
    # Ctrl-C of the terminal does not reach it.
    assert await wrap("group")() != os.getpgid(0)
    parts = await wrap("count").score(completions="", answer="", question="")
    assert (parts.reward, parts.parts) == (3.0, {"first": 1.0})


async def test_exceptions_come_back_with_the_workers_traceback(wrap):
    with pytest.raises(ValueError, match="cannot judge x") as caught:
        await wrap("fail")(completions="x")
    assert "my_rewards.py" in "".join(caught.value.__notes__)
    # This one cannot be unpickled, so it comes back in words.
    with pytest.raises(RewardError, match="Odd: 1"):
        await wrap("fail_oddly")()
    with pytest.raises(TimeoutError, match="my own"):
        await wrap("late_of_its_own")()


@pytest.mark.parametrize(
    ("name", "message"), [("hang", r"did not finish in 1 seconds"), ("die", "died")]
)
async def test_a_process_that_hangs_or_dies_is_an_error_and_is_replaced(wrap, name, message):
    wrapper = wrap(name, timeout_seconds=1.0)
    assert await wrapper(completions="fast") == 1.0
    async with asyncio.timeout(10):
        with pytest.raises(RewardError, match=message):
            await wrapper(completions="slow")
    assert await wrapper(completions="fast") == 1.0


async def test_functions_without_a_name_run_in_threads():
    main = threading.get_ident()
    seen = []

    def nested(completions):
        seen.append(threading.get_ident())
        return len(completions)

    assert find_import_path(nested) is None
    assert await AsyncRewardWrapper(nested)(completions="abc") == 3.0
    assert await AsyncRewardWrapper(lambda completions: len(completions))(completions="a") == 1.0
    assert await AsyncRewardWrapper(functools.partial(nested, completions="ab"))() == 2.0
    assert main not in seen


async def test_stuck_threads_do_not_hold_up_others_and_are_counted():
    release = threading.Event()

    def reward_fn(completions):
        if completions == "slow":
            release.wait(60)
        return 1.0

    wrapper = AsyncRewardWrapper(reward_fn, timeout_seconds=0.05)
    for _ in range(MAX_STUCK_THREADS):
        with pytest.raises(RewardError, match="did not finish"):
            await wrapper(completions="slow")
    with pytest.raises(RewardError, match="Put the function into a module"):
        await wrapper(completions="fast")
    release.set()
    while wrapper._workers._num_stuck:
        await asyncio.sleep(0.01)
    assert await wrapper(completions="fast") == 1.0


def test_import_paths_of_functions(wrap):
    assert find_import_path(gsm8k_reward_fn) == "rewards.gsm8k:gsm8k_reward_fn"
    assert find_import_path(functools.partial(gsm8k_reward_fn)) is None
    wrapper = wrap("pid")
    assert find_import_path(wrapper._fn) == wrapper.name


def test_signature_is_held_against_the_dataset():
    rows = [{"question": "a", "answer": "1"}, {"question": "b"}]

    def by_answer(completions, answer): ...
    def by_solution(completions, solution): ...
    def lenient(completions, solution=None, **kwargs): ...

    AsyncRewardWrapper(lenient).check_rows(rows, "train_dataset")
    with pytest.raises(DatasetError, match=r"train_dataset: row 2 .* no field 'answer'"):
        AsyncRewardWrapper(by_answer).check_rows(rows, "train_dataset")
    with pytest.raises(
        RewardSignatureError, match=r"nothing supplies its argument 'solution'.*answer, question"
    ):
        AsyncRewardWrapper(by_solution).check_rows(rows, "train_dataset")


def test_what_is_no_function_or_not_callable_by_keyword_is_refused():
    def positional(completions, /): ...

    with pytest.raises(RewardSignatureError, match="positional-only"):
        AsyncRewardWrapper(positional)
    with pytest.raises(RewardSignatureError, match="is float, not a function"):
        AsyncRewardWrapper(0.5)


async def test_reward_processes_that_were_killed_are_replaced(wrap):
    wrapper = wrap("pid")
    first = await wrapper()
    assert first is not None
    os.kill(int(first), signal.SIGKILL)
    for _ in range(100):
        try:
            second = await wrapper()
            break
        except RewardError:
            await asyncio.sleep(0.05)
    assert second not in (None, first)


@pytest.mark.parametrize("name", ["leave", "leave_async"])
async def test_exit_in_a_reward_function_ends_its_trajectory_alone(wrap, name):
    with pytest.raises(RewardError, match=r"the reward function called exit\(0\)"):
        await wrap(name)(completions="4")


async def test_exit_in_a_reward_function_that_runs_in_a_thread():
    def leave():
        raise SystemExit(0)

    with pytest.raises(RewardError, match=r"the reward function called exit\(0\)"):
        await AsyncRewardWrapper(leave)()


async def test_a_call_that_waits_for_a_worker_is_not_late(wrap):
    wrapper = wrap("work", timeout_seconds=1.0, num_workers=1)
    assert await asyncio.gather(*[wrapper(completions="4") for _ in range(5)]) == [1.0] * 5


async def test_a_call_whose_time_went_by_while_the_command_was_stopped_is_made_again(
    wrap, monkeypatch
):
    schedule, stopped = ProcessPool.schedule, [TimeoutError()]

    def schedule_later(pool, *arguments, **options):
        calling = schedule(pool, *arguments, **options)
        if stopped:
            calling = concurrent.futures.Future()
            calling.set_exception(stopped.pop())
        return calling

    monkeypatch.setattr(ProcessPool, "schedule", schedule_later)
    assert await wrap("work")(completions="4") == 1.0


def test_the_deadline_of_a_batch_counts_the_calls_that_wait_for_each_other():
    # Each of 64 calls may take just under its deadline, one after the other.
    rollout = RolloutConfig(reward_workers=2, reward_timeout_seconds=5.0, timeout_seconds=1.0)
    assert rollout.compute_deadline(64) >= 64 / 2 * 5.0 + 1.0
    assert RolloutConfig().reward_workers is None
    wrapper = AsyncRewardWrapper(hang_for_ever)
    assert wrapper._workers._num_workers == count_usable_cores()


def hang_for_ever():
    threading.Event().wait()
