"""``agentrl check`` on what users get wrong: each mistake is found, with what to do about it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_cli.cli.app import app
from agentrl_cli.cli.command_exit import run_reporting_failures

GOOD = """
async def solve(data, client, model):
    messages = [{"role": "user", "content": data["question"]}]
    completion = await client.chat.completions.create(model=model, messages=messages)
    return completion.choices[0].message.content or ""

def build():
    return solve

async def reward(completions, answer):
    return len(completions) % 2
"""
#: Code that takes the place of what the good file has under that name.
Agent = str

CASES: dict[str, tuple[Agent, Mapping[str, Any], str, str]] = {
    # name: code after the good one, overrides, the finding's code, a part of its remedy
    "the builder returns nothing": (
        "def build():\n    solve\n",
        {},
        "builder",
        "a function of the row",
    ),
    "async def is missing": (
        "good = solve\ndef solve(data, client, model):\n    return good(data, client, model)\n",
        {},
        "failure_agent",
        "write async def",
    ),
    "a client of its own": (
        "async def solve(data):\n    import openai\n"
        "    own = openai.AsyncOpenAI(base_url='http://127.0.0.1:9/v1', api_key='x')\n"
        "    try:\n        return str(await own.with_options(max_retries=0).models.list())\n"
        "    except openai.APIConnectionError:\n        return 'no'\n",
        {},
        "model_not_called",
        "def build(client, model)",
    ),
    "all errors swallowed": (
        "async def solve(data, client, model):\n    for _ in range(12):\n        try:\n"
        "            await client.chat.completions.create(model=model, messages='hello')\n"
        "        except Exception:\n            continue\n    return 'no'\n",
        {},
        "errors_swallowed",
        "stop when a call is refused",
    ),
    "the same call again and again": (
        "good = solve\nasync def solve(data, client, model):\n    for _ in range(6):\n"
        "        await good(data, client, model)\n    return 'no'\n",
        {},
        "call_repeated",
        "give up after a few",
    ),
    "an SDK that gives up too soon": (
        "async def solve(data, client, model):\n"
        "    messages = [{'role': 'user', 'content': data['question']}]\n"
        "    again = {'x-stainless-retry-count': '1'}\n"
        "    for headers in ({}, again):\n"
        "        await client.chat.completions.create(\n"
        "            model=model, messages=messages, extra_headers=headers)\n"
        "    return 'no'\n",
        {},
        "sdk_retries",
        "timeout=600",
    ),
    "history edited": (
        "async def solve(data, client, model):\n"
        "    messages = [{'role': 'user', 'content': data['question']}]\n"
        "    for _ in range(2):\n"
        "        done = await client.chat.completions.create(model=model, messages=messages)\n"
        "        said = (done.choices[0].message.content or '')[:1] + ' (shortened)'\n"
        "        messages += [{'role': 'assistant', 'content': said},\n"
        "                     {'role': 'user', 'content': 'go on'}]\n"
        "    return said\n",
        {},
        "prefix_mismatch_history_edited",
        "append the reply as it came",
    ),
    "the reward is text": (
        "async def reward(completions):\n    return 'good'\n",
        {},
        "failure_reward",
        "Allowed: a number",
    ),
    "the reward raises": (
        "async def reward(completions):\n    return 1 / 0\n",
        {},
        "failure_reward",
        "Call the reward function on one answer",
    ),
    "the reward is always the same": (
        "async def reward(completions):\n    return 0.5\n",
        {},
        "reward_constant",
        "tell good answers from bad ones",
    ),
    "the reward is too slow": (
        "import asyncio\nasync def reward(completions):\n    await asyncio.sleep(30)\n",
        {"rollout": {"reward_timeout_seconds": 0.2}},
        "reward_too_slow",
        "rollout.reward_timeout_seconds=0.8",
    ),
    "the reward is missing": (
        "async def reward(completions):\n    return float('nan')\n",
        {},
        "reward_missing",
        "Return a number on every path",
    ),
    "max_tokens is too small": (
        "",
        {"gconfig": {"max_tokens": 2}},
        "replies_cut",
        "gconfig.max_tokens=256",
    ),
    "the template shows no tools": (
        "TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}\n"
        "async def solve(data, client, model):\n"
        "    messages = [{'role': 'user', 'content': data['question']}]\n"
        "    await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])\n"
        "    return 'no'\n",
        {"model": {"chat_template": "bare.jinja"}},
        "template",
        "model.chat_template=hermes-chatml",
    ),
}
_BARE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
#: Published widths of Qwen2.5-7B.
_QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare.jinja").write_text(_BARE)
    rows = [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def _write(folder: Path, code: str, more: Mapping[str, Any]) -> None:
    (folder / "agent.py").write_text(f"{GOOD}\n{code}")
    config: dict[str, Any] = {
        "experiment_name": "demo",
        "model": {"path": "tiny", "dtype": "float32"},
        "agent_builder_path": "agent.py:build",
        "reward_fn_path": "agent.py:reward",
        "gconfig": {"max_tokens": 16},
        "train_dataset": {"path": "tasks.jsonl"},
        "engine": {"max_model_len": 512},
    }
    for key, value in more.items():
        config[key] = {**config.get(key, {}), **value}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


def _check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = run_reporting_failures(lambda: app(["check", "--config", "c.yaml", "--json", *words]))
    return code, json.loads(capsys.readouterr().out)


def _find(report: dict[str, Any], code: str) -> dict[str, Any]:
    found = [f for f in report["findings"] if f["code"] == code]
    assert found, [(f["code"], f["found"]) for f in report["findings"]]
    return found[0]


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_found_with_its_remedy(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, more, name, remedy = CASES[case]
    _write(folder, code, more)
    exit_code, report = _check(capsys, "--tasks", "3")
    finding = _find(report, name)
    assert remedy in " ".join(finding["remedy"].split())
    assert exit_code == int(finding["severity"] == "error" or report["num_errors"] > 0)
    assert not (folder / "runs").exists()


def test_an_agent_that_sleeps_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import time\nasync def solve(data):\n    time.sleep(1.2)\n    return 'no'\n"
    _write(folder, code, {})
    _, report = _check(capsys, "--tasks", "2", "--samples", "1")
    blocked = _find(report, "event_loop_blocked")
    assert "await asyncio.sleep" in blocked["remedy"]
    assert blocked["where"].startswith("agent.py:")
    assert blocked["where"].endswith(" in solve")
    assert 1.0 < float(blocked["found"].split(" for ")[1].split()[0]) < 20.0


def test_a_model_that_the_hub_does_not_give_is_asked_for_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The built-in model takes a minute to make.
    for module in ("check", "trial"):
        monkeypatch.setattr(f"agentrl_cli.launch.preflight.{module}.STAND_IN", "tiny")
    _write(folder, "", {"model": {"path": "nobody/nothing"}})
    code, report = _check(capsys, "--tasks", "2", "--samples", "1")
    assert code == 0
    assert "where the hub can be reached" in _find(report, "memory_unknown")["remedy"]
    assert "in place of nobody/nothing" in _find(report, "stand_in")["found"]
    found = [f["found"] for f in report["findings"] if f["code"] == "not_looked_at"]
    assert "whether the chat template shows what the agent sends: the model cannot be read" in found


def test_what_is_too_large_for_the_gpus_gets_the_line_to_paste(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps(_QWEN_7B))
    _write(folder, "", {"model": {"path": "large", "dtype": "bfloat16"}})
    code, report = _check(capsys, "--gpu", "H100:2")
    assert code == 1
    missing = _find(report, "memory_trainer")
    assert "7.62 billion weights" in missing["found"]
    assert "model.lora.rank=32" in missing["remedy"]
    assert "model.lora.rank=32" in report["next"]
    # Its weights are missing too, so that the agent cannot be run.
    _find(report, "trial_skipped")


def test_the_report_of_a_good_agent_says_what_to_type_next(
    folder: Path, brief_model: Path, finish: Callable[..., str]
) -> None:
    sampling = {"n_samples": 4, "max_tokens": 64}
    _write(folder, "", {"gconfig": sampling, "model": {"path": brief_model.name}})
    text = finish("check", "--config", "c.yaml", "seed=2", "--tasks", "2")
    assert "ready" in text.splitlines()[-2]
    assert text.splitlines()[-1] == "next:  agentrl train --config c.yaml seed=2"
    assert "a step of 256 trajectories (64 tasks x 4 samples)" in text
    assert not (folder / "runs").exists()


def test_ctrl_c_leaves_nothing_behind(folder: Path, run_here: Callable[..., str]) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    code = (
        "import asyncio, os, signal\nsent = []\nasync def solve(data):\n"
        "    if not sent:\n        sent.append(os.kill(os.getpid(), signal.SIGINT))\n"
        "    await asyncio.sleep(600)\n"
    )
    _write(folder, code, {})
    text = run_here(130, "check", "--config", "c.yaml", TMPDIR=str(scratch))
    assert "stopped by Ctrl-C" in text
    assert not [*scratch.glob("agentrl-check-*")]
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "A100:8"], "there are A100-40 and A100-80"),
        (["--base-url", "http://127.0.0.1:1/v1"], "--model NAME"),
        (["gconfig.n_sample=2"], "n_samples"),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(folder, "", {})
    assert run_reporting_failures(lambda: app(["check", "--config", "c.yaml", *words])) == 2
    assert text in capsys.readouterr().err


class _Endpoint(http.server.BaseHTTPRequestHandler):
    """Answers every chat request with the same text."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "42"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        reply = {"object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = json.dumps({**reply, "id": "x", "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def test_an_endpoint_can_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(folder, "async def reward(completions):\n    return completions == '42'\n", {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        code, report = _check(capsys, "--base-url", url, "--model", "m")
        server.shutdown()
    assert code == 0
    assert report["trial"]["model"] == "m"
    assert "nothing left to learn" in _find(report, "base_pass_rate")["found"]
    assert "bool" in _find(report, "reward_type")["found"]
    assert report["step"]["completion_tokens"] == 1.0
