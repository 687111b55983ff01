from __future__ import annotations

from pathlib import Path

import pytest

from agentrl_cli.config.loading import load_config, load_config_as
from agentrl_cli.config.sft import SftConfig
from agentrl_cli.log import SilentObserver
from agentrl_cli.models import calculator
from agentrl_cli.models.calculator import build_calculator_config, compute_digest
from agentrl_cli.models.calculator_demos import build_demonstrations
from agentrl_cli.models.calculator_prompt import CALCULATE_TOOL, SYSTEM_PROMPT
from agentrl_cli.models.loading import resolve_model_folder

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_yaml_is_what_the_built_in_model_is_made_from() -> None:
    written = load_config_as(SftConfig, CONFIGS / "sft-calculator.yaml")
    assert written == build_calculator_config(written.output_path)


def test_quickstart_is_valid() -> None:
    config = load_config(CONFIGS / "quickstart.yaml")
    assert config.model.path == "builtin:calculator"
    config.check_trainable()


def test_demonstrations_come_in_their_parts() -> None:
    rows = build_demonstrations(
        num_bare_rows=50, num_tool_rows=50, num_mixed_rows=1000, tool_rate=0.3
    )
    assert len(rows) == 1100
    for row in rows[:50]:
        assert "tools" not in row
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    for row in rows[50:]:
        assert row["tools"] == [CALCULATE_TOOL]
        assert row["messages"][0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert all(len(row["messages"]) == 5 for row in rows[50:100])
    num_calls = sum(len(row["messages"]) == 5 for row in rows[100:])
    assert 250 <= num_calls <= 350


def test_calls_are_answered_by_their_results() -> None:
    for row in build_demonstrations(num_bare_rows=0, num_tool_rows=200, num_mixed_rows=0):
        _, _, called, result, answer = row["messages"]
        call = called["tool_calls"][0]
        assert result["tool_call_id"] == call["id"]
        assert result["content"] == answer["content"]


def test_demonstrations_depend_on_the_seed_alone() -> None:
    sizes = {"num_bare_rows": 5, "num_tool_rows": 5, "num_mixed_rows": 5}
    assert build_demonstrations(seed=1, **sizes) == build_demonstrations(seed=1, **sizes)
    assert build_demonstrations(seed=1, **sizes) != build_demonstrations(seed=2, **sizes)


def test_a_changed_recipe_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = compute_digest()
    assert digest == compute_digest()
    original = build_calculator_config

    def change(output_path: str) -> SftConfig:
        return original(output_path).model_copy(update={"seed": 2})

    monkeypatch.setattr(calculator, "build_calculator_config", change)
    assert compute_digest() != digest


def test_made_on_first_use_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    made: list[str] = []

    def make(config: SftConfig, start_path: None, *_: object) -> None:
        made.append(config.output_path)
        Path(config.output_path).mkdir()

    monkeypatch.setattr(calculator, "train_and_save", make)
    folder = resolve_model_folder("builtin:calculator", SilentObserver())
    assert folder == resolve_model_folder("builtin:calculator", SilentObserver())
    assert folder == str(tmp_path / f"calculator-{compute_digest()}")
    assert len(made) == 1
