"""A model folder, as a user has one; and engines that remember what they sampled."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch

from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.tracking.credit import build_sequences


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


@pytest.fixture(scope="session")
def brief_model_folder(
    tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any, build_qwen2: Callable[..., Any]
) -> Path:
    """A random model that speaks a few letters a turn: the Agents SDK takes no reply that is cut
    off, and CAMEL forgets one that is empty."""
    model = build_qwen2(chat_tokenizer, tied=False, initializer_range=0.05)
    letters = [chat_tokenizer.convert_tokens_to_ids(letter) for letter in ascii_lowercase]
    end, begin = chat_tokenizer.eos_token_id, chat_tokenizer.encode("\n")[-1]
    with torch.no_grad():
        # Two places of the state say that there is a token, and whether a turn begins with it.
        embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
        embeddings[:, :2] = torch.tensor([5.0, 0.0])
        embeddings[begin, 1] = 5.0
        head[:, :2] = torch.tensor([-5.0, 0.0])
        head[[*letters, end], 0] = 0.0
        head[end] = 0.0
        head[end, :2] = torch.tensor([0.3, -5.0])
    folder = tmp_path_factory.mktemp("brief")
    model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def brief_model(tmp_path: Path, brief_model_folder: Path) -> Path:
    """The same model in the user's folder."""
    return Path(shutil.copytree(brief_model_folder, tmp_path / "brief"))


@dataclass(frozen=True)
class Sampled:
    """One completion as the engine made it."""

    prompt_ids: tuple[int, ...]
    generation: Generation


class RecordingEngine:
    """Any engine, and every completion that it made to the end, cut off after ``max_tokens``."""

    def __init__(self, engine: Any, max_tokens: int | None = None) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self.sampled: list[Sampled] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        generation = self._cut(
            await self._engine.generate(prompt_ids, sampling, session_id=session_id)
        )
        self.sampled.append(Sampled(tuple(prompt_ids), generation))
        return generation

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        ids: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        versions: tuple[int, ...] = ()
        async for whole_piece in self._engine.stream(prompt_ids, sampling, session_id=session_id):
            piece = self._cut(whole_piece)
            ids += piece.completion_ids
            logprobs += piece.rollout_logprobs
            versions += piece.versions
            if piece.finish_reason is not None:
                whole = replace(
                    piece, completion_ids=ids, rollout_logprobs=logprobs, versions=versions
                )
                self.sampled.append(Sampled(tuple(prompt_ids), whole))
            yield piece

    def _cut(self, generation: Generation) -> Generation:
        """Of engines whose streams have one piece."""
        limit = self._max_tokens
        if limit is None or len(generation.completion_ids) <= limit:
            return generation
        return replace(
            generation,
            completion_ids=generation.completion_ids[:limit],
            rollout_logprobs=generation.rollout_logprobs[:limit],
            versions=generation.versions[:limit],
            finish_reason="length",
        )


def check_exported_tensors(trajectories: Sequence[Trajectory], engine: RecordingEngine) -> None:
    """Every token that the engine sampled is in one tensor, trained there, and no other is."""
    for style in ("concat", "individual"):
        tensors = [
            sequence.to_tensor_dict()
            for trajectory in trajectories
            for sequence in build_sequences(trajectory.interactions, style)
        ]
        num_masked = sum(int(t["loss_mask"].sum()) for t in tensors)
        assert num_masked == sum(len(s.generation.completion_ids) for s in engine.sampled)
        for tensor in tensors:
            # What stands in two branches was sampled for both, and is trained in one.
            unsampled = ~tensor["loss_mask"][0]
            for sampled in engine.sampled:
                if _stands_in(tensor, sampled):
                    unsampled[_find_span(sampled)] = False
            assert (tensor["versions"][0][unsampled] == -1).all()
            assert (tensor["logprobs"][0][unsampled] == 0).all()
        taken: set[tuple[int, int]] = set()
        for sampled in engine.sampled:
            start = len(sampled.prompt_ids)
            # The same tokens may have been sampled twice, with logprobs that differ in a last bit.
            homes = [
                number
                for number, tensor in enumerate(tensors)
                if (number, start) not in taken and _holds(tensor, sampled)
            ]
            assert homes, f"{sampled.generation} after a prompt of {start} is nowhere ({style})"
            taken.add((homes[0], start))


