"""Which weights an engine kept: named on tiny models, whose stale twins play the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl_cli.train.diagnosis import ScoredSequence, explain_mismatch
from agentrl_cli.train.learner import Learner

PROBES = [[5, 6, 7, 8, 9, 10, 11], [11] * 9, [3, 1, 4, 1, 5]]
START = 2
TOLERANCE = 1e-4
FILE = "model.safetensors"


def play_engine(model: Any) -> list[list[float]]:
    """A plain forward pass of transformers."""
    logprobs = []
    for ids in PROBES:
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        logprobs.append([scores[at - 1, ids[at]].item() for at in range(START, len(ids))])
    return logprobs


@pytest.fixture
def diagnose(build_model, build_config, tmp_path: Path) -> Callable[..., str]:
    """What is said of an engine with the new weights, but for those whose name ``is_stale``."""

    def run(is_stale: Callable[[str], bool], *, tied: bool = False, **other: Any) -> str:
        old, new = (build_model(seed, tied=tied) for seed in (1, 2))
        folder = tmp_path / "previous"
        folder.mkdir()
        first_names = dict(old.named_parameters())
        save_file({name: p.detach().clone() for name, p in first_names.items()}, folder / FILE)
        # The engine keeps head and embeddings apart.
        engine = build_model(3, tied=False)
        state = {
            name: (old if is_stale(name) else new).state_dict()[name]
            for name in engine.state_dict()
        }
        engine.load_state_dict(state | other)
        learner = Learner(new, build_config())
        trainer = learner.compute_logprobs(PROBES, starts=[START] * len(PROBES))
        sequences = [
            ScoredSequence(
                token_ids=ids, start=START, engine_logprobs=theirs, trainer_logprobs=ours
            )
            for ids, theirs, ours in zip(PROBES, play_engine(engine), trainer, strict=True)
        ]
        assert max(gap for s in sequences for gap in s.compute_gaps(s.trainer_logprobs)) > 0.01
        answer = explain_mismatch(learner, folder, sequences, TOLERANCE)
        assert learner.compute_logprobs(PROBES, starts=[START] * len(PROBES)) == trainer
        return answer

    return run


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        ("lm_head", "when lm_head.weight is"),
        ("model.embed_tokens", "when model.embed_tokens.weight is"),
        ("model.layers.1.mlp", "when model.layers.1.mlp is"),
        ("model.layers.0.self_attn", "when model.layers.0.self_attn is"),
        ("model.layers.1.", "when model.layers.1 is"),
        ("model.layers.1.mlp.up_proj", "when model.layers.1.mlp.up_proj.weight is"),
        ("", "when everything"),
    ],
)
def test_what_the_engine_kept_is_named(diagnose, tied, prefix, named):
    answer = diagnose(lambda name: name.startswith(prefix), tied=tied)
    assert named in answer
    assert "the engine kept it" in answer


def test_a_part_that_is_stale_in_every_layer_is_named(diagnose):
    assert "when self_attn of every layer is" in diagnose(lambda name: "self_attn" in name)


def test_everything_but_the_head_is_named(diagnose):
    answer = diagnose(lambda name: "lm_head" not in name)
    assert "everything but lm_head.weight" in answer


def test_what_no_group_explains_is_said_so(diagnose):
    head = torch.zeros(97, 32)
    answer = diagnose(lambda _: False, **{"lm_head.weight": head})
    assert answer.startswith("No group of parameters from the version before explains it")


def test_without_the_version_before_it_says_what_is_missing(build_model, build_config, tmp_path):
    learner = Learner(build_model(), build_config())
    assert "not kept" in explain_mismatch(learner, None, [], TOLERANCE)
    assert "has none of their names" in explain_mismatch(learner, tmp_path, [], TOLERANCE)
    (tmp_path / FILE).write_text("not a file of tensors")
    answer = explain_mismatch(learner, tmp_path, [], TOLERANCE)
    assert answer.startswith("Which parameters differ was not found out: OSError")
