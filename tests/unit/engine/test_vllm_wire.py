"""What is said to vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.engine.vllm_version import SUPPORTED_VLLM, check_vllm_version
from agentrl_cli.engine.vllm_wire import format_completion, format_generate
from agentrl_cli.errors import UserInputError


def say(make: Any, sampling: Sampling, adapter: str | None = None) -> dict[str, Any]:
    return make((1, 2), sampling, max_tokens=7, cache_salt="s", adapter=adapter, stream_interval=4)


def test_a_request_asks_for_tokens_logprobs_and_pieces() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=3, stop_token_ids=(5,))
    assert say(format_generate, sampling) == {
        "token_ids": [1, 2],
        "sampling_params": {
            "max_tokens": 7,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "stop_token_ids": [5],
            "logprobs": 0,
            "stream_interval": 4,
            "detokenize": False,
        },
        "cache_salt": "s",
        "stream": True,
    }


def test_the_older_endpoint_is_asked_for_the_same() -> None:
    body = say(format_completion, Sampling(stop=("x",)), adapter="a")
    assert body["prompt"] == [1, 2]
    assert body["return_token_ids"] is True
    assert (body["logprobs"], body["stream"], body["model"]) == (0, True, "a")
    # What the model's own generation_config.json may say does not count.
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
    assert body["stop"] == ["x"]


@pytest.mark.parametrize("make", [format_generate, format_completion])
def test_what_constrains_a_completion_is_said(make: Any) -> None:
    body = say(make, Sampling(structural_tag='{"a": 1}', num_top_logprobs=4))
    params = body.get("sampling_params", body)
    assert params["structured_outputs"] == {"structural_tag": '{"a": 1}'}
    if make is format_generate:
        # vLLM 0.32 counts the sampled token among them here, and not there.
        assert params["logprobs"] == 5
        # Even a server with a reasoning parser holds to it from the first token.
        assert body["reasoning_ended"] is True
    else:
        assert params["logprobs"] == 4
        assert body["return_tokens_as_token_ids"] is True
    assert "structured_outputs" not in say(make, Sampling()).get("sampling_params", {})


@pytest.mark.parametrize("make", [format_generate, format_completion])
@pytest.mark.parametrize(("interval", "streamed"), [(6, True), (7, False)])
def test_what_comes_in_one_piece_anyway_is_not_streamed(
    make: Any, interval: int, streamed: bool
) -> None:
    """A stream costs the server more, and its first token comes alone."""
    body = make(
        (1, 2), Sampling(), max_tokens=7, cache_salt="s", adapter=None, stream_interval=interval
    )
    assert body["stream"] is streamed


def test_text_is_made_only_to_find_stop_texts_in_it() -> None:
    plain = say(format_generate, Sampling(stop=("",)))["sampling_params"]
    assert plain["detokenize"] is False
    assert "stop" not in plain
    stopped = say(format_generate, Sampling(stop=("</a>", "")))["sampling_params"]
    assert stopped["detokenize"] is True
    assert stopped["stop"] == ["</a>"]
    # An end tag may be one special token, which vLLM leaves out of the text otherwise.
    assert stopped["skip_special_tokens"] is False


@pytest.mark.parametrize(("temperature", "sent"), [(0.0, 0.0), (1e-6, 0.0), (1e-4, 1e-4)])
def test_what_vllm_treats_as_greedy_is_said_so(temperature: float, sent: float) -> None:
    body = say(format_generate, Sampling(temperature=temperature))
    assert body["sampling_params"]["temperature"] == sent


def test_the_base_model_is_asked_for_by_no_name() -> None:
    assert "model" not in say(format_generate, Sampling())
    assert say(format_generate, Sampling(), adapter="a")["model"] == "a"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post2", "v0.32.0rc1+cpu", " 0.32\n"])
def test_supported_versions_pass(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2", "0.320.1", "dev", ""])
def test_other_versions_are_refused_with_what_to_type(version: str) -> None:
    with pytest.raises(UserInputError) as caught:
        check_vllm_version(version)
    message = str(caught.value)
    assert f"vLLM {version or '(unknown)'} was found" in message
    assert f"supports vLLM {SUPPORTED_VLLM}" in message
    assert f"pip install 'vllm{SUPPORTED_VLLM}'" in message
    assert "engine.python=PATH" in message