def _holds(tensor: dict[str, Any], sampled: Sampled) -> bool:
    """Whether the completion stands in the tensor, trained, after the prompt that it had."""
    return _stands_in(tensor, sampled) and bool(tensor["loss_mask"][0, _find_span(sampled)].all())


def _stands_in(tensor: dict[str, Any], sampled: Sampled) -> bool:
    import torch

    expected = sampled.generation
    span = _find_span(sampled)
    seen = [*sampled.prompt_ids, *expected.completion_ids]
    logprobs = torch.tensor(expected.rollout_logprobs, dtype=torch.float32)
    return (
        tensor["input_ids"][0, : span.stop].tolist() == seen
        and tensor["versions"][0, span].tolist() == list(expected.versions)
        and torch.equal(tensor["logprobs"][0, span], logprobs)
    )


def _find_span(sampled: Sampled) -> slice:
    start = len(sampled.prompt_ids)
    return slice(start, start + len(sampled.generation.completion_ids))


@pytest.fixture(scope="session")
def recording_engine() -> type[RecordingEngine]:
    """Wraps an engine: ``recording_engine(engine).sampled`` is what it made."""
    return RecordingEngine


@pytest.fixture(scope="session")
def check_tensors() -> Callable[..., None]:
    """Holds exported tensors to what an engine recorded."""
    return check_exported_tensors


@dataclass(frozen=True)
class Play:
    """What one trajectory was, and the engine that it was made on."""

    trajectory: Trajectory
    engine: RecordingEngine
    prompts: list[str]
    """Texts that the engine was asked to continue."""

    @property
    def prefix_mismatches(self) -> list[str]:
        """The causes of all prefix mismatches, in the order of the calls."""
        causes = (i.mismatch_cause for i in self.trajectory.interactions)
        return [cause.value for cause in causes if cause is not None]


ROW = {"question": "What is 20 + 22?", "answer": "42"}


@pytest.fixture
def make_agent_workflow(open_client: Any) -> Callable[..., AgentRolloutWorkflow]:
    """The workflow of a builder's agent; an answer that holds the row's is worth 1."""

    async def reward_fn(completions: str, answer: str) -> float:
        return float(answer in completions)

    def build(builder: Any, kwargs: Any = None, **rollout: Any) -> AgentRolloutWorkflow:
        return AgentRolloutWorkflow(
            {None: AgentSource(builder, kwargs or {}, "agent_builder_path")},
            reward=AsyncRewardWrapper(reward_fn),
            gconfig=GenerationConfig(),
            rollout=RolloutConfig(**rollout),
            open_client=open_client,
        )

    return build


@pytest.fixture
def play_agent(make_agent_workflow: Any, scripted_engine: Any) -> Callable[..., Any]:
    """Runs one trajectory of a builder's agent, whose model replies as given, and checks that
    what it exports is what the engine sampled."""

    async def play(
        builder: Any,
        *replies: Any,
        row: dict[str, Any] = ROW,
        kwargs: Any = None,
        max_tokens: int | None = None,
        **rollout: Any,
    ) -> Play:
        scripted = scripted_engine(replies)
        engine = RecordingEngine(scripted, max_tokens)
        task = Task(task_id="0", row=row, group_id="000001.000")
        workflow = make_agent_workflow(builder, kwargs, **rollout)
        trajectory = await workflow.arun_trajectory(engine, Attempt(task=task, step=1))
        check_exported_tensors([trajectory], engine)
        return Play(trajectory, engine, scripted.prompts)

    return play
