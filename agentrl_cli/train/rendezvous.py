"""Where the processes that train together meet, and the error of those that lose one another.

Without torch, so that whoever starts and watches them need not load it.
"""

from __future__ import annotations

from dataclasses import dataclass


class RankLostError(RuntimeError):
    """Another rank has ended, or has not come to an exchange in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Which of the ranks a process is, and where it meets the others."""

    index: int
    count: int
    address: str
    """``file:///PATH`` of a file that does not exist yet, in a folder that only this user can open;
    or ``tcp://HOST:PORT``, a free port of rank 0's node, where they are on several."""
    has_store: bool = False
    """True: somebody else, who outlives the ranks, keeps a store of torch's at that port."""
