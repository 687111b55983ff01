"""An evaluation whose trajectories rollout workers make, as the command runs it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import DatasetError
from agentrl_cli.launch.completion_sources import EngineSource
from agentrl_cli.launch.local_run import run_evaluation
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.log import SilentObserver
from agentrl_cli.store.layout import run_dir_of
from agentrl_cli.store.run_folder import RunFolder


@pytest.fixture
def open_source(
    site: Callable[..., Any], chat_tokenizer: Any, build_qwen2: Callable[..., Any]
) -> Callable[..., Any]:
    """A source over a stub server, with two rollout workers, and its configuration."""

    def make(*rows: dict[str, Any]) -> tuple[Any, Any]:
        s = site()
        build_qwen2(chat_tokenizer).save_pretrained(s.folder / "model")
        (s.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = s.configure(num_workers=2).model_copy(update={"output_dir": str(s.folder)})
        dataset = config.train_dataset.model_copy(update={"path": str(s.folder / "rows.jsonl")})
        config = config.model_copy(update={"train_dataset": dataset})
        run = resolve_run(config, Machine(), purpose="eval")
        url = f"http://127.0.0.1:{s.servers[0].port}"
        endpoint = ServerEndpoint(name="vllm-0", base_url=url, api_key="k")
        servers = RunningServers(run=run, endpoints=(endpoint,))
        return config, EngineSource(config, run, s.messages, servers=servers)

    return make


@pytest.mark.slow
def test_the_report_and_the_store_are_those_of_any_evaluation(open_source: Any) -> None:
    config, source = open_source(*({"question": f"{n} / 4"} for n in range(4)))
    label, report = run_evaluation(config, source, limit=None, observer=SilentObserver())
    assert report.mean_reward == pytest.approx((0 + 1 + 2 + 3) / 16)
    folder = RunFolder.open(run_dir_of(config))
    stored, _ = folder.read_eval(0, label=label)
    assert sorted(t.reward for t in stored) == [0.0, 0.25, 0.5, 0.75]
    assert {log.name for log in folder.log_dir("eval").iterdir()} >= {
        "rollout-0.log",
        "rollout-1.log",
    }


def test_rows_are_looked_at_before_anything_starts(
    open_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, source = open_source({"question": "1"})
    rows = [{"question": "1", "day": datetime.date(2026, 1, 1)}]
    monkeypatch.setattr("agentrl_cli.launch.local_run.take_rows", lambda *_: rows)
    with pytest.raises(DatasetError, match=r"row 1 .* day is date, .*rollout.num_workers=0"):
        run_evaluation(config, source, limit=None, observer=SilentObserver())
