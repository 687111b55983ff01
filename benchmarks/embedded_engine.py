"""Tokens per second of the embedded engine, beside a static-batch ``generate`` of the same run.

    python -m benchmarks.embedded_engine

Every completion has the same length, which is the best case of the static batch: it
never waits for the longest, and computes no logprobs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch
from transformers import PreTrainedModel, Qwen2Tokenizer

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Sampling
from benchmarks.small_model import build_model


def build_prompts(num_prompts: int, num_shared: int, num_own: int) -> list[list[int]]:
    """Prompts that begin alike, as trajectories with one system prompt do."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(1, 512, (num_shared,), generator=generator).tolist()
    return [
        shared + torch.randint(1, 512, (num_own,), generator=generator).tolist()
        for _ in range(num_prompts)
    ]


async def time_engine(engine: EmbeddedEngine, prompts: list[list[int]], num_new: int) -> float:
    """Seconds to sample all prompts at once."""
    sampling = Sampling(max_tokens=num_new)
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    return time.perf_counter() - started


@torch.no_grad()
def time_static_batch(model: PreTrainedModel, prompts: list[list[int]], num_new: int) -> float:
    """Seconds of ``model.generate`` over the prompts as one batch."""
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
    )
    return time.perf_counter() - started


async def run(arguments: argparse.Namespace) -> None:
    """Prints one line per concurrency: medians over the repeats, taken in turns."""
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments.hidden_size, arguments.layers)
    config = EngineConfig(max_model_len=512, max_num_seqs=64, num_threads=arguments.threads)
    engine = EmbeddedEngine(
        build_model(arguments.hidden_size, arguments.layers),
        Qwen2Tokenizer(),
        config,
        model_name="benchmark",
    )
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, float32, "
        f"{arguments.threads} thread(s), prompts of {arguments.shared} shared + {arguments.own} "
        f"own tokens, {arguments.new} sampled, median of {arguments.repeats}"
    )
    print(f"{'concurrent':>10} {'engine tok/s':>13} {'static tok/s':>13} {'ratio':>6}")
    for num_concurrent in (1, 16, 64):
        prompts = build_prompts(num_concurrent, arguments.shared, arguments.own)
        rates: dict[str, list[float]] = {"engine": [], "static": []}
        for repeat in range(arguments.repeats + 1):
            seconds = {
                "engine": await time_engine(engine, prompts, arguments.new),
                "static": time_static_batch(model, prompts, arguments.new),
            }
            if repeat > 0:  # the first one warms up
                for kind, taken in seconds.items():
                    rates[kind].append(num_concurrent * arguments.new / taken)
        ratio = statistics.median(
            own / static for own, static in zip(rates["engine"], rates["static"], strict=True)
        )
        print(
            f"{num_concurrent:>10} {statistics.median(rates['engine']):>13,.0f} "
            f"{statistics.median(rates['static']):>13,.0f} {ratio:>6.2f}",
            flush=True,
        )
    await engine.close()


def main() -> None:
    """Reads the sizes from the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shared", type=int, default=96, help="tokens all prompts begin with")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt's own")
    parser.add_argument("--new", type=int, default=128, help="tokens to sample")
    parser.add_argument("--repeats", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
