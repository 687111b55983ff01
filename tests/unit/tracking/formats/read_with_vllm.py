"""Reads texts with vLLM's tool parsers: JSON on stdin, the calls found as JSON on stdout.

A process of its own, for vLLM changes the one that imports it.
"""

from __future__ import annotations

import json
import sys
from typing import Any


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
