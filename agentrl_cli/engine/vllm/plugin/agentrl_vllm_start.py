"""Starts a vLLM server whose semaphores can be told from those of other programs.

The system keeps them as files, and their own names say nothing of whom they belong to: those of a
server that is killed would stay for good. Run by the server's interpreter, which may have no
agentrl: the standard library only.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy

if __name__ == "__main__":
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings["semprefix"] = f"/{os.environ['AGENTRL_SEMAPHORES']}"
    # As if it had been started itself: processes that it starts import its module again.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
