"""The model and the batches of ``benchmarks/train.py``: trajectories as agents make them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.records import Interaction, Trajectory

VOCABULARY_SIZE = 16_000

#: The random model gives every token nearly this logprob.
_LOGPROB = -9.7

#: Ids of a prompt or of what follows it, of a length.
DrawIds = Callable[[int], tuple[int, ...]]


def build_model() -> Qwen2ForCausalLM:
    """A random Qwen2 of 25 million parameters in float32; the same every time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def build_ragged_batch(
    num_groups: int, group_size: int, *, is_prompt_shared: bool
) -> list[Trajectory]:
    """Lengths and numbers of turns from log-normals: most short, the longest of 16 turns.

    Prompts have 150 tokens in the median, replies 30 and what tools answer 20; there are 3 turns
    in the median. ``is_prompt_shared`` False: every trajectory has a prompt of its own, as if
    each came from another task.
    """
    chance = random.Random(0)
    draw_ids = _draw_with(chance)

    def draw(median: int, spread: float, low: int, high: int) -> int:
        return min(high, max(low, round(median * chance.lognormvariate(0.0, spread))))

    batch = []
    for group in range(num_groups):
        length = draw(150, 0.6, 20, 1000)
        prompt = draw_ids(length)
        for index in range(group_size):
            # One at least is of 16 turns, however small the batch.
            num_turns = 16 if not batch else draw(3, 0.8, 1, 16)
            first = prompt if is_prompt_shared else draw_ids(length)
            turns = [
                (draw_ids(draw(20, 0.7, 4, 200)), draw_ids(draw(30, 0.7, 4, 300)))
                for _ in range(num_turns)
            ]
            batch.append(build_trajectory(group, index, [(first, turns[0][1]), *turns[1:]]))
    return batch


def build_turns_batch(num_turns: int, num_tokens: int) -> list[Trajectory]:
    """Two trajectories of about ``num_tokens`` tokens, however many turns these make.

    A turn's new prompt and its reply are of one length.
    """
    draw_ids = _draw_with(random.Random(1))
    size = num_tokens // (2 * num_turns)
    return [
        build_trajectory(0, index, [(draw_ids(size), draw_ids(size)) for _ in range(num_turns)])
        for index in range(2)
    ]


def build_group_batch(group_size: int, prompt_tokens: int, reply_tokens: int) -> list[Trajectory]:
    """One group: a prompt, and a reply of each trajectory's own."""
    draw_ids = _draw_with(random.Random(2))
    prompt = draw_ids(prompt_tokens)
    return [
        build_trajectory(0, index, [(prompt, draw_ids(reply_tokens))])
        for index in range(group_size)
    ]


def build_trajectory(
    group: int, index: int, turns: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Trajectory:
    """A trajectory of turns (new prompt ids, reply ids), each of which extends the one before."""
    interactions: list[Interaction] = []
    history: tuple[int, ...] = ()
    for turn, (new_ids, completion_ids) in enumerate(turns):
        prompt_ids = history + new_ids
        interactions.append(
            Interaction(
                id=f"{group}/{index}/{turn}",
                parent_id=interactions[-1].id if interactions else None,
                extends_parent=turn > 0,
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                rollout_logprobs=(_LOGPROB,) * len(completion_ids),
                versions=(0,) * len(completion_ids),
                started=turn,
                turn_return=float(index),
            )
        )
        history = prompt_ids + completion_ids
    return Trajectory(
        id=f"{group}/{index}",
        group_id=str(group),
        task_id=str(group),
        interactions=tuple(interactions),
        reward=float(index),
    )


def _draw_with(chance: random.Random) -> DrawIds:
    # The lowest ids are TRL's padding and end.
    return lambda count: tuple(chance.choices(range(2, VOCABULARY_SIZE), k=count))
