"""What vLLM's own parsers read in the same texts: the judge of what is well-formed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
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
    # It looks for what may follow a string of an argument, not of a list.
    ("lfm2", "<|tool_call_start|>[f(x=['it's', 'b'])]<|tool_call_end|>"),
}
CALL = '{"name": "f", "arguments": {"x": 1}}'
PARAMETERS = CALL.replace("arguments", "parameters")
#: What is nearly a call, or a call that is not written as in a template.
NEAR_CALLS = [
    *(
        ("hermes", f"<tool_call>\n{inside}{end}")
        for inside in (
            CALL, PARAMETERS, '{"name": "f"}', "f", f"[{CALL}]",
            CALL[:-1], CALL.replace("{", "[", 1), f"{CALL} {CALL}", f"x {CALL}",
        )
        for end in ("\n</tool_call>", "", "\n</tool_c")
    ),
    ("longcat", f"<longcat_tool_call>{PARAMETERS}</longcat_tool_call>"),
    ("granite-20b-fc", f"<function_call> {PARAMETERS}"),
    ("jamba", f"<tool_calls>[{PARAMETERS}]</tool_calls>"),
    ("llama4_json", f"<|python_start|><|python_end|>{PARAMETERS}"),
    ("llama4_pythonic", '[f(x="a"), g()]'),
    *(
        ("lfm2", f"<|tool_call_start|>[{call}]<|tool_call_end|>")
        for call in (
            "f(x='it's')", "f(x='a\nb')", "f(cmd='sed -n '1,9p' f.py')", "f(month=07)",
            "f(from='me')", "f(x=['it's', 'b'])",
        )
    ),
]  # fmt: skip
#: Names that SGLang alone has.
SGLANG_ALONE = {
    "qwen", "qwen25", "nanbeige", "deepseekv3", "deepseekv31", "deepseekv32", "gpt-oss", "glm",
    "llama3", "minimax-m2", "interns1",
}  # fmt: skip


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
    ] + [[name, text, text] for name, text in NEAR_CALLS]
    request = json.dumps({"texts": texts, "tools": tools, "marks": [*marks, "<think>", "</think>"]})
    env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], input=request, env=env, text=True, capture_output=True,
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
        parsed = parser.feed(write_variants(writers[target]).get(variant, variant))
        parsed.add(parser.finish())
        functions = [call["function"] for call in parsed.tool_calls]
        ours = [[one["name"], json.loads(one["arguments"])] for one in functions]
        if (ours != calls) != ((name, variant) in VLLM_FAILS):
            differences.append((name, variant, ours, calls))
    assert differences == []
    num_aliases = len(set(TOOL_CALL_ALIASES) - SGLANG_ALONE)
    assert len(vllm_readings) == 6 * (len(writers) - 1 + num_aliases) + len(NEAR_CALLS)


# -- run as a program of its own, for vLLM changes the process that imports it ---------------


def build_tokenizer(marks: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_tokens(marks)
    return tokenizer


def main() -> None:
    """Reads texts with vLLM's tool parsers: JSON on stdin, the calls found as JSON on stdout."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    data = json.load(sys.stdin)
    tokenizer = build_tokenizer(data["marks"])
    readings = []
    for name, variant, text in data["texts"]:
        messages = [{"role": "user", "content": "x"}]
        request = ChatCompletionRequest(model="m", messages=messages, tools=data["tools"])
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        try:
            found = parser.extract_tool_calls(text, request).tool_calls
            calls: Any = [[c.function.name, json.loads(c.function.arguments)] for c in found]
        except Exception as error:  # what is shown is that it raises
            calls = f"{type(error).__name__}: {error}"
        readings.append([name, variant, calls])
    print(json.dumps(readings))


if __name__ == "__main__":
    main()
