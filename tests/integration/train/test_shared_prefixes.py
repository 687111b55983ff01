"""An update in which shared tokens are computed once equals one in which they are repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.train.data.packing import Packing, pack_samples
from agentrl_cli.train.data.samples import Sample, Targets
from agentrl_cli.train.masks import MaskTable, TokenMasks
from agentrl_cli.train.model.output_head import compute_micro_batch_logprobs

CPU = torch.device("cpu")


def build_sample(index: int, ids: list[int], start: int, generator: torch.Generator) -> Sample:
    """A sample whose tokens from ``start`` on are targets with settings of their own."""
    sources = torch.arange(max(start, 1) - 1, len(ids) - 1)
    count = len(sources)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    table = MASK_TABLE
    is_constrained = torch.rand(count, generator=generator) < 0.3
    target_ids = torch.tensor(ids, dtype=torch.long)[sources + 1]
    # The only mask besides the free one allows the even ids.
    numbers = (is_constrained & (target_ids % 2 == 0)).long()
    return Sample(
        input_ids=torch.tensor(ids),
        targets=Targets(
            sources=sources,
            ids=target_ids,
            rollout_logprobs=draw(-5.0, -3.0),
            versions=torch.zeros(count, dtype=torch.long),
            advantages=draw(-1.0, 1.0),
            temperatures=draw(0.6, 1.4),
            top_ps=torch.where(draw(0.0, 1.0) < 0.5, 1.0, draw(0.5, 1.0)),
            masks=TokenMasks(numbers, table) if count else None,
        ),
        trajectory_index=index,
        trajectory_id=f"t/{index}",
    )


MASK_TABLE = MaskTable(4)
MASK_TABLE.add(torch.full((4,), 0x55555555, dtype=torch.int32).numpy())


def build_ragged_samples() -> list[Sample]:
    """Two groups with prompts of their own after one system prompt, turns that branches share,
    equal samples, samples that begin others, and samples of one token."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 97, (count,), generator=generator).tolist()

    system = ids(9)
    rows: list[tuple[list[int], int]] = []
    for group in range(2):
        prompt = system + ids(5 + 6 * group)
        first_turn = prompt + ids(7)
        for length in (3, 11, 6):
            rows.append((prompt + ids(length), len(prompt)))
            rows.append((first_turn + ids(length), len(prompt) + length % 4))
        rows += [(first_turn, len(prompt)), rows[-1], rows[-1]]
    rows += [(ids(1), 0), (system[:1], 1), (ids(30), 4)]
    return [build_sample(n, row, start, generator) for n, (row, start) in enumerate(rows)]


def compute_gradients(
    model: Any, samples: list[Sample], packing: Packing, max_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    scored: dict[int, Tensor] = {}
    loss = torch.zeros(())
    for batch in pack_samples(samples, max_tokens, CPU, packing):
        output = compute_micro_batch_logprobs(model, batch)
        ratio = (output.logprobs - batch.targets.rollout_logprobs).exp()
        loss = loss + (ratio.clamp(max=2.0) * batch.targets.advantages).sum()
        parts = torch.split(output.logprobs.detach(), [s.num_targets for s in batch.samples])
        scored |= {id(s): part for s, part in zip(batch.samples, parts, strict=True)}
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return torch.cat([scored[id(s)] for s in samples]), gradients


@pytest.mark.parametrize(
    ("tied", "checkpointing", "max_tokens"),
    [(False, False, 1000), (True, False, 60), (False, True, 60)],
)
def test_logprobs_and_gradients_equal(
    build_model, tied: bool, checkpointing: bool, max_tokens: int
):
    from agentrl_cli.train.model.packed_attention import use_packed_attention

    model = build_model(tied=tied, initializer_range=0.2)
    use_packed_attention(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    samples = build_ragged_samples()
    plain_logprobs, plain = compute_gradients(model, samples, "plain", max_tokens)
    shared_logprobs, shared = compute_gradients(model, samples, "prefix_tree", max_tokens)
    assert torch.isfinite(plain_logprobs).all()
    torch.testing.assert_close(shared_logprobs, plain_logprobs, atol=1e-5, rtol=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(shared[name], gradient, atol=1e-5 * max(largest, 1.0), rtol=0.0)
