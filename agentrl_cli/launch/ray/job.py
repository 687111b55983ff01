"""A run on a cluster that this machine does not belong to: a job on its head, watched from here.

A job and not Ray's client (``ray://``): the client would hold the run here, and lose it with the
connection. A job goes on while nobody watches, and the same command watches it again.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunError, UserInputError
from agentrl_cli.launch.ray.cluster import (
    TOKEN_ADVICE,
    check_output_dir,
    check_reachable,
    describe_current_folder,
    explained_copy,
    silence,
)
from agentrl_cli.store.layout import run_dir_of

if TYPE_CHECKING:
    from agentrl_cli.train.loop import StopFlag

_RUN = "agentrl_run"
#: How long a job that is asked to stop may take for the step in progress before it is killed.
_STOP_SECONDS = 3600
_REQUEST_TIMEOUTS = (10.0, 120.0)
_POLL_SECONDS = 1.0
#: How a shell ends that finds no such command.
_NOT_FOUND = 127
#: Each look fetches the whole log: a long one is fetched less often.
_SECONDS_PER_BYTE = 5e-6
_MAX_POLL_SECONDS = 10.0


class _Client(JobSubmissionClient):
    def _do_request(self, *given: Any, **options: Any) -> requests.Response:
        # Ray's own requests would wait for ever.
        timeouts = {"timeout": _REQUEST_TIMEOUTS, **options}
        return super()._do_request(*given, **timeouts)


def run_as_job(
    config: ExperimentConfig,
    url: str,
    config_path: Path,
    words: Sequence[str],
    *,
    show: Callable[[str], None],
    stop: StopFlag,
) -> int:
    """Runs ``agentrl train`` on the head, or watches the job that already does.

    Args:
        config: what file and words come to.
        url: of the cluster's dashboard.
        config_path: the experiment's file, below the current folder, which the job gets a copy of.
        words: the rest of the command line.
        show: gets what the job prints.
        stop: once set, the job is asked to finish its step, to save and to end.

    Returns:
        The exit code of the command on the head.

    Raises:
        UserInputError: the job cannot be started.
        RunError: the cluster does not answer any more.
    """
    silence()
    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)
    check_output_dir(config)
    path = os.path.relpath(config_path)
    if path.startswith(".."):
        raise UserInputError(
            f"--config: {config_path} is not below the current folder, which is what the cluster "
            "gets a copy of. Type the command in a folder that holds it, and the agent's code"
        )
    check_reachable(urlsplit(url).netloc)
    try:
        client = _Client(url)
        job_id = _find_or_submit(client, config, ["train", "--config", path, *words], show)
    except AuthenticationError as error:
        raise UserInputError(
            f"launcher.address: {url} takes no job without a token. {TOKEN_ADVICE}"
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise UserInputError(
            f"launcher.address: {url} does not take the job: {error}. Allowed: the address of the "
            "cluster's dashboard, which ray start --head prints (the head needs ray[default])"
        ) from error
    return _watch(client, job_id, config.launcher.placement_timeout_seconds, show, stop)


def _find_or_submit(
    client: JobSubmissionClient,
    config: ExperimentConfig,
    words: Sequence[str],
    show: Callable[[str], None],
) -> str:
    is_run = "--dry-run" not in words
    run = run_dir_of(config)
    job_id = _find_running(client, run) if is_run else None
    if job_id is not None:
        if "--overwrite" in words:
            raise UserInputError(
                f"--overwrite: {run} is in use by job {job_id}. Type the command without "
                "--overwrite to watch it, and Ctrl-C then to stop it"
            )
        show(f"job {job_id} is in progress; this is what it has printed\n")
        return job_id
    command = shlex.join([*words, "launcher.address=null"])
    with explained_copy():
        job_id = client.submit_job(
            entrypoint=f"exec python -m agentrl_cli {command}",
            metadata={_RUN: run} if is_run else {},
            runtime_env={
                **describe_current_folder(config),
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_SECONDS)},
            },
        )
    show(f"job {job_id}; it goes on if this command is killed\n")
    return job_id


def _find_running(client: JobSubmissionClient, run: str) -> str | None:
    for job in client.list_jobs():
        if (job.metadata or {}).get(_RUN) == run and not job.status.is_terminal():
            return job.submission_id
    return None


def _watch(
    client: JobSubmissionClient,
    job_id: str,
    patience_seconds: float,
    show: Callable[[str], None],
    stop: StopFlag,
) -> int:
    num_shown, is_asked, answered_at = 0, False, time.monotonic()
    while True:
        try:
            # First whether it has ended: what it prints last is then in its log.
            job = client.get_job_info(job_id)
            log = client.get_job_logs(job_id)
            if stop.is_set() and not is_asked:
                client.stop_job(job_id)
                is_asked = True
            answered_at = time.monotonic()
        except (requests.RequestException, RuntimeError) as error:
            if time.monotonic() - answered_at > patience_seconds:
                raise RunError(
                    f"the cluster has not answered for {patience_seconds:g} s ({error}). If its "
                    f"head is alive, job {job_id} goes on: type the same command to watch it. If "
                    "the head was lost, the same command resumes once it is up again"
                ) from error
            time.sleep(_POLL_SECONDS)
            continue
        show(log[num_shown:])
        num_shown = len(log)
        if job.status.is_terminal():
            return _find_exit_code(job, log, show)
        time.sleep(min(max(_POLL_SECONDS, len(log) * _SECONDS_PER_BYTE), _MAX_POLL_SECONDS))


def _find_exit_code(job: JobDetails, log: str, show: Callable[[str], None]) -> int:
    if job.status == JobStatus.STOPPED:
        return 128 + signal.SIGTERM
    if job.driver_exit_code is None:
        # It did not get as far as the command, or was lost with its node.
        show(f"{job.message}\n")
    elif job.driver_exit_code == _NOT_FOUND or "No module named agentrl_cli" in log:
        show(
            "the command python on the head is not the one with agentrl: type ray start there "
            "where its environment is active\n"
        )
    return 1 if job.driver_exit_code is None else job.driver_exit_code
