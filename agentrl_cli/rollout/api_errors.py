"""Errors of calls that an SDK made: whether the call went to agentrl, and where else it went."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from agentrl_cli.tracking.client import IN_PROCESS_URL


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call of a model's API that ended with an error."""

    url: str
    """Where it went; empty: the error does not say."""
    is_own: bool
    """False: it went to another API than agentrl's, that of a judge, say."""
    is_unreachable: bool
    """True: nothing could be connected to."""

    def explain(self) -> str:
        """What the error's message leaves out, as a clause to append."""
        if not self.is_own:
            return (
                f" (the call went to {self.url}, not to agentrl. For the model that is trained, "
                "take the client that agentrl gives, or its base_url and api_key)"
            )
        if self.is_unreachable and self.url.startswith(str(IN_PROCESS_URL)):
            return (
                f" ({self.url} is answered through `client` and `http_client` alone: for a client "
                "of its own, a function names base_url in its signature)"
            )
        return ""


def find_failed_call(
    chain: Iterable[BaseException], own_urls: Collection[str] | None
) -> FailedCall | None:
    """The call whose error is in a chain of causes; None: there is none.

    Args:
        chain: an error and what it came from.
        own_urls: the addresses of the gateway; None: not known, so every call counts as its.
    """
    errors = list(chain)
    error = next((e for e in errors if _is_api_error(e)), None)
    if error is None:
        return None
    url = str(getattr(getattr(error, "request", None), "url", ""))
    return FailedCall(
        url,
        is_own=not url or own_urls is None or url.startswith(tuple(own_urls)),
        is_unreachable=any(type(e).__name__ == "ConnectError" for e in errors),
    )


def _is_api_error(error: BaseException) -> bool:
    """Whether an SDK raised it for a call's sake; known by name, not to load what nobody uses."""
    return any(
        t.__name__ == "APIError" and t.__module__.partition(".")[0] in ("openai", "anthropic")
        for t in type(error).__mro__
    )
