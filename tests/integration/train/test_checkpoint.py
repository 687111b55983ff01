"""A checkpoint that cannot be written costs no other, and from a spoilt one nothing is trained."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl_cli.errors import StoreError
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.resume import CheckpointSaver, DataCursor


@pytest.fixture
def limit_file_size():
    """Lets the system refuse what grows past so many bytes, as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(num_bytes: int | None) -> None:
        soft = limits[0] if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_no_checkpoint_whichever_file_it_falls_on(
    build_model,
    build_config,
    tiny_tokenizer,
    ragged_batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_file_size: Callable[[int | None], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build_config(dtype="bfloat16")
    learner = Learner(build_model(), config, tokenizer=tiny_tokenizer)
    learner.update(ragged_batch, 0)
    with RunFolder.create_or_resume(config) as folder:
        saver = CheckpointSaver(config.train, folder, learner, DataCursor(1, "x"))
        saver.save(1)
        ((_, kept),) = folder.list_checkpoints()
        files = [path for path in kept.rglob("*") if path.is_file()]
        contents = {path: path.read_bytes() for path in files}
        assert {"model.safetensors", "tokenizer.json", "optimizer.safetensors"} <= {
            path.name for path in files
        }
        learner.update(ragged_batch, 1)
        # The largest alone is refused at first; in the end so is the smallest.
        for size in sorted({len(content) for content in contents.values()}, reverse=True):
            limit_file_size(size - 1)
            with pytest.raises(StoreError, match=r"is full\. Everything .* type the same command"):
                saver.save(2)
            limit_file_size(None)
            assert [path.name for path in kept.parent.iterdir()] == [kept.name]
        assert {path: path.read_bytes() for path in contents} == contents
        saver.save(2)
        assert [step for step, _ in folder.list_checkpoints()] == [1, 2]


def test_weights_that_are_missing_are_not_drawn_at_random(
    build_model, build_config, tmp_path: Path
) -> None:
    learner = Learner(build_model(), build_config())
    learner.save(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"is of another model: .*model\.norm\.weight"):
        learner.load(tmp_path)


def test_a_checkpoint_of_a_larger_model_is_refused(
    build_model, build_config, ragged_batch, tmp_path: Path
) -> None:
    for dtype in ("float32", "bfloat16"):
        config = build_config(dtype=dtype)
        larger = Learner(build_model(intermediate_size=96), config)
        larger.update(ragged_batch, 0)
        larger.save(tmp_path / dtype)
        with pytest.raises(StoreError, match=f"{dtype} is of another model"):
            Learner(build_model(), config).load(tmp_path / dtype)


def test_loading_leaves_the_generators_as_they_were_saved(
    build_model, build_config, tmp_path: Path
) -> None:
    learner = Learner(build_model(), build_config())
    states = torch.get_rng_state()
    try:
        learner.save(tmp_path)
        expected = torch.rand(3)
        learner.load(tmp_path)
        assert torch.equal(torch.rand(3), expected)
    finally:
        torch.set_rng_state(states)
