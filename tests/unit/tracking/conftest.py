"""A small real tokenizer with ChatML templates, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.errors import ContextLengthError
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + ASSISTANT_CONTENT }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN = CHATML.replace("ASSISTANT_CONTENT", "(m.content or '')")
#: Shows thinking of the last turn only, as Qwen3's template does.
THINKING_STRIPPED = CHATML.replace(
    "ASSISTANT_CONTENT", "(m.content if loop.last else (m.content or '').split('</think>')[-1])"
)


def build_tokenizer(chat_template: str = PLAIN) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    corpus = ["What is the weather in Paris? The answer is forty two.", '{"name": "f", "x": 1}']
    backend.train_from_iterator(corpus * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = chat_template
    return tokenizer


class ScriptedEngine:
    """An engine whose replies are given: it makes conversations exact, and faults.

    A script entry is the reply's text; ``(text, "length")`` for one that was cut off
    (no end token); an exception to raise; or a function of the prompt's text.
    """

    model_name = "scripted"

    def __init__(self, tokenizer: Any, script: Sequence[Any], max_model_len: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.script = list(script)
        self.max_model_len = max_model_len
        self.version = 0
        self.prompts: list[tuple[int, ...]] = []
        self.samplings: list[Sampling] = []
        self.num_aborted = 0
        self.gate: asyncio.Event | None = None
        self.gate_position = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        pieces = [p async for p in self.stream(prompt_ids, sampling, session_id=session_id)]
        return Generation(
            completion_ids=tuple(t for p in pieces for t in p.completion_ids),
            rollout_logprobs=tuple(x for p in pieces for x in p.rollout_logprobs),
            versions=tuple(v for p in pieces for v in p.versions),
            finish_reason=pieces[-1].finish_reason,
            stop_text=pieces[-1].stop_text,
            top_logprobs=tuple(t for p in pieces for t in p.top_logprobs),
        )

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(sampling)
        num_top = sampling.num_top_logprobs
        if len(prompt_ids) >= self.max_model_len:
            raise ContextLengthError(len(prompt_ids), self.max_model_len)
        entry = self.script.pop(0)
        if callable(entry):
            entry = entry(self.tokenizer.decode(prompt_ids))
        if isinstance(entry, BaseException):
            raise entry
        text, finish = entry if isinstance(entry, tuple) else (entry, "stop")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if finish == "stop":
            ids.append(self.tokenizer.eos_token_id)
        try:
            for position, token_id in enumerate(ids):
                if self.gate is not None and position == self.gate_position:
                    await self.gate.wait()
                await asyncio.sleep(0)
                # The sampled token and its neighbours, each a nat less probable.
                top = [
                    ((token_id + n) % len(self.tokenizer), -0.25 * (position + 1) - n)
                    for n in range(num_top)
                ]
                yield Generation(
                    completion_ids=(token_id,),
                    rollout_logprobs=(-0.25 * (position + 1),),
                    versions=(self.version,),
                    finish_reason=finish if position == len(ids) - 1 else None,
                    top_logprobs=(tuple(top),) if num_top else (),
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def make_engine(tokenizer: PreTrainedTokenizerFast) -> Callable[..., ScriptedEngine]:
    """Makes engines that follow a script: ``make_engine("Hi", "Bye")``."""
    return lambda *script, **options: ScriptedEngine(tokenizer, script, **options)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], PreTrainedTokenizerFast]:
    """Makes a tokenizer with a chat template of your own: ``make_tokenizer(template)``."""
    return build_tokenizer


@pytest.fixture(scope="session")
def thinking_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(THINKING_STRIPPED)


@pytest.fixture
async def open_client(
    tokenizer: PreTrainedTokenizerFast,
) -> AsyncIterator[Callable[..., TrackingClient]]:
    """Makes a client whose engine follows a script: ``open_client("Hi", "Bye")``."""
    gateways: list[Gateway] = []

    def open_one(*script: Any, tokenizer: Any = tokenizer, **options: Any) -> TrackingClient:
        engine = ScriptedEngine(tokenizer, script, options.pop("max_model_len", 4096))
        gateways.append(Gateway(engine, tokenizer, **options.pop("reading", {})))
        session = gateways[-1].open_session(**options)
        return TrackingClient(gateway=gateways[-1], session=session)

    yield open_one
    for gateway in gateways:
        await gateway.close()
