from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.config_file import load_config_as
from agentrl_cli.config.sft_config import SftConfig
from agentrl_cli.errors import DatasetError, ModelError, StoppedError
from agentrl_cli.log import Observer, SilentObserver
from agentrl_cli.models import builtin_models, sft_training
from agentrl_cli.models.builtin_models import (
    build_calculator_config,
    compute_digest,
    resolve_cache_folder,
    resolve_model_folder,
)
from agentrl_cli.models.calculator_tasks import (
    CALCULATE_TOOL,
    SYSTEM_PROMPT,
    build_demonstrations,
    build_rows,
    draw_question,
)
from builders.calculator_agent import calculate

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_yaml_is_what_the_built_in_model_is_made_from() -> None:
    written = load_config_as(SftConfig, CONFIGS / "sft-calculator.yaml")
    assert written == build_calculator_config(written.output_path)


def pairs(split: str) -> set[tuple[int, ...]]:
    return {tuple(sorted(map(int, re.findall(r"\d+", r["question"])))) for r in build_rows(split)}


def test_rows_are_distinct_and_the_same_every_time() -> None:
    rows = build_rows("train")
    assert rows == build_rows("train") == build_rows()
    assert len({row["question"] for row in rows}) == len(rows) == 4096
    assert len(build_rows("test")) == 512
    assert all(set(row) == {"question", "answer"} for row in rows)


def test_held_out_pairs_of_numbers_never_occur_in_training() -> None:
    assert pairs("train").isdisjoint(pairs("test"))


def test_the_expression_solves_the_question() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        question = draw_question(rng, "train")
        assert calculate(question.expression) == str(question.answer)
        assert question.answer > 0
        assert re.split(r"[-+*]", question.expression) == re.findall(r"\d+", question.text)
        assert list(question.numbers) == re.findall(r"\d+", question.text)


def test_unknown_split() -> None:
    with pytest.raises(DatasetError, match=r"'tests'.*did you mean 'test'"):
        build_rows("tests")


def test_demonstrations_come_in_their_parts_by_the_seed_alone() -> None:
    sizes = {"num_bare_rows": 50, "num_tool_rows": 50, "num_mixed_rows": 1000, "tool_rate": 0.3}
    rows = build_demonstrations(**sizes)
    assert rows == build_demonstrations(**sizes) != build_demonstrations(seed=2, **sizes)
    assert len(rows) == 1100
    for row in rows[:50]:
        assert "tools" not in row
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    for row in rows[50:]:
        assert row["tools"] == [CALCULATE_TOOL]
        assert row["messages"][0] == {"role": "system", "content": SYSTEM_PROMPT}
    for row in rows[:100]:
        called, result, answer = row["messages"][-3:]
        assert result["tool_call_id"] == called["tool_calls"][0]["id"]
        assert result["content"] == answer["content"]
    num_calls = sum(len(row["messages"]) == 5 for row in rows[100:])
    assert 250 <= num_calls <= 350


def test_a_changed_recipe_is_another_model(monkeypatch):
    digest = compute_digest()
    assert digest == compute_digest()
    changed = build_calculator_config("").model_copy(update={"seed": 2})
    monkeypatch.setattr(builtin_models, "build_calculator_config", lambda _: changed)
    assert compute_digest() != digest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were made, in no time."""
    made: list[str] = []
    monkeypatch.setattr(
        sft_training,
        "train_and_save",
        lambda config, *_: made.append(config.output_path) or Path(config.output_path).mkdir(),
    )
    return made


def resolve(observer: Observer | None = None, **arguments: Any) -> Path:
    observer = observer or SilentObserver()
    return Path(resolve_model_folder("builtin:calculator", observer, **arguments))


def test_where_the_cache_is(tmp_path, cache, monkeypatch):
    assert resolve_cache_folder() == cache
    monkeypatch.delenv("AGENTRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cache_folder() == tmp_path / "agentrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_cache_folder() == tmp_path / ".cache" / "agentrl"


def test_made_on_first_use_and_kept(cache, made):
    assert resolve() == resolve() == cache / f"calculator-{compute_digest()}"
    assert len(made) == 1


def test_two_at_once_make_it_once(cache, monkeypatch):
    started, released = threading.Event(), threading.Event()
    messages: list[str] = []
    calls: list[str] = []

    class Listener(SilentObserver):
        def on_message(self, text: str) -> None:
            messages.append(text)
            released.set()

    def make(config: SftConfig, *_: object) -> None:
        calls.append(config.output_path)
        started.set()
        assert released.wait(20)
        Path(config.output_path).mkdir()

    monkeypatch.setattr(sft_training, "train_and_save", make)
    first = threading.Thread(target=resolve)
    first.start()
    assert started.wait(20)
    resolve(Listener())
    first.join(20)
    assert len(calls) == 1
    assert "another process is making calculator-" in messages[0]


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(ModelError, match="AGENTRL_CACHE=SOME_FOLDER"):
        resolve()


@pytest.mark.slow
def test_a_killed_process_does_not_hold_the_lock(cache, made):
    code = (
        "import os, sys, types\n"
        "from agentrl_cli.models import builtin_models\n"
        "from agentrl_cli.log import SilentObserver\n"
        "maker = types.SimpleNamespace(train_and_save=lambda *_: os._exit(9))\n"
        "sys.modules['agentrl_cli.models.sft_training'] = maker\n"
        "builtin_models.resolve_model_folder('builtin:calculator', SilentObserver())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert ended.returncode == 9
    assert resolve().is_dir()
    assert len(made) == 1


def test_waiting_for_another_process_can_be_stopped(cache, monkeypatch):
    def stop() -> None:
        raise StoppedError

    def make(config: SftConfig, *_: object) -> None:
        with pytest.raises(StoppedError):
            resolve(check_stop=stop)
        Path(config.output_path).mkdir()

    monkeypatch.setattr(sft_training, "train_and_save", make)
    assert resolve().is_dir()
