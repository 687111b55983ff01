"""How the first rank leads: it says what it does next, and the others do the same.

The first rank has a learner like any other trainer; before each method that needs all ranks it
sends the method's name and what it is called with. The trajectories of an update are not sent:
they are in the run folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from agentrl_cli.errors import NotFiniteError, RunFolderError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.train.faults import SaveFault
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.ranks import Ranks

_log = get_logger(__name__)

#: After so long without a command the first rank says that it still lives: rollouts may take
#: hours, and whoever waits for a command waits within a deadline.
_SIGN_SECONDS = 60.0


class LeadingLearner(Learner):
    """The first rank's learner; a context manager that sends the others home when it ends.

    As a :class:`Learner` otherwise. May be used from several threads, one after the other.
    """

    def __init__(self, *arguments: Any, sign_seconds: float = _SIGN_SECONDS, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # Also held by who only says that it lives: commands must not mix.
        self._commanding = threading.RLock()
        self._depth = 0
        self._ended = threading.Event()
        self._sign_seconds = sign_seconds
        self._signs = threading.Thread(target=self._give_signs, name="agentrl-ranks", daemon=True)

    def __enter__(self) -> Self:
        self._signs.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        # After an error others may be anywhere: who started them ends them.
        if kind is None:
            self._signs.join(self._sign_seconds)
            with self._leading("stop"):
                pass

    def update(
        self,
        trajectories: Sequence[Trajectory],
        policy_version: int,
        save_fault: SaveFault | None = None,
    ) -> dict[str, float]:
        """As :meth:`Learner.update`; the trajectories are those stored for the step."""
        with self._leading("update", step=self.step + 1, policy_version=policy_version):
            return super().update(trajectories, policy_version, save_fault)

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> list[list[float]]:
        """As :meth:`Learner.compute_logprobs`."""
        lists = [[int(token) for token in ids] for ids in token_id_lists]
        more: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
        more["starts"] = None if starts is None else [int(start) for start in starts]
        with self._leading("compute_logprobs", lists, replaced=list(replaced or ()), **more):
            return super().compute_logprobs(lists, replaced=replaced, **more)

    def weights(self) -> dict[str, Tensor]:
        """As :meth:`Learner.weights`, in copies."""
        with self._leading("weights"):
            return super().weights()

    def save(self, folder: str | Path) -> None:
        """As :meth:`Learner.save`."""
        with self._leading("save", str(folder)):
            super().save(folder)

    def load(self, folder: str | Path) -> None:
        """As :meth:`Learner.load`."""
        with self._leading("load", str(folder)):
            super().load(folder)

    @contextmanager
    def _leading(self, method: str, *arguments: Any, **more: Any) -> Iterator[None]:
        """Inside the block the others call the same method, which does not lead by itself."""
        with self._commanding:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._ranks.broadcast([method, arguments, more])
                yield
            finally:
                self._depth -= 1

    def _give_signs(self) -> None:
        while not self._ended.wait(self._sign_seconds):
            try:
                with self._leading("wait"):
                    pass
            except RuntimeError as error:
                _log.warning("the other ranks do not hear this one any more: %s", error)
                return


def follow(
    learner: Learner,
    ranks: Ranks,
    read_trajectories: Callable[[int], Sequence[Trajectory]],
    save_fault: SaveFault | None = None,
) -> None:
    """Does what the first rank commands until it says that all is done.

    Args:
        learner: this rank's.
        ranks: the first of which leads.
        read_trajectories: those stored for a step.
        save_fault: keeps a micro-batch of this rank's that is not finite.

    Raises:
        RuntimeError: the first rank died, or said nothing within the deadline of an exchange.
        RunFolderError: a step's trajectories are not in the run folder.
    """
    while True:
        method, arguments, more = ranks.broadcast(None)
        if method == "stop":
            return
        if method == "wait":
            continue
        if method == "update":
            if more["step"] != learner.step + 1:
                raise RunFolderError(
                    f"this rank has done {learner.step} steps, and the first one begins step "
                    f"{more['step']}: they do not train the same model. This is a bug in agentrl"
                )
            arguments = [read_trajectories(more.pop("step"))]
            more["save_fault"] = save_fault
        if "replaced" in more:
            # The values are used on the first rank alone.
            more["replaced"] = dict.fromkeys(more["replaced"]) or None
        try:
            getattr(learner, method)(*arguments, **more)
        except NotFiniteError as error:
            # Raised on all ranks: the first says what becomes of the run.
            _log.warning("%s: %s", method, error)
