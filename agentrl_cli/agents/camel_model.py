"""``TrackedCamelModel``: what a CAMEL agent speaks to, so that its calls are recorded.

Importing this loads CAMEL; agentrl itself does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, OpenAI

from agentrl_cli.blocking_clients import build_client_pair
from agentrl_cli.errors import MissingExtraError

try:
    from camel.models import OpenAICompatibleModel
    from camel.utils import BaseTokenCounter
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"TrackedCamelModel needs camel-ai, which is not installed or incomplete ({error}). "
        "Type uv pip install 'agentrl-cli[camel]'"
    ) from error

#: CAMEL summarises a history that comes near its limit, and so rewrites what was sampled.
#: The engine's own limit refuses what is too long.
_NO_TOKEN_LIMIT = 999_999_999
_CHARACTERS_PER_TOKEN = 4
_CHARACTER_BITS = 21


class TrackedCamelModel(OpenAICompatibleModel):
    """A CAMEL model backend on the tracking client; works in ``step`` and ``astep``.

    Args:
        client: the ``client`` that a builder or an agent function is given.
        model: the ``model`` likewise.
        model_config_dict: request parameters, such as ``{"temperature": 0.7}`` or
            ``{"stream": True}``.
        token_counter: counts tokens for CAMEL's own limits (``ChatAgent(token_limit=...)``);
            None: a quarter of the characters. CAMEL's default downloads a file.
    """

    def __init__(
        self,
        client: AsyncOpenAI | OpenAI,
        model: str,
        *,
        model_config_dict: Mapping[str, Any] | None = None,
        token_counter: BaseTokenCounter | None = None,
    ) -> None:
        blocking, waiting = build_client_pair(client)
        super().__init__(
            model,
            dict(model_config_dict or {}),
            api_key=client.api_key,
            url=str(client.base_url),
            token_counter=token_counter or CharacterCounter(),
            client=blocking,
            async_client=waiting,
        )
        self.tracked_client = client
        """By this agentrl knows that what is said here is recorded."""
        self.last_error: Exception | None = None
        """The last error of a call: CAMEL's streaming agents answer with it as a text."""

    @property
    def token_limit(self) -> int:
        """No limit of CAMEL's own."""
        return _NO_TOKEN_LIMIT

    async def _arun(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._arun(*args, **kwargs)
        except Exception as error:
            self.last_error = error
            raise

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        except Exception as error:
            self.last_error = error
            raise


class CharacterCounter(BaseTokenCounter):
    """Estimates tokens as a quarter of the characters; needs no file."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        """The estimate for all texts of the messages."""
        return sum(len(str(message.get("content") or "")) for message in messages) // (
            _CHARACTERS_PER_TOKEN
        )

    def encode(self, text: str) -> list[int]:
        """Four characters to each number."""
        pieces = (
            text[start : start + _CHARACTERS_PER_TOKEN]
            for start in range(0, len(text), _CHARACTERS_PER_TOKEN)
        )
        return [
            sum(ord(character) << _CHARACTER_BITS * n for n, character in enumerate(piece))
            for piece in pieces
        ]

    def decode(self, token_ids: list[int]) -> str:
        """The text again."""
        characters = []
        for token_id in token_ids:
            while token_id:
                characters.append(chr(token_id & (1 << _CHARACTER_BITS) - 1))
                token_id >>= _CHARACTER_BITS
        return "".join(characters)
