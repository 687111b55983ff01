"""Two and four processes against one: the same gradients, updates and files."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import runpy
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.train.rendezvous import Rendezvous

_PLAY = Path(__file__).parent / "rank_play.py"
#: Ten times what they take on a core of their own.
_DEADLINE_SECONDS = 120.0
_TOLERANCE = 1e-5
#: An update that is proportional to small gradients: without it Adam makes as much of rounding.
_STEADY = {"learning_rate": 1e-3, "adam_epsilon": 1e-3}

acts = runpy.run_path(str(_PLAY))
Play = acts["Play"]


@pytest.fixture(scope="module")
def server() -> Any:
    """Forks processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agentrl_cli.train.learner"])
    return context


@pytest.fixture
def run_ranks(server: Any, tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """What the steps gave on each rank: ``run_ranks(2, play)``; None of a rank that died, a text
    of one that lost another."""
    processes = []

    def run(count: int, part: Any, seconds: float = _DEADLINE_SECONDS) -> list[Any]:
        folder = tmp_path / f"ranks-{len(processes)}"
        folder.mkdir()
        paths = [folder / f"{index}.pt" for index in range(count)]
        for index, path in enumerate(paths):
            rendezvous = Rendezvous(index=index, count=count, address=f"file://{folder}/rendezvous")
            arguments = (rendezvous, vars(part), str(path))
            process = server.Process(
                target=runpy.run_path,
                args=(str(_PLAY), {"arguments": arguments}, "<rank>"),
                daemon=True,
            )
            process.start()
            processes.append(process)
        deadline = time.monotonic() + seconds
        for process in processes[-count:]:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, "a rank has not ended in time"
        return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]

    yield run
    for process in processes:
        process.kill()
        process.join(10.0)


@pytest.fixture
def save_model(build_model: Any, tmp_path: Path) -> Callable[..., str]:
    """The folder of a tiny model: ``save_model(seed, tied=True)``."""

    def save(seed: int = 0, *, tied: bool = False) -> str:
        folder = tmp_path / f"model-{seed}-{tied}"
        build_model(seed, tied=tied).save_pretrained(folder)
        return str(folder)

    return save


def assert_same(found: dict, expected: dict, tolerance: float = _TOLERANCE) -> None:
    """Weights in bfloat16 may be rounded to the number beside."""
    assert found.keys() == expected.keys()
    assert found
    for name, tensor in expected.items():
        allowed = max(tolerance, 2**-7 if tensor.dtype == torch.bfloat16 else 0.0)
        torch.testing.assert_close(found[name], tensor, atol=allowed, rtol=allowed, msg=name)


def assert_same_metrics(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in found.keys() - {
        *("train_seconds", "logprob_seconds", "num_micro_batches", "train_tokens")
    }:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "tied", "frozen", "train"),
    [
        (2, True, [], {"algorithm": {"kl": {"coef": 0.1}}}),
        (4, False, [], {"algorithm": {"kl": {"coef": 0.1}}}),
        (2, False, [], {"gradient_checkpointing": True}),
        (2, False, ["embeddings", "model.layers.0.*"], {}),
        # With all but the head frozen no layer has a backward pass.
        (2, False, ["embeddings", "model.*"], {}),
    ],
)
def test_gradients_are_those_of_one_process(
    run_ranks, save_model, build_config, ragged_batch, count, tied, frozen, train
):
    part = Play(
        model_folder=save_model(tied=tied),
        reference_folder=save_model(3) if "algorithm" in train else None,
        config=build_config(max_grad_norm=1e9, model={"frozen": frozen}, **train),
        steps=[("gradient", ragged_batch)],
    )
    [(expected, metrics)] = acts["play"](part)
    assert frozen == [] or not any(name.startswith("model.layers.0.") for name in expected)
    for results in run_ranks(count, part):
        [(found, found_metrics)] = results
        assert_same(found, expected)
        assert_same_metrics(found_metrics, metrics)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_updates_are_those_of_one_process(run_ranks, save_model, build_config, ragged_batch, count):
    """Several minibatches and epochs, clipped, with proximal logprobs of their own; among four
    ranks some have nothing to do in a minibatch."""
    config = build_config(
        num_minibatches=2, num_epochs=2, max_grad_norm=0.5, learning_rate=1e-3, weight_decay=0.1
    )
    probes = [[1, 2, 3, 4], [5, 6], [7]]
    steps = [("logprobs", probes), ("update", ragged_batch), ("update", ragged_batch)]
    part = Play(
        model_folder=save_model(tied=True),
        config=config,
        steps=[*steps, ("logprobs", probes), ("weights",), ("proximal",)],
    )
    before, first, second, after, weights, proximal = acts["play"](part)
    assert before != after
    assert first["grad_norm"] > 0.5, "nothing was clipped"
    results = run_ranks(count, part)
    for found in results:
        assert [len(one) for one in found[0]] == [3, 1, 0]
        for mine, theirs in zip((*found[0], *found[3]), (*before, *after), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        assert_same_metrics(found[1], first)
        assert_same_metrics(found[2], second)
        assert found[5].keys() == proximal.keys() != set()
        for name, values in proximal.items():
            assert found[5][name] == pytest.approx(values, abs=1e-4), name
    assert_same(results[0][4], weights, 2e-5)
    assert [found[4] for found in results[1:]] == [{}] * (count - 1)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)
