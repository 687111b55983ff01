"""Engines over the tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine

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
