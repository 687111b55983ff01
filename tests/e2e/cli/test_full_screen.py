"""``agentrl inspect-trajectories RUN`` as it is typed at a terminal of 80 x 24."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.slow,
]

#: Of a machine that has many other things to do.
_DEADLINE_SECONDS = 60.0


class Terminal:
    """A shell in a terminal, and what is on its screen."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", os.devnull]
        self._run("new-session", "-d", "-x", "80", "-y", "24", "env -u CI PS1='ready> ' sh")
        self.wait_for(lambda text: "ready>" in text)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def wait_for(self, is_there: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not is_there(text := self.screen):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        return text

    def close(self) -> None:
        """Ends the terminal, if it is still there."""
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False, timeout=30)


@pytest.fixture
def terminal(tmp_path_factory) -> Iterator[Terminal]:
    # A socket's path may have about 100 characters.
    terminal = Terminal(tmp_path_factory.mktemp("t") / "s")
    yield terminal
    terminal.close()


@pytest.fixture
def run(tmp_path: Path, run_config: Callable[[], ExperimentConfig]) -> Path:
    call = Interaction(
        id="c1",
        messages=({"role": "user", "content": "What is 17 x 23?"},),
        reply={"role": "assistant", "content": "391, I think"},
        prompt_ids=(1, 2),
        completion_ids=(3, 4),
        rollout_logprobs=(-0.5, -0.25),
        versions=(0, 0),
    )
    trajectories = [
        Trajectory(
            id=f"000001.000/{number}",
            group_id="000001.000",
            task_id="5",
            step=1,
            task={"question": "What is 17 x 23?", "answer": "391"},
            interactions=(call,),
            reward=float(number),
        )
        for number in range(2)
    ]
    with RunFolder.create_or_resume(run_config()) as folder:
        folder.write_trajectories(1, trajectories)
        folder.append_metrics({"step": 1, "reward_mean": 0.5, "reward_std": 0.707})
        return folder.path


def type_command(terminal: Terminal, run: Path, options: str = "") -> None:
    python = shlex.join([sys.executable, "-m", "agentrl_cli", "inspect-trajectories", str(run)])
    terminal.type(f"clear; {python} {options}; echo exit=$?; stty -a | grep -o ' echo '")
    terminal.press("Enter")


def is_back(text: str) -> bool:
    """Whether the shell has the terminal again, which echoes what is typed."""
    return text.split()[-2:] == ["echo", "ready>"] and "\nexit=" in f"\n{text}"


def test_a_run_is_looked_at_as_a_user_does(terminal: Terminal, run: Path) -> None:
    type_command(terminal, run)
    text = terminal.wait_for(lambda text: "0.707" in text)
    assert "step 1" in text
    assert text.rstrip().splitlines()[-1].split()[:2] == ["⏎", "Open"]
    terminal.press("Enter")
    terminal.wait_for(lambda text: "000001.000   5" in text)
    terminal.press("Enter")
    terminal.wait_for(lambda text: "000001.000/1" in text)
    terminal.press("Down", "Enter")
    # What is loading has no keys.
    terminal.wait_for(lambda text: "assistant: 391, I think" in text and "⏎ Open" in text)
    terminal.press("/")
    terminal.type("think")
    terminal.press("Enter", "Enter")
    terminal.wait_for(lambda text: "id 3  logprob -0.5000  version 0" in text)
    terminal.press("Escape")
    terminal.wait_for(lambda text: "000001.000/1  (2 of 2)" in text)
    terminal.press("q")
    assert "exit=0" in terminal.wait_for(is_back)
    type_command(terminal, run, "--plain")
    assert "its trajectories:" in terminal.wait_for(is_back)


@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM"])
def test_whatever_ends_it_leaves_the_terminal_clean(
    terminal: Terminal, run: Path, way: str
) -> None:
    type_command(terminal, run)
    terminal.wait_for(lambda text: "0.707" in text)
    if way == "Ctrl-C":
        terminal.press("C-c")
    else:
        os.kill(find_process(run), getattr(signal, way))
    assert "Traceback" not in terminal.wait_for(is_back)


def test_it_ends_with_its_terminal(terminal: Terminal, run: Path) -> None:
    # As under nohup, where no signal tells it that the terminal is lost.
    terminal.type("trap '' HUP")
    terminal.press("Enter")
    type_command(terminal, run)
    terminal.wait_for(lambda text: "0.707" in text)
    pid = find_process(run)
    terminal.close()
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def find_process(run: Path) -> int:
    """The process that shows the run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[1:4] == ["-m", "agentrl_cli", "inspect-trajectories"] and str(run) in words:
            return int(path.parent.name)
    raise AssertionError("it does not run")