def test_compiled_layers_in_shards_are_those_of_one_process(
    run_ranks, save_model, build_config, ragged_batch
):
    """Against layers that are not compiled, on one process; with whole copies on the first rank."""
    folder, ids = save_model(tied=True), [[1, 2, 3, 4], [5, 6]]
    steps = [("update", ragged_batch), ("weights",), ("update", ragged_batch), ("logprobs", ids)]
    plain = Play(model_folder=folder, config=build_config(**_STEADY), steps=steps)
    expected = acts["play"](plain)
    config = build_config(**_STEADY, compile="layers")
    part = Play(model_folder=folder, config=config, steps=steps, exchange_seconds=240.0)
    found, _ = run_ranks(2, part, 280.0)
    assert_same(found[1], expected[1])
    for which in (0, 2):
        assert_same_metrics(found[which], expected[which])
    for mine, theirs in zip(found[3], expected[3], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_in_shards_is_that_of_one_process(
    run_ranks, save_model, build_config, ragged_batch, tmp_path, dtype
):
    """Values of all samples on every rank, several updates, and a checkpoint that one reads."""
    config = build_config(
        dtype=dtype,
        algorithm={"kind": "ppo", "advantage": {"gae_lambda": 0.9}},
        critic={"learning_rate": 1e-3},
        num_minibatches=2,
        **_STEADY,
    )
    steps = [("update", ragged_batch)] * 3 + [("critic_weights",)]
    part = Play(model_folder=save_model(), critic_folder=save_model(4), config=config, steps=steps)
    *_, last, weights = acts["play"](part)
    assert last["explained_variance"] != 0.0
    tolerance = 1e-5 if dtype == "float32" else 2e-4
    saving = dataclasses.replace(part, steps=[*steps, ("save", str(tmp_path / "saved"))])
    for results in run_ranks(2, saving):
        if dtype == "float32":
            assert_same_metrics(results[2], last)
        assert_same(results[3], weights, tolerance)
    read = [("load", str(tmp_path / "saved")), ("critic_weights",)]
    step, loaded = acts["play"](dataclasses.replace(part, steps=read))
    assert step == 3
    assert_same(loaded, weights, tolerance)
    for results in run_ranks(4, dataclasses.replace(part, steps=read)):
        assert_same(results[1], loaded, 0.0)


@pytest.mark.slow
def test_a_batch_of_one_sample_leaves_ranks_without_work(
    run_ranks, save_model, build_config, build_trajectory
):
    batch = [build_trajectory("g", i, float(i), [([1, 2], [3, 4])]) for i in range(2)]
    unscored = [build_trajectory("g", i, None, [([1, 2], [3, 4])]) for i in range(2)]
    steps = [("update", batch[:1]), ("update", unscored), ("gradient", batch)]
    part = Play(model_folder=save_model(), config=build_config(), steps=steps)
    nothing, _, (gradient, metrics) = acts["play"](part)
    results = run_ranks(4, part)
    assert nothing["num_updates"] == results[0][0]["num_updates"] == 0
    assert_same(results[0][2][0], gradient)
    assert_same_metrics(results[3][2][1], metrics)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_go_from_any_number_of_ranks_to_any(
    run_ranks, save_model, build_config, ragged_batch, tmp_path, dtype
):
    """Two ranks save, one process goes on and saves, four go on: as one process throughout."""
    config = build_config(dtype=dtype, **_STEADY)
    folder, update = save_model(tied=True), ("update", ragged_batch)
    paths = [str(tmp_path / f"after-{n}") for n in range(4)]

    def part(*steps: Any) -> Any:
        return Play(model_folder=folder, config=config, steps=steps)

    metrics = acts["play"](
        part(update, ("save", paths[0]), update, update, ("weights",), ("save", paths[3]))
    )
    run_ranks(2, part(update, ("save", paths[1])))
    acts["play"](part(("load", paths[1]), update, ("save", paths[2])))
    results = run_ranks(4, part(("load", paths[2]), update, ("weights",), ("save", paths[3] + "b")))
    assert results[0][0] == 2
    # In bfloat16 products are added up in another order, and gradients rounded elsewhere; an update
    # moves most weights by 1e-3.
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    assert_same(results[0][2], metrics[4], tolerance)
    if dtype == "float32":
        assert_same_metrics(results[0][1], metrics[3])
    for mine, theirs in ((paths[1], paths[0]), (paths[3] + "b", paths[3])):
        compare_folders(Path(mine), Path(theirs), tolerance)


def compare_folders(mine: Path, theirs: Path, tolerance: float) -> None:
    """The same files: texts alike, tensors of the same names, types, shapes and values."""
    from safetensors.torch import load_file

    names = sorted(str(p.relative_to(theirs)) for p in theirs.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(mine)) for p in mine.rglob("*") if p.is_file())
    assert any(name.endswith("optimizer.safetensors") for name in names)
    for name in names:
        if name.endswith(".json"):
            assert read_json(mine / name) == read_json(theirs / name)
        elif name.endswith(".safetensors") and "random" not in name:
            assert_same(load_file(mine / name), load_file(theirs / name), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("total_steps", [2, 3], ids=["to its last step", "until asked to stop"])
def test_all_ranks_run_one_loop(
    run_ranks, save_model, build_config, ragged_batch, tmp_path, total_steps
):
    """Rank 0 has the batches, and says when to save and when to stop."""
    batches = [ragged_batch, ragged_batch[:4]]
    config = build_config(learning_rate=1e-3, total_steps=total_steps)
    folders = [str(tmp_path / name) for name in ("one", "two")]

    def part(folder: str) -> Any:
        steps = [("run", batches, folder)]
        return Play(model_folder=save_model(tied=True), config=config, steps=steps)

    [[is_complete, step, expected]] = acts["play"](part(folders[0]))
    assert (is_complete, step) == (total_steps == 2, 2)
    [first], *others = run_ranks(3, part(folders[1]))
    assert others == [[[is_complete, 2, None]]] * 2
    assert first[:2] == [is_complete, 2]
    assert first[2][0] == expected[0] == 1
    # What is published before the first step, and then the model's own weights.
    assert abs(expected[1][0] - expected[2][0]) > 0.1
    for mine, theirs in zip(first[2][1:], expected[1:], strict=True):
        if isinstance(mine, dict):
            assert_same_metrics(mine, theirs)
        else:
            assert mine == pytest.approx(theirs, abs=1e-4)
    compare_folders(Path(folders[1]), Path(folders[0]), 2e-5)


def read_json(path: Path) -> Any:
    content = json.loads(path.read_text())
    if "target_modules" in content:
        # peft keeps a set of names.
        content["target_modules"] = sorted(content["target_modules"])
    return content


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_harms_none(
    run_ranks, save_model, build_config, ragged_batch
):
    """The last trajectory is in the last share, so rank 0 sees no NaN of its own."""
    steps = [("weights",), ("spoil", 1, "g2/1"), ("update", ragged_batch), ("weights",)]
    part = Play(model_folder=save_model(), config=build_config(), steps=steps)
    first, second = run_ranks(2, part)
    assert "the loss is nan" in first[2]
    assert "g2/1" in first[2]
    assert first[2] == second[2]
    assert_same(first[3], first[0], 0.0)


def test_a_rank_that_dies_ends_the_others_soon(run_ranks, save_model, build_config, ragged_batch):
    steps = [("update", ragged_batch), ("die", 1), ("update", ragged_batch)]
    part = Play(model_folder=save_model(), config=build_config(), steps=steps)
    started = time.monotonic()
    first, second = run_ranks(2, part)
    assert first.startswith("another of the 2 processes that train together has ended")
    assert second is None
    assert time.monotonic() - started < 60.0, "they waited for the deadline"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "in a pass"])
