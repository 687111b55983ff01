"""The door for programs elsewhere: the gateway's socket with the routes of a desk."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable

from agentrl_cli.config.experiment import ExternalConfig
from agentrl_cli.tracking.admin import PREFIX, AdminRoutes, SessionDesk
from agentrl_cli.tracking.gateway import BaseGateway
from agentrl_cli.tracking.server import KEY_VARIABLE, check_binding, open_listener


class ExternalDoor:
    """Opens once a gateway is there; the key is the user's, or a random one that is shown once.

    Args:
        config: where to listen.
        announce: shows a text to the user, and keeps it nowhere.
        key: of the user's choice; None: that in AGENTRL_API_KEY, if there is one.

    Raises:
        UserInputError: the port cannot be used, or other machines would get in without a key.
    """

    def __init__(
        self, config: ExternalConfig, announce: Callable[[str], None], *, key: str | None = None
    ) -> None:
        self._config = config
        self._announce = announce
        given = key or os.environ.get(KEY_VARIABLE) or None
        check_binding(config.host, given, "rollout.external.host")
        # Said before a model is loaded for minutes.
        open_listener(config.port or 0, config.host).close()
        self._is_own = given is None
        self._key = given or f"sk-agentrl-admin-{secrets.token_urlsafe(24)}"
        self.is_open = False
        self._lock = asyncio.Lock()

    async def open(self, gateway: BaseGateway, desk: SessionDesk) -> None:
        """Serves the desk beside the gateway's protocols; once."""
        async with self._lock:
            if not self.is_open:
                await self._open(gateway, desk)

    async def _open(self, gateway: BaseGateway, desk: SessionDesk) -> None:
        routes = AdminRoutes(desk, self._key, gateway.model_name, gateway.limits)
        gateway.add_routes(routes.list_routes(), desk.stop)
        base_url = await gateway.serve(self._config.port or 0, self._config.host)
        self._announce(format_door(base_url.removesuffix("/v1"), self._key if self._is_own else ""))
        self.is_open = True


def format_door(url: str, key: str) -> str:
    """What a person types to use the door; ``key`` is empty where the person has chosen it."""
    shown = f"  export {KEY_VARIABLE}={key}\n" if key else ""
    return (
        "programs elsewhere get tasks here (docs/external-agents.md):\n\n"
        f"  export AGENTRL_URL={url}\n{shown}"
        f"  curl -X POST $AGENTRL_URL{PREFIX}/sessions "
        f'-H "Authorization: Bearer ${KEY_VARIABLE}"\n'
    )
