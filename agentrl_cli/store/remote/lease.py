"""One run at a time in a run folder that several machines reach.

The lease is a file that its owner rewrites every few seconds, so that its tag changes. Who finds
one whose tag stays the same for longer takes it over, by a replacement that succeeds only for that
tag: whatever else happens, one of two wins. No clocks of two machines are compared.

An owner that could not rewrite it writes nothing else until it has: when its place was away, the
lease is still its own afterwards, unless another has waited for longer than the owner may write
without it. What the owner sent before may still arrive: a request is given up after seconds.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from typing import Any, Self

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.log import get_logger
from agentrl_cli.store import layout
from agentrl_cli.store.folder_lock import format_held
from agentrl_cli.store.remote.remote_files import (
    PATIENCE_SECONDS,
    RemoteFiles,
    TaggedContent,
    UnreachableError,
    format_away,
)

_log = get_logger(__name__)

RENEW_SECONDS = 5.0
#: How long an owner may write after the last time that the lease was known to be its own.
TRUST_SECONDS = 20.0
#: How long a lease must not change to be taken over.
TAKEOVER_SECONDS = 30.0
_POLL_SECONDS = 1.0


class Lease:
    """The right to write into a run folder: :meth:`take` it, or :meth:`join` its owner."""

    def __init__(self, files: RemoteFiles, lease_id: str, tag: str | None) -> None:
        self.id = lease_id
        self._files = files
        self._tag = tag
        #: What this process has had as its id, and the one that is written.
        self._ids, self._written_id = {lease_id}, lease_id
        self._has_trainer = False
        self._seen = ""
        self._num_renewals = 0
        self._lost_to: str | None = None
        self._trusted_at = time.monotonic()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="agentrl-lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, files: RemoteFiles) -> Self:
        """A lease of this process; that of a dead one is taken over after ``TAKEOVER_SECONDS``.

        Raises:
            RunFolderError: another process has it, and is alive.
            StoreError: the place does not answer.
        """
        lease_id = uuid.uuid4().hex
        content = _format(lease_id, 0)
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        seen, since = None, 0.0
        while True:
            now = time.monotonic()
            try:
                tag = files.create(layout.LOCK, content)
                found = files.read(layout.LOCK) if tag is None else None
                if found is not None and _parse(found).get("id") == lease_id:
                    # The answer to an earlier attempt was lost.
                    tag = found.tag
                elif found is not None and seen is None:
                    seen, since = found.tag, now
                    _log.warning(
                        "%s: %s holds it; if it is dead, that shows within %g s",
                        *(files.url, _name_owner(found), TAKEOVER_SECONDS),
                    )
                elif found is not None and found.tag != seen:
                    raise RunFolderError(format_held(files.url, _name_owner(found)))
                elif found is not None and now - since >= TAKEOVER_SECONDS:
                    tag = files.replace(layout.LOCK, content, found.tag)
                if tag is not None:
                    return cls(files, lease_id, tag)
            except UnreachableError as error:
                # The owner, too, must be able to show that it is alive.
                seen = None
                if now > give_up_at:
                    raise StoreError(format_away(error)) from error
            time.sleep(_POLL_SECONDS)

    @classmethod
    def join(cls, files: RemoteFiles, lease_id: str) -> Self:
        """The lease of the command that started this process, as long as the command renews it."""
        return cls(files, lease_id, None)

    def admit_trainer(self) -> None:
        """Returns when a trainer may join that is the only one to write under the lease.

        An earlier one may live on a machine that does not answer. Under a new id it either learns
        that it is replaced, or has not seen its own for too long to write.

        Raises:
            StoreError: another has taken the lease over.
            UnreachableError: the place does not answer.
        """
        if self._has_trainer:
            self._ids.add(new := uuid.uuid4().hex)
            self.id = new
            while self._written_id != new:
                self.check()
                time.sleep(_POLL_SECONDS)
            time.sleep(TRUST_SECONDS)
        self._has_trainer = True

    def check(self) -> None:
        """Returns if what is written now is written by the owner.

        Raises:
            StoreError: another has taken the lease over.
            UnreachableError: that is unknown at the moment.
        """
        if self._lost_to is not None:
            raise StoreError(
                f"{self._files.url}: {self._lost_to} has the run folder now, since this run could "
                f"not show for {TAKEOVER_SECONDS:g} s that it was alive (a paused process or "
                "machine, or a broken network). It has stopped writing; what it wrote before is "
                "intact. Type the same command again once the other has ended"
            )
        if time.monotonic() - self._trusted_at > TRUST_SECONDS:
            raise UnreachableError(
                f"{self._files.url}: the lease of the run folder could not be renewed for "
                f"{TRUST_SECONDS:g} s"
            )

    def release(self) -> None:
        """Lets others take it at once; may be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        try:
            if self._tag is not None and self._lost_to is None and self._renew():
                self._files.delete([layout.LOCK])
        except UnreachableError as error:
            _log.warning("the lease was not released, and is free in a while: %s", error)

    def _keep(self) -> None:
        pause_seconds = 0.0 if self._tag is None else RENEW_SECONDS
        while self._lost_to is None and not self._released.wait(pause_seconds):
            asked_at, pause_seconds = time.monotonic(), RENEW_SECONDS
            try:
                if self._renew() if self._tag is not None else self._watch():
                    self._trusted_at = asked_at
            except UnreachableError:
                pause_seconds = min(_POLL_SECONDS, RENEW_SECONDS)

    def _renew(self) -> bool:
        self._num_renewals += 1
        assert self._tag is not None
        new_id = self.id
        content = _format(new_id, self._num_renewals)
        tag = self._files.replace(layout.LOCK, content, self._tag)
        if tag is not None:
            self._written_id = new_id
        else:
            # By another, or by an attempt of this process whose answer was lost.
            tag = self._find_own()
        self._tag = tag or self._tag
        return tag is not None

    def _watch(self) -> bool:
        """Whether the owner has renewed it since the last look."""
        before = self._seen
        self._seen = self._find_own() or before
        return self._seen != before

    def _find_own(self) -> str | None:
        """The tag of the lease; None: it is another's."""
        found = self._files.read(layout.LOCK)
        if found is not None and _parse(found).get("id") in self._ids:
            return found.tag
        self._lost_to = "nobody" if found is None else _name_owner(found)
        return None


def _format(lease_id: str, num_renewals: int) -> bytes:
    owner = f"process {os.getpid()} on {platform.node()}"
    return json.dumps({"owner": owner, "id": lease_id, "renewals": num_renewals}).encode()


def _parse(found: TaggedContent) -> dict[str, Any]:
    try:
        return dict(json.loads(found.content))
    except (TypeError, ValueError):
        return {}


def _name_owner(found: TaggedContent) -> str:
    return str(_parse(found).get("owner") or "another process")