def test_a_rank_that_hangs_is_waited_for_until_the_deadline(
    run_ranks, save_model, build_config, ragged_batch, where
):
    """In what ranks tell each other, and in what a pass through the shards sends."""
    steps = [("update", ragged_batch), ("hang", 1, where, 8.0), ("update", ragged_batch)]
    part = Play(model_folder=save_model(), config=build_config(), steps=steps, exchange_seconds=4.0)
    started = time.monotonic()
    first, second = run_ranks(2, part)
    assert "has not answered for 4 s" in first
    assert "another of the 2 processes" in second
    assert time.monotonic() - started < 60.0


@pytest.mark.slow
@pytest.mark.parametrize("published", ["whole", "adapter"])
def test_adapters_are_published_and_saved_as_by_one_process(
    run_ranks, save_model, build_config, ragged_batch, tmp_path, published
):
    pytest.importorskip("peft")
    config = build_config(algorithm={"kl": {"coef": 0.1}}, model={"lora": {"rank": 4}})
    folder, paths = save_model(tied=True), [str(tmp_path / name) for name in ("one", "two")]

    def part(path: str) -> Any:
        steps = [("update", ragged_batch), ("weights",), ("save", path), ("load", path)]
        steps += [("update", ragged_batch)]
        return Play(model_folder=folder, config=config, steps=steps, published=published)

    expected = acts["play"](part(paths[0]))
    assert all("lora" in name for name in expected[1]) == (published == "adapter")
    found = run_ranks(2, part(paths[1]))[0]
    assert_same_metrics(found[0], expected[0])
    assert_same(found[1], expected[1], 2e-5)
    assert_same_metrics(found[4], expected[4])
    compare_folders(Path(paths[1]), Path(paths[0]), 2e-5)
