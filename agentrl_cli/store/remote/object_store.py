"""Run folders on object storage: S3 and what speaks its protocol, Google Cloud Storage, Azure."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import MissingExtraError, RunFolderError
from agentrl_cli.store.atomic_files import atomic_file
from agentrl_cli.store.remote.remote_files import TaggedContent, UnreachableError

if TYPE_CHECKING:
    from obstore import PutMode, PutResult

#: A file is sent and fetched in parts of this size, each a request with a deadline.
_PART_BYTES = 2**23
_MAX_PARTS = 10_000
_NUM_PARTS_AT_ONCE = 4
_PART_SECONDS = 30
#: The deadline of a request that holds a lease, which counts seconds.
_SMALL_SECONDS = 5
#: How long a start waits for an answer.
_START_SECONDS = 10.0
_ENVIRONMENT = (
    "Credentials are read from the environment: for S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
    "and AWS_REGION, and AWS_ENDPOINT_URL for a server that is not Amazon's; for gs:// "
    "GOOGLE_APPLICATION_CREDENTIALS; for az:// AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY. Type export NAME=VALUE for what is missing, or "
    "output_dir=FOLDER for a folder of this machine"
)


class ObjectStore:
    """:class:`~agentrl_cli.store.remote.remote_files.RemoteFiles` below a URL such as
    ``s3://bucket/runs/exp/t0``.

    Raises:
        UserInputError: the bucket cannot be used; with what to type.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if importlib.util.find_spec("obstore") is None:
            raise MissingExtraError(
                f"{url}: object storage needs the package obstore, which is not installed. "
                "Type: pip install 'agentrl-cli[object-storage]'"
            )
        import obstore
        import obstore.exceptions

        self._obs: Any = obstore
        self._errors = obstore.exceptions
        endpoint = _find_endpoint()
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise RunFolderError(f"{url}: {endpoint!r} is no URL of a server. {_ENVIRONMENT}")
        try:
            self._store = _connect(self.url, _PART_SECONDS, num_retries=2)
            self._small = _connect(self.url, _SMALL_SECONDS, num_retries=0)
        except (self._errors.BaseError, ValueError) as error:
            raise RunFolderError(f"{url}: {_first_line(error)}. {_ENVIRONMENT}") from None
        self._check_usable()

    def _check_usable(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with self._translated():
                    next(iter(self._obs.list(self._store, chunk_size=1)), None)
                return
            except UnreachableError as error:
                cause, text = error.__cause__, str(error)
                # Some servers answer so while they start.
                is_over = time.monotonic() > deadline or "error sending request" not in str(cause)
                if is_over and ("NoSuchBucket" in str(cause) or "NoSuchContainer" in str(cause)):
                    raise RunFolderError(
                        f"{self.url}: there is no such bucket, and none is made. Make it, or type "
                        "output_dir=s3://BUCKET/FOLDER with one that you may write to"
                    ) from None
                if is_over:
                    raise RunFolderError(f"{text}. {_ENVIRONMENT}") from None
                time.sleep(0.5)

    def list_names(self, folder: str = "") -> dict[str, int]:
        with self._translated():
            batches = self._obs.list(self._store, folder or None)
            return {meta["path"]: meta["size"] for batch in batches for meta in batch}

    def get(self, name: str, path: Path) -> bool:
        with self._translated():
            try:
                meta = self._obs.head(self._store, name)
                size, tag = meta["size"], meta["e_tag"]
                with atomic_file(path) as file:
                    for start in range(0, size, _PART_BYTES):
                        # Of one version of the file.
                        options = {
                            "range": (start, min(start + _PART_BYTES, size)),
                            "if_match": tag,
                        }
                        file.write(self._obs.get(self._store, name, options=options).bytes())
            except FileNotFoundError:
                return False
        return True

    def put(self, name: str, path: Path) -> None:
        part = max(_PART_BYTES, path.stat().st_size // (_MAX_PARTS - 1) + 1)
        with self._translated():
            self._obs.put(
                self._store, name, path, chunk_size=part, max_concurrency=_NUM_PARTS_AT_ONCE
            )

    def delete(self, names: Sequence[str]) -> None:
        with self._translated():
            try:
                self._obs.delete(self._store, list(names))
            except FileNotFoundError:
                # Not of S3, which ignores what is not there; who knows what is left of the others?
                for name in names:
                    with suppress(FileNotFoundError):
                        self._obs.delete(self._store, name)

    def read(self, name: str) -> TaggedContent | None:
        with self._translated():
            try:
                found = self._obs.get(self._small, name)
            except FileNotFoundError:
                return None
            return TaggedContent(bytes(found.bytes()), _format_tag(found.meta))

    def create(self, name: str, content: bytes) -> str | None:
        return self._put_small(name, content, "create")

    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        return self._put_small(name, content, json.loads(tag))

    def _put_small(self, name: str, content: bytes, mode: PutMode) -> str | None:
        with self._translated():
            try:
                return _format_tag(self._obs.put(self._small, name, content, mode=mode))
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._errors.BaseError, FileNotFoundError) as error:
            raise UnreachableError(f"{self.url}: {_first_line(error)}") from error


def _find_endpoint() -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _connect(url: str, seconds: int, *, num_retries: int) -> Any:
    from obstore.store import from_url

    # Not read from the environment by a client that is given options.
    allow_http = _find_endpoint().startswith("http://") or bool(os.environ.get("AWS_ALLOW_HTTP"))
    return from_url(
        url,
        client_options={"timeout": timedelta(seconds=seconds), "allow_http": allow_http},
        retry_config={"max_retries": num_retries, "retry_timeout": timedelta(seconds=seconds)},
    )


def _format_tag(version: PutResult | Any) -> str:
    """What a conditional put asks for: Google Cloud Storage goes by the version."""
    return json.dumps({name: version[name] for name in ("e_tag", "version") if version[name]})


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
