"""A model folder, as a user has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any, build_qwen2: Callable[..., Any]
) -> Path:
    """A tiny random model with the tokenizer of the unit tests, on disk."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"max_position_embeddings": 1024, "initializer_range": 0.2}
    build_qwen2(chat_tokenizer, **shape).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder
