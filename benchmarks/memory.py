"""Peak memory and time of the output head at a large vocabulary, per number of scored tokens.

    python -m benchmarks.memory --vocabulary 151936 --width 256 --tokens 256 1024 4096

From hidden states to logprobs and entropies, and back to the gradients of hidden states and head,
by three ways, each in a process of its own:

* ``whole``: logits of all tokens, as transformers and TRL make them;
* ``checkpoints``: chunks of tokens that are computed once more in the backward pass;
* ``agentrl``: what the trainer does.

What is counted is what stands beside the hidden states and the head at the peak: resident memory
on a CPU (of Linux), allocated memory on a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl_cli.train.model.output_head import MAX_LOGITS, compute_logprobs

Way = Literal["whole", "checkpoints", "agentrl"]
WAYS: tuple[Way, ...] = get_args(Way)

#: Several GiB of logits tell nothing that fewer do not.
_MAX_WHOLE_GIB = 3.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    way: Way
    num_tokens: int
    vocabulary_size: int = 151_936
    width: int = 256
    dtype: str = "float32"
    num_threads: int = 1
    device: str = "cpu"
    is_head_trained: bool = True

    @property
    def logits_mib(self) -> float:
        """Of one float32 tensor with all logits."""
        return 4 * self.num_tokens * self.vocabulary_size / _MIB


@dataclass(frozen=True, slots=True)
class Usage:
    """What one forward and backward pass took."""

    peak_mib: float
    """Beside hidden states and head; their gradients are counted."""
    seconds: float
    """CPU seconds, or seconds on a GPU."""


def measure(case: Case) -> Usage:
    """The usage of ``case``, measured in a fresh process."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(case, sending))
    process.start()
    sending.close()
    try:
        usage: Usage = receiving.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{case} ended with exit code {process.exitcode}") from None
    process.join()
    return usage


def _measure_into(case: Case, sending: Connection) -> None:
    sending.send(_measure_here(case))


def _measure_here(case: Case) -> Usage:
    torch.manual_seed(0)
    torch.set_num_threads(case.num_threads)
    dtype = getattr(torch, case.dtype)
    head = nn.Linear(case.width, case.vocabulary_size, bias=False, device=case.device, dtype=dtype)
    head.requires_grad_(case.is_head_trained)
    states = torch.randn(case.num_tokens, case.width, device=case.device).to(dtype)
    states.requires_grad_()
    ids = torch.randint(case.vocabulary_size, (case.num_tokens,), device=case.device)
    score = _SCORERS[case.way]
    # Few tokens, so that what a library sets up once is not counted.
    _pass(lambda: score(states[:2], head, ids[:2]))
    states.grad = head.weight.grad = None
    _forget_peak(case.device)
    before, started = _read_peak(case.device), _read_clock(case.device)
    _pass(lambda: score(states, head, ids))
    seconds = _read_clock(case.device) - started
    return Usage((_read_peak(case.device) - before) / _MIB, seconds)


def _pass(score: Callable[[], tuple[Tensor, Tensor]]) -> None:
    logprobs, _ = score()
    logprobs.mean().backward()


def _forget_peak(device: str) -> None:
    """Makes what stands now the peak."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    else:
        torch.cuda.reset_peak_memory_stats()


def _read_peak(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _read_clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _score_whole(states: Tensor, head: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = head(states).float().log_softmax(-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], entropies


def _score_by_checkpoints(states: Tensor, head: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    rows = max(1, MAX_LOGITS // head.out_features)
    parts = [
        checkpoint(_score_whole, s, head, i, use_reentrant=False)
        for s, i in zip(states.split(rows), ids.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_as_trainer(states: Tensor, head: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    ones = torch.ones(len(ids), device=states.device)
    found = compute_logprobs(states, head, ids, ones, ones)
    return found.logprobs, found.entropies


_SCORERS: dict[Way, Callable[[Tensor, nn.Linear, Tensor], tuple[Tensor, Tensor]]] = {
    "whole": _score_whole,
    "checkpoints": _score_by_checkpoints,
    "agentrl": _score_as_trainer,
}


def format_table(cases: dict[int, list[Case]]) -> Iterator[str]:
    """Lines of a table, one per number of tokens, each as soon as it is measured."""
    yield f"{'tokens':>8}{'logits MiB':>12}" + "".join(f"{way:>24}" for way in WAYS)
    for num_tokens, of_tokens in cases.items():
        line = f"{num_tokens:>8}{of_tokens[0].logits_mib:>12.0f}"
        for case in of_tokens:
            if case.way == "whole" and case.logits_mib > _MAX_WHOLE_GIB * 1024:
                line += f"{'not tried':>24}"
                continue
            usage = measure(case)
            line += f"{usage.peak_mib:>12.0f} MiB{usage.seconds:>6.2f} s"
        yield line


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--head", choices=["trained", "frozen"], default="trained")
    arguments = parser.parse_args()
    cases = {
        num_tokens: [
            Case(
                way,
                num_tokens,
                arguments.vocabulary,
                arguments.width,
                arguments.dtype,
                arguments.threads,
                arguments.device,
                arguments.head == "trained",
            )
            for way in WAYS
        ]
        for num_tokens in arguments.tokens
    }
    size = arguments.vocabulary * arguments.width * (4 if arguments.dtype == "float32" else 2)
    print(
        f"vocabulary {arguments.vocabulary}, width {arguments.width}, {arguments.dtype}, head "
        f"{arguments.head} ({size / _MIB:.0f} MiB, as much again its gradient), "
        f"{arguments.threads} thread(s) on {arguments.device}: peak beside head and hidden states, "
        f"and {'CPU ' if arguments.device == 'cpu' else ''}seconds forward and backward"
    )
    for line in format_table(cases):
        print(line, flush=True)


if __name__ == "__main__":
    main()
