"""Messages as lines: whole, in order, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.rollout import worker_channel
from agentrl_cli.rollout.worker_channel import Channel, ChannelError, encode_message
from agentrl_cli.rollout.worker_log import WorkerLog
from agentrl_cli.rollout.worker_process import build_environment

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def ends():
    first, second = (Channel(end) for end in socket.socketpair())
    yield first, second
    first.close()
    second.close()


@given(messages=st.lists(st.dictionaries(st.text(), VALUES), min_size=1, max_size=4))
def test_messages_arrive_as_they_were_sent(messages):
    first, second = (Channel(end) for end in socket.socketpair())
    for message in messages:
        first.send({**message, "op": "x"})
    assert [second.receive() for _ in messages] == [{**m, "op": "x"} for m in messages]
    first.close()
    assert second.receive() is None
    second.close()


async def test_long_messages_pass_between_tasks(ends):
    first, second = ends
    message = {"op": "run", "row": {"text": "ä\ud800" * 500_000}}
    received, _ = await asyncio.gather(second.receive_async(), first.send_async(message))
    assert received == message


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b'{"no": "op"}', b'{"op": 3}', b"\xff\xfe", b"[" * 99_999]
)
def test_what_is_no_message_is_refused(ends, line):
    first, second = ends
    first.socket.sendall(line + b"\n")
    with pytest.raises(ChannelError):
        second.receive()


def test_lines_have_a_limit(ends, monkeypatch):
    monkeypatch.setattr(worker_channel, "MAX_MESSAGE_BYTES", 1000)
    first, second = ends
    with pytest.raises(ChannelError, match="1000"):
        first.send({"op": "x", "text": "x" * 1000})
    first.socket.sendall(b"x" * 1100)
    with pytest.raises(ChannelError, match="longer than 1000"):
        second.receive()
    with pytest.raises(ChannelError, match="not JSON serializable"):
        encode_message({"op": "x", "value": object()})


def test_descriptors_come_with_their_messages(ends):
    first, second = ends
    pipes = [os.pipe() for _ in range(2)]
    for number, (reading, _) in enumerate(pipes):
        first.send({"op": "start", "worker": number}, [reading])
    messages = []
    while len(messages) < 2:
        messages += second.take_pending() or []
    for message, (reading, writing) in zip(messages, pipes, strict=True):
        received = second.descriptors.popleft()
        os.write(writing, str(message["worker"]).encode())
        assert os.read(received, 10) == str(message["worker"]).encode()
        for descriptor in (received, reading, writing):
            os.close(descriptor)


async def test_a_closed_channel_leaves_nothing_with_the_loop(ends):
    first, _ = ends
    waiting = asyncio.create_task(first.receive_async())
    await asyncio.sleep(0)
    number = first.socket.fileno()
    first.close()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    # The number may be another socket's by now: nobody must watch it.
    assert asyncio.get_running_loop().remove_reader(number) is False


def test_the_log_says_whose_line_it_is_and_keeps_no_key(tmp_path):
    log = WorkerLog()
    log.write(1, b"early\n")
    log.open(tmp_path / "x.log")
    log.label(1, "000001.000/0")
    log.write(1, b"one\ntw")
    log.write(2, "grüße\n".encode())
    log.write(1, b"o\nkey sk-agentrl-0123456789\nno end")
    assert log.forget(1) == ["one", "two", "key ***", "no end"]
    log.close()
    assert (tmp_path / "x.log").read_text().splitlines() == [
        "agent worker | early",
        "000001.000/0 | one",
        "agent worker | grüße",
        "000001.000/0 | two",
        "000001.000/0 | key ***",
        "000001.000/0 | no end",
    ]


def test_a_trajectory_that_prints_for_ever_does_not_fill_the_disk(tmp_path):
    log = WorkerLog()
    log.open(tmp_path / "x.log")
    log.label(1, "first")
    for number in range(5000):
        log.write(1, b"%d %s\n" % (number, b"x" * 2000))
    log.label(1, "second")
    log.write(1, b"heard\n")
    log.close()
    lines = (tmp_path / "x.log").read_text().splitlines()
    assert (tmp_path / "x.log").stat().st_size < 5 * 2**20
    assert lines[-2:] == ["first | (what it wrote after 4 MiB is not kept)", "second | heard"]


def test_a_log_that_cannot_be_written_is_an_error_to_tell(tmp_path):
    log = WorkerLog()
    log.open(tmp_path / "nowhere" / "x.log")
    assert "No such file" in (log.error or "")
    log.write(1, b"goes on\n")
    assert log.forget(1) == ["goes on"]


def test_the_environment_leads_to_the_model_and_past_every_proxy():
    environment = {"NO_PROXY": "example.org", "HTTP_PROXY": "http://proxy", "OPENAI_API_KEY": "own"}
    changed = build_environment(environment, "http://127.0.0.1:5/v1", "key")
    assert changed["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert changed["no_proxy"] == "127.0.0.1,localhost"
    assert changed["HTTP_PROXY"] == "http://proxy"
    assert changed["OPENAI_API_KEY"] == changed["ANTHROPIC_API_KEY"] == "key"
    assert changed["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:5"
    assert environment["OPENAI_API_KEY"] == "own"


def test_the_agents_sdk_sends_no_traces_and_no_settings_of_another_model():
    changed = build_environment({"OPENAI_DEFAULT_MODEL": "gpt-5"}, "http://127.0.0.1:5/v1", "key")
    assert changed["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    assert not changed["OPENAI_DEFAULT_MODEL"].startswith("gpt")
