"""Two real vLLM servers behind the router, one of them killed in the middle of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, Probe, Sampling, join_pieces
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.errors import ServerDownError
from agentrl_cli.launch.servers.server_group import ServerGroup

#: Two servers start, and one of them once more.
pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-4
NUM_CALLERS = 24
MAX_TOKENS = 480
#: The router reads a call in pieces of so many tokens.
PIECE_TOKENS = 64


class WatchedServer(VllmServer):
    """Notes the prompts it is sent, and how many tokens its open calls have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompts: list[tuple[int, ...]] = []
        self.open_calls: dict[int, int] = {}

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stream_interval: int = 1,
    ) -> AsyncGenerator[Generation]:
        self.prompts.append(tuple(prompt_ids))
        pieces = super().stream(prompt_ids, sampling, stream_interval=stream_interval)
        return self._watch(len(self.prompts), pieces)

    async def _watch(
        self, number: int, pieces: AsyncGenerator[Generation]
    ) -> AsyncGenerator[Generation]:
        try:
            async for piece in pieces:
                num_tokens = self.open_calls.get(number, 0)
                self.open_calls[number] = num_tokens + len(piece.completion_ids)
                yield piece
        finally:
            self.open_calls.pop(number, None)
            await pieces.aclose()

    @property
    def is_in_the_middle(self) -> bool:
        """Whether a call has more than a piece of tokens, and as many to come."""
        return any(PIECE_TOKENS < n < MAX_TOKENS / 2 for n in self.open_calls.values())


@pytest.fixture(scope="module")
def config(untied_folder: Path, make_vllm_config: Callable[..., ExperimentConfig]) -> Any:
    return make_vllm_config(untied_folder, {"num_servers": 2, "first_port": 8920})


@pytest.fixture(scope="module")
def server_group(
    config: ExperimentConfig, build_server_group: Callable[..., ServerGroup]
) -> Iterator[ServerGroup]:
    with build_server_group(config) as server_group:
        server_group.wait()
        yield server_group


async def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_no_call_fails_when_a_server_is_killed(
    server_group: ServerGroup,
    config: ExperimentConfig,
    build_tiny_model: Callable[..., Any],
    compute_truth: Callable[..., Any],
) -> None:
    servers = [WatchedServer(endpoint, config.engine) for endpoint in server_group.endpoints]
    router = EngineRouter(
        servers,
        config.engine,
        model_name="tiny",
        transfer=build_weight_transfer(
            config, model_folder=config.model.path, kind="disk", tied_names={}
        ),
    )
    models = {version: build_tiny_model(version) for version in (1, 2)}
    done: list[tuple[list[int], Generation]] = []
    failed_streams: list[str] = []
    is_over = False

    async def call_on_and_on(number: int) -> None:
        turn = 0
        while not is_over:
            turn += 1
            prompt = [5 + number, 7 + turn % 50, 11, 13]
            sampling = Sampling(max_tokens=MAX_TOKENS, seed=number * 1000 + turn)
            if number % 4:
                generation = await router.generate(prompt, sampling, session_id=str(number))
            else:
                try:
                    generation = join_pieces([p async for p in router.stream(prompt, sampling)])
                except ServerDownError as error:
                    failed_streams.append(str(error))
                    continue
            done.append((prompt, generation))

    def check_all(version: int) -> int:
        """How many completions were sampled by one version alone; compares their logprobs."""
        found = [(p, g) for p, g in done if set(g.versions) == {version}]
        for prompt, generation in found:
            expected = compute_truth(models[version], prompt, generation, Sampling())
            assert generation.rollout_logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
            assert len(generation.versions) == len(generation.completion_ids)
        return len(found)

    await router.start(None)
    try:
        await router.publish_weights(1, models[1].state_dict())
        callers = [asyncio.create_task(call_on_and_on(n)) for n in range(NUM_CALLERS)]
        # The API server, which its process reaper has started. Known beforehand: looking for it
        # takes long enough on a busy machine for calls to end.
        [victim] = psutil.Process(server_group.processes[0].pid).children()
        await wait_for(lambda: servers[0].is_in_the_middle, 60)
        # As the system does when memory runs out.
        victim.kill()
        await wait_for(lambda: len(router.replicas) == 1, 10)
        await wait_for(lambda: not servers[0].open_calls, 10)
        faults = router.take_fault_metrics()
        assert faults["resampled_calls"] >= 1
        assert faults["lost_tokens"] > PIECE_TOKENS
        # From its start: no prompt has grown by what was sampled before.
        assert {len(p) for p in servers[1].prompts} == {4}
        num_done = len(done)
        await wait_for(lambda: len(done) > num_done + 2 * NUM_CALLERS, 60)
        # Published while the server is started again: it must come back with these.
        await router.publish_weights(2, models[2].state_dict())
        ids = tuple(range(20, 40))
        with torch.no_grad():
            logprobs = models[2](torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        likely = enumerate(logprobs.tolist())
        probe = Probe(prompt_ids=ids, logprobs=tuple(likely), tolerance=TOLERANCE)
        router.expect(2, [probe])
        await wait_for(lambda: len(router.replicas) == 2, 240)
        num_prompts = len(servers[0].prompts)
        await wait_for(lambda: len(servers[0].prompts) > num_prompts, 30)
        back = next(r for r in router.replicas if r.name == servers[0].name)
        prompt = [5, 6, 7, 8]
        done.append((prompt, await back.generate(prompt, Sampling(max_tokens=50))))
        assert set(done[-1][1].versions) == {2}
        assert [await replica.policy_version() for replica in router.replicas] == [2, 2]
        is_over = True
        # Raises what any call raised.
        await asyncio.wait_for(asyncio.gather(*callers), 60)
        # At the one death, the streams that were being read.
        assert len(failed_streams) <= NUM_CALLERS / 4
        assert all("handed out already" in text for text in failed_streams)
        assert {v for _, g in done for v in g.versions} == {1, 2}
        assert check_all(1) > NUM_CALLERS
        assert check_all(2) > NUM_CALLERS
    finally:
        is_over = True
        await router.close()
