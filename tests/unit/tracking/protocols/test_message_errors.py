"""What ``/v1/messages`` refuses, and what went wrong elsewhere, as Anthropic's SDK sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.errors import EngineError, EngineTimeoutError
from agentrl_cli.records import InteractionStatus

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.anthropic

Open = Callable[..., Any]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}


async def test_an_unknown_previous_reply_has_the_code_that_the_sdk_acts_on(
    open_conversation: Open,
) -> None:
    conversation = open_conversation("never")
    with pytest.raises(anthropic.NotFoundError, match="'msg_1' is no reply of this") as caught:
        await conversation.sdk.beta.messages.create(
            model="m",
            max_tokens=9,
            messages=[USER],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )
    assert caught.value.error_code == "thread_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised", "kind"),
    [
        (EngineError("server died"), "ServiceUnavailableError", "overloaded_error"),
        (EngineTimeoutError("took 600 s"), "GatewayTimeoutError", "timeout_error"),
        (ValueError("a bug"), "InternalServerError", "api_error"),
    ],
)
async def test_failures_before_the_first_token_are_raised_and_not_repeated(
    open_conversation: Open, error: Exception, raised: str, kind: str, stream: bool
) -> None:
    conversation = open_conversation(error, "second try")
    with pytest.raises(anthropic.APIStatusError) as caught:
        await conversation.create(stream=stream, messages=[USER])
    assert (type(caught.value).__name__, caught.value.type) == (raised, kind)
    assert str(error) in caught.value.api_message
    assert caught.value.body["type"] == "error"
    assert caught.value.body["request_id"].startswith("req_")
    [failed] = conversation.interactions
    assert failed.status is InteractionStatus.FAILED


async def test_a_failure_in_the_midst_of_a_stream_is_an_error_event(
    open_conversation: Open, let_engine_die: Callable[[Any], None]
) -> None:
    conversation = open_conversation("never")
    let_engine_die(conversation.engine)
    with pytest.raises(anthropic.APIStatusError) as caught:
        await conversation.create(stream=True, messages=[USER])
    assert caught.value.type == "overloaded_error"
    assert "the server died" in caught.value.api_message
    [failed] = conversation.interactions
    assert failed.status is InteractionStatus.FAILED


async def test_what_is_too_long_is_said(open_conversation: Open) -> None:
    conversation = open_conversation(max_model_len=5)
    with pytest.raises(anthropic.BadRequestError, match=r"engine\.max_model_len is 5") as caught:
        await conversation.create(stream=False, messages=[USER])
    assert caught.value.error_code == "context_length_exceeded"


async def test_keys_open_their_own_session_by_either_header(open_conversation: Open) -> None:
    conversation, other = open_conversation("a", "b", "c"), open_conversation()
    gateway, key = conversation.tracking.gateway, conversation.tracking.session_key
    url = "http://agentrl.invalid/v1/messages"
    body = {"model": "m", "max_tokens": 9, "messages": [USER]}
    for headers, status in (
        ({"x-api-key": key}, 200),
        ({"authorization": f"Bearer {key}"}, 200),
        ({"authorization": "Bearer of-something-else", "x-api-key": key}, 200),
        ({"x-api-key": other.tracking.session_key}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": f"Basic {key}"}, 401),
        ({}, 401),
    ):
        response = await gateway.http_client.post(url, json=body, headers=headers)
        assert response.status_code == status, headers
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"
            assert "x-api-key: KEY" in response.json()["error"]["message"]
    assert len(conversation.interactions) == 3


async def test_a_base_url_with_v1_is_explained(open_conversation: Open) -> None:
    conversation = open_conversation("never")
    sdk = conversation.sdk.with_options(base_url="http://agentrl.invalid/v1")
    with pytest.raises(anthropic.NotFoundError, match="a base_url that ends before it") as caught:
        await sdk.messages.create(model="m", max_tokens=9, messages=[USER])
    assert caught.value.type == "not_found_error"


async def test_models_are_listed(open_conversation: Open) -> None:
    conversation = open_conversation()
    assert [m.id async for m in conversation.sdk.models.list()] == ["scripted"]
