"""The command as a person types it in a folder of their own, the test's ``tmp_path``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked_commands import ForkedCommand, command_environment

PROJECT = Path(__file__).parents[3]
AGENT = """\
def build(client, model):
    async def run(data):
        messages = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model=model, messages=messages)
        return float(len(reply.choices[0].message.content or "") % 2)
    return run
"""
CONFIG = """\
experiment_name: demo
model: {path: tiny, dtype: float32}
agent_builder_path: agent.py:build
gconfig: {n_samples: 4, max_tokens: 8}
train_dataset: {path: tasks.jsonl, batch_size: 2}
valid_dataset: {path: tasks.jsonl}
engine: {kind: embedded, max_model_len: 128}
train: {total_steps: 5000, learning_rate: 1.0e-3}
"""


def _environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "AGENTRL_API_KEY"}
    return env | command_environment() | {"CUDA_VISIBLE_DEVICES": ""} | more


class Command:
    """A running ``agentrl``, and what it has printed."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        self.process = ForkedCommand(
            list(arguments),
            cwd=folder,
            env=_environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.text = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.text += line
                    self._changed.notify_all()

    def wait_for(self, text: str, seconds: float = 120) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.text, seconds), self.text

    def signal(self, number: int, *, at: str) -> None:
        """Sends a signal once it has printed ``at``."""
        self.wait_for(at)
        self.process.send_signal(number)

    def end(self, seconds: float = 300) -> int:
        """The exit code; nothing that it prints is a traceback."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        assert "Traceback" not in self.text
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts a command: ``start("serve", "--config", "c.yaml")``."""
    started: list[Command] = []

    def run(*arguments: str, **env: str) -> Command:
        started.append(Command(tmp_path, *arguments, **env))
        return started[-1]

    yield run
    for command in started:
        command.process.kill()
        command.process.wait()
        command._reader.join(10)


@pytest.fixture
def run_here(tmp_path: Path) -> Callable[..., str]:
    """What a command prints that ends with a code: ``run_here(2, "train", "--config", "c.yaml")``.
    What went to stderr comes first, so that JSON is the end."""

    def run(code: int, *arguments: str, **env: str) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with ForkedCommand(
            list(arguments), cwd=tmp_path, env=_environment(**env), **pipes
        ) as command:
            printed, said = command.communicate(timeout=300)
        assert command.returncode == code, said + printed
        assert "Traceback" not in said + printed
        return said + printed

    return run


@pytest.fixture
def finish(run_here: Callable[..., str]) -> Callable[..., str]:
    """What a command prints that ends well."""
    return partial(run_here, 0)


@pytest.fixture
def refused(run_here: Callable[..., str]) -> Callable[..., str]:
    """What a command prints that refuses its input."""
    return partial(run_here, 2)


@pytest.fixture
def tiny(tmp_path: Path, model_folder: Any) -> Path:
    """A random model of two layers in the user's folder."""
    return Path(shutil.copytree(model_folder, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium: the one that AGENTRL_CHROMIUM names, or an installed one.

    Not for a session: Playwright keeps an event loop running, beside which no other can run.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("AGENTRL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(names)}; AGENTRL_CHROMIUM may name one")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """A page that is open, and what went wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        context.set_default_timeout(20_000)
        self.page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))

    def open(self, address: str) -> None:
        self.page.goto(address)

    def see(self, text: str, within: str = "main") -> Any:
        found = self.page.locator(within).get_by_text(text).first
        found.wait_for()
        return found

    def focused(self) -> str:
        return self.page.evaluate("document.activeElement.textContent")

    def tab_to(self, selector: str) -> None:
        """Presses Tab until an element has the focus."""
        for _ in range(80):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(f"document.activeElement.matches({selector!r})"):
                return
        raise AssertionError(f"Tab does not reach {selector}")


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def open_tab(address: str, **options: Any) -> Tab:
        opened.append(Tab(browser, **options))
        opened[-1].open(address)
        return opened[-1]

    yield open_tab
    for one in opened:
        one.page.context.close()
        assert one.errors == []


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    """A user's folder, with a random model of two layers in it."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "c.yaml").write_text(CONFIG)
    rows = [json.dumps({"question": f"What is 1 plus {n}?"}) for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    return tmp_path
