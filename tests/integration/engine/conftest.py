"""Engines over the tiny model, and the truth they are measured against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.engine.embedded import EmbeddedEngine

OpenEngine = Callable[..., AbstractAsyncContextManager[EmbeddedEngine]]


@pytest.fixture
def open_engine(
    build_tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerBase
) -> OpenEngine:
    """Opens an engine on a tiny model; keywords go to ``EngineConfig``."""

    @asynccontextmanager
    async def open_one(
        model: PreTrainedModel | None = None, **settings: object
    ) -> AsyncIterator[EmbeddedEngine]:
        fields = {"max_model_len": 128, "max_num_seqs": 16, "num_threads": 1, **settings}
        engine = EmbeddedEngine(
            model or build_tiny_model(),
            tiny_tokenizer,
            EngineConfig.model_validate(fields),
            model_name="tiny",
        )
        try:
            yield engine
        finally:
            await engine.close()

    return open_one


@pytest.fixture
def compute_truth() -> Callable[..., list[float]]:
    """Logprobs of a completion by one plain forward pass, in float64, nucleus by nucleus."""

    @torch.no_grad()
    def compute(
        model: PreTrainedModel,
        prompt_ids: list[int],
        completion_ids: list[int],
        temperature: float,
        top_p: float,
    ) -> list[float]:
        logits = model(torch.tensor([[*prompt_ids, *completion_ids]])).logits[0].double()
        logprobs = []
        for offset, token in enumerate(completion_ids):
            row = logits[len(prompt_ids) - 1 + offset] / temperature
            probs = row.softmax(-1)
            kept, mass = [], 0.0
            for index in probs.argsort(descending=True).tolist():
                if mass >= top_p and top_p < 1:
                    break
                kept.append(index)
                mass += float(probs[index])
            assert token in kept, f"token {token} lies outside of the nucleus of {top_p}"
            logprobs.append(float((probs[token] / mass).log()))
        return logprobs

    return compute
