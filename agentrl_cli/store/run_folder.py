"""The run folder: the one object through which everything of a run is written and read."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import append_whole, store_errors, write_text
from agentrl_cli.store.checksums import checksummed_folder
from agentrl_cli.store.manifest import write_manifest
from agentrl_cli.store.pending_trajectories import PendingTrajectories
from agentrl_cli.store.resume_check import check_same_config, load_saved_config, save_config
from agentrl_cli.store.trajectory_file import (
    ProximalLogprobs,
    read_open_rounds,
    read_summaries,
    read_trajectory_file,
    write_proximal_file,
    write_trajectory_file,
)
from agentrl_cli.store.trajectory_summary import OpenRounds, TrajectorySummary
from agentrl_cli.store.working_copy import FolderOwner, LocalFolder, find_run, open_location

#: What the metrics of alarms begin with: ``alarm_<name>`` is 1 in the steps in which it is active.
ALARM_PREFIX = "alarm_"
#: Ends the name of what holds an evaluation's label until it is written.
_CLAIMED = ".claimed.tmp"
_NUMBERS = (int, float, type(None))


class RunFolder:
    """A run's folder: use :meth:`create_or_resume`, :meth:`join`, :meth:`for_evaluation` or
    :meth:`open` to get one."""

    def __init__(self, place: LocalFolder) -> None:
        self.path = place.path
        """Where its files are read and written: on object storage, a working copy."""
        self.location = place.location
        """What a user calls it: a path or a URL."""
        self._place = place
        self._metrics_path = self.path / layout.METRICS
        self._pending = PendingTrajectories(self.path / layout.PENDING, place)
        self._writer = ThreadPoolExecutor(1, "agentrl-store")
        self._writing: Future[None] | None = None

    @classmethod
    def create_or_resume(
        cls,
        config: ExperimentConfig,
        *,
        overwrite: bool = False,
        versions: Mapping[str, str] | None = None,
    ) -> Self:
        """The folder of a training run, held for this process alone until :meth:`close`.

        What a killed process left incomplete is removed, or completed if it is a step that was
        trained on; with ``overwrite`` everything of an earlier run is removed. ``versions``
        are of packages in other environments, for the manifest.

        Raises:
            RunFolderError: another process holds it, or it belongs to another configuration.
            StoreError: it cannot be written to.
        """
        place = open_location(layout.run_dir_of(config))
        path = place.path
        _make_folder(path)
        try:
            place.lock()
            with store_errors(path):
                is_being_emptied = place.has(path / layout.OVERWRITING)
                if is_being_emptied or (overwrite and place.is_run()):
                    _empty(place)
                check_same_config(config, place)
                place.remove_temporaries()
                for name in (layout.TRAJECTORIES, layout.CHECKPOINTS, layout.LOGS):
                    (path / name).mkdir(exist_ok=True)
            place.share_logs()
            place.fetch(path / layout.MANIFEST)
            save_config(config, path)
            write_manifest(config, path, versions)
            for name in (layout.CONFIG, layout.MANIFEST):
                place.push(path / name)
            return cls._restored(place)
        except BaseException:
            place.close()
            raise

    @classmethod
    def _restored(cls, place: LocalFolder) -> Self:
        """The folder, to write into, with what was done of a step that was interrupted."""
        folder = cls(place)
        place.fetch_folder(place.path / layout.PENDING)
        place.fetch(folder._metrics_path)
        folder._pending.restore(folder._write_step)
        return folder

    @classmethod
    def join(cls, owner: FolderOwner) -> Self:
        """The folder that the command ``owner`` holds, for the trainer that it started.

        One trainer at a time: until :meth:`close`, or its death. What an earlier trainer left
        incomplete is removed.

        Raises:
            RunFolderError: the folder is not held by an ancestor of this process, or another
                trainer works in it.
            StoreError: it cannot be written to.
        """
        place = open_location(owner.location, owner.copy_dir)
        place.join(owner)
        try:
            if not owner.copy_dir:
                # The command does not see what is written there.
                place.share_logs()
            with store_errors(place.path):
                place.remove_temporaries()
            return cls._restored(place)
        except BaseException:
            place.close()
            raise

    @classmethod
    def check_resumable(cls, config: ExperimentConfig, *, overwrite: bool = False) -> None:
        """Refuses a folder of another configuration, without touching it.

        Raises:
            RunFolderError: the folder belongs to another configuration.
            UserInputError: there can be none at that place.
        """
        place = open_location(layout.run_dir_of(config))
        if not overwrite:
            check_same_config(config, place)

    @classmethod
    def for_evaluation(cls, config: ExperimentConfig) -> Self:
        """The folder of a run to add evaluations to, created if there is none; not locked.

        Its configuration is neither checked nor written: an evaluation may differ in
        everything, also while the run continues.
        """
        place = open_location(layout.run_dir_of(config))
        for name in (layout.TRAJECTORIES, layout.LOGS):
            _make_folder(place.path / name)
        place.share_logs()
        return cls(place)

    @classmethod
    def open(cls, location: str | Path) -> Self:
        """An existing run folder, to read from, also while its run continues; ``location`` may lie
        inside of it.

        Raises:
            RunFolderError: there is none; the message names the nearest.
        """
        return cls(find_run(location))

    def close(self) -> None:
        """Lets other processes train in this folder, when all is written; may be called twice.

        Raises:
            StoreError: something could not be written.
        """
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            self._pending.close()
            self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def owner(self) -> FolderOwner:
        """What trainers are told of this process, which holds the folder, to :meth:`join` it."""
        return self._place.name_owner(os.getpid())

    def admit_trainer(self) -> FolderOwner:
        """As :attr:`owner`, for a trainer that may be on another machine than those before it: when
        this returns, they write nothing any more.

        Raises:
            StoreError: the place does not answer, or another run has the folder.
        """
        self._place.admit_trainer()
        return self.owner

    def push(self, name: str) -> None:
        """Has a file last that others have written into the folder; where the folder is a copy.

        Raises:
            StoreError: it cannot be kept.
        """
        self._place.push(self.path / name)

    def fetch(self, name: str | Path) -> Path:
        """A file, or a folder such as a checkpoint, by its name or path here, to be read; there may
        be none.

        Raises:
            StoreError: it cannot be read.
        """
        path = Path(name) if self.path in Path(name).parents else self.path / name
        self._place.fetch_folder(path)
        self._place.fetch(path)
        return path

    def find_inside(self, location: str | Path) -> Path:
        """The path here of a path or URL that lies inside the run folder, or is its own."""
        if layout.is_url(str(location)):
            return self.path / str(location).removeprefix(self.location).strip("/")
        return self.path / Path(location).resolve().relative_to(self.path.resolve())

    @classmethod
    @contextmanager
    def open_log(cls, location: str | Path, process: str) -> Iterator[Path]:
        """The log of a process that has no run folder open, to be added to inside the block."""
        with cls(open_location(location)) as folder:
            folder._place.share_logs()
            yield folder.log_path(process)

    def load_config(self, secrets: Sequence[Sequence[Any]] = ()) -> ExperimentConfig:
        """The configuration that was saved, with what ``find_secrets`` found in it.

        Raises:
            StoreError: it is damaged.
        """
        return load_saved_config(self._place, secrets)

    @property
    def config_path(self) -> Path:
        """The resolved configuration of the run."""
        return self.path / layout.CONFIG

    def log_dir(self, part: str = "") -> Path:
        """Where processes write their logs; ``part`` names a subfolder for what runs beside the
        training."""
        path = self.path / layout.LOGS / part
        with store_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def log_path(self, process: str) -> Path:
        """Where the named process writes its log."""
        return self.log_dir() / f"{process}.log"

    # Trajectories

    def write_trajectories(
        self, step: int, trajectories: Sequence[Trajectory], open_rounds: OpenRounds | None = None
    ) -> Path:
        """Writes the trajectories that ``step`` trains on; replaces those written before.

        ``open_rounds`` is what :meth:`read_open_rounds` gives when the next step is to be made.

        When this returns the next start has them, whatever happens: they are pending, and noted as
        the step's. Their own file is written meanwhile; whoever reads it here waits for it.

        Raises:
            StoreError: the disk is full, or the folder cannot be written to.
        """
        self.flush()
        rounds = open_rounds or {}
        self._pending.commit(step, trajectories, rounds)
        self._writing = self._writer.submit(self._complete_step, step, [*trajectories], rounds)
        return self._step_path(step)

    def _complete_step(self, step: int, trajectories: list[Trajectory], rounds: OpenRounds) -> None:
        self._write_step(step, trajectories, rounds)
        self._pending.drop(step, trajectories)

    def _write_step(self, step: int, trajectories: list[Trajectory], rounds: OpenRounds) -> None:
        write_trajectory_file(self._step_path(step), trajectories, rounds)
        self._place.move(self._step_path(step))

    def write_proximal_logprobs(self, step: int, logprobs: ProximalLogprobs) -> None:
        """Writes what was computed for the tokens of ``step`` before its update, by interaction."""
        path = self._step_path(step)
        write_proximal_file(path, logprobs)
        self._place.move(layout.proximal_path(path))

    def flush(self) -> None:
        """Returns when all trajectories that were given to this object are written.

        Raises:
            StoreError: the disk is full, or the folder cannot be written to.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        self._pending.flush()

    def add_pending(self, trajectory: Trajectory) -> None:
        """Keeps a trajectory on disk, soon, until its step is complete. From any thread.

        Raises:
            StoreError: an earlier one could not be kept.
        """
        self._pending.add(trajectory)

    def read_pending(self) -> list[Trajectory]:
        """What an interrupted run had finished and trained no step on; without failures that were
        not the policy's, which are made again."""
        self.flush()
        return self._pending.read()

    def discard_pending(self) -> None:
        """Deletes what an interrupted run had finished of steps that are not complete."""
        self._pending.discard()

    def read_trajectories(self, step: int) -> list[Trajectory]:
        """The trajectories of one step; no other file is read."""
        return read_trajectory_file(self._step_path(step, must_exist=True))

    def read_open_rounds(self, step: int) -> OpenRounds:
        """The open rounds that were given with the trajectories of ``step``."""
        return read_open_rounds(self._step_path(step, must_exist=True))

    def list_trajectories(self, step: int) -> list[TrajectorySummary]:
        """As :meth:`read_trajectories`, without tokens and messages: fast for large steps."""
        return read_summaries(self._step_path(step, must_exist=True))

    def find_trajectory_file(
        self, step: int, *, is_eval: bool = False, label: str | None = None
    ) -> Path:
        """The file of a step, or of an evaluation, for the functions of ``trajectory_file.py``."""
        if is_eval:
            path = self._eval_path(step, label).with_suffix(".parquet")
            self._place.fetch(path)
            return path
        path = self._step_path(step, must_exist=True)
        self._place.fetch(layout.proximal_path(path))
        return path

    def trajectory_steps(self) -> list[int]:
        """The steps whose trajectories are stored, ascending."""
        self.flush()
        names = self._place.list_names(layout.TRAJECTORIES)
        steps = (layout.parse_step(name) for name in names if name.endswith(".parquet"))
        return sorted(step for step in steps if step is not None)

    def _step_path(self, step: int, *, must_exist: bool = False) -> Path:
        path = self.path / layout.TRAJECTORIES / f"{layout.step_name(step)}.parquet"
        if must_exist:
            self.flush()
            self._place.fetch(path)
        if must_exist and not path.is_file():
            steps = self.trajectory_steps()
            stored = f"{steps[0]} to {steps[-1]} ({len(steps)} steps)" if steps else "none yet"
            raise RunFolderError(f"{self.location}: step {step} is not stored; stored: {stored}")
        return path

    # Evaluations

    def write_eval(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        report: Mapping[str, Any],
        *,
        label: str | None = None,
    ) -> Path:
        """Writes an evaluation made after ``step`` (0: before the first) and its report.

        Evaluations that training makes have no label; those with one never replace them.
        """
        path = self._eval_path(step, label)
        write_trajectory_file(path.with_suffix(".parquet"), trajectories)
        self._place.move(path.with_suffix(".parquet"))
        write_text(path, json.dumps(report, indent=2) + "\n")
        self._place.move(path)
        self._place.delete(layout.temporary_path(path, _CLAIMED))
        return path

    def claim_eval(self, step: int, label: str) -> str:
        """A label for one evaluation after ``step`` alone: ``label``, or with a number after it."""
        numbers = itertools.count(2)
        claimed = label
        while True:
            path = self._eval_path(step, claimed)
            # Of two processes one creates it; that of a killed one goes at the next start.
            with store_errors(path):
                is_claimed = self._place.claim(layout.temporary_path(path, _CLAIMED))
            if is_claimed and not self._place.has(path):
                return claimed
            claimed = f"{label}-{next(numbers)}"

    def read_eval(
        self, step: int, *, label: str | None = None
    ) -> tuple[list[Trajectory], dict[str, Any]]:
        """An evaluation's trajectories and its report."""
        path = self.find_trajectory_file(step, is_eval=True, label=label)
        trajectories = read_trajectory_file(path)
        return trajectories, self.read_eval_report(step, label=label)

    def read_eval_report(self, step: int, *, label: str | None = None) -> dict[str, Any]:
        """The report of an evaluation, without reading its trajectories."""
        path = self._eval_path(step, label)
        self._place.fetch(path)
        try:
            with store_errors(path, "read"):
                return dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise StoreError(f"{layout.describe(path)}: is damaged ({error})") from None

    def eval_steps(self) -> list[int]:
        """The steps after which training has evaluated, ascending."""
        return [step for step, label in self.list_evals() if label is None]

    def list_evals(self) -> list[tuple[int, str | None]]:
        """Step and label of every complete evaluation."""
        evals = map(layout.parse_eval, self._place.list_names(layout.TRAJECTORIES))
        return sorted((e for e in evals if e is not None), key=lambda e: (e[0], e[1] or ""))

    def _eval_path(self, step: int, label: str | None) -> Path:
        return self.path / layout.TRAJECTORIES / f"{layout.eval_name(step, label)}.json"

    # Metrics

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds a step's line to ``metrics.jsonl``, on disk when this returns; ``metrics`` includes
        ``step``.

        Raises:
            StoreError: the disk is full, or the file cannot be written to.
        """
        # Its trajectories come first: a line of metrics says that a step is done.
        self.flush()
        path = self._metrics_path
        with store_errors(path):
            path.touch(0o600)
        with store_errors(path), path.open("ab", buffering=0) as file:
            append_whole(file, _format_metrics(metrics).encode())
            os.fsync(file.fileno())
        self._place.push(path)

    def read_metrics(self) -> list[dict[str, float]]:
        """The metrics of every step so far, NaN where a number was not finite; a line that is being
        written, or that a killed process was writing, is left out."""
        self._place.refresh(self._metrics_path)
        if not self._metrics_path.is_file():
            return []
        with store_errors(self._metrics_path, "read"):
            text = self._metrics_path.read_text(encoding="utf-8", errors="replace")
        lines = []
        for line in text.splitlines():
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(data, dict) and all(isinstance(v, _NUMBERS) for v in data.values()):
                lines.append({k: math.nan if v is None else v for k, v in data.items()})
        return lines

    def read_alarms(self) -> dict[int, list[str]]:
        """The names of the alarms that are active in each step, where any are."""
        found: dict[int, list[str]] = {}
        for line in self.read_metrics():
            names = [n for n, v in line.items() if n.startswith(ALARM_PREFIX) and v == 1.0]
            if "step" in line:
                found[int(line["step"])] = [name.removeprefix(ALARM_PREFIX) for name in names]
        return {step: names for step, names in found.items() if names}

    def truncate_metrics(self, last_step: int) -> None:
        """Drops the metrics of steps after ``last_step``, which will be done again, and torn lines:
        what is appended to one would be lost with it."""
        if self._metrics_path.is_file():
            kept = [m for m in self.read_metrics() if m.get("step", 0) <= last_step]
            write_text(self._metrics_path, "".join(map(_format_metrics, kept)))
            self._place.push(self._metrics_path)

    # Checkpoints

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint into; it appears once the block ends without an error."""
        path = self.path / layout.CHECKPOINTS / layout.step_name(step)
        with checksummed_folder(path) as folder:
            yield folder
        self._place.move(path)

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints, oldest first; :meth:`fetch` one before it is read."""
        names = self._place.list_names(layout.CHECKPOINTS)
        found = ((layout.parse_step(name), name) for name in names)
        return sorted(
            (step, self.path / layout.CHECKPOINTS / name)
            for step, name in found
            if step is not None
        )

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint."""
        return max(self.list_checkpoints(), default=None)

    def fetch_checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``, to be read; see :meth:`fetch`."""
        return self.fetch(Path(layout.CHECKPOINTS, layout.step_name(step)))

    def prune_checkpoints(self, keep_last: int, keep: Collection[int] = ()) -> None:
        """Deletes all but the newest ``keep_last`` checkpoints and those of the steps ``keep``."""
        for step, path in self.list_checkpoints()[:-keep_last]:
            if step not in keep:
                with store_errors(path, "deleted"):
                    self._place.delete(path)


def _format_metrics(metrics: Mapping[str, float]) -> str:
    # JSON has no NaN and no infinity, and strict readers refuse what Python writes for them.
    finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    return json.dumps(finite) + "\n"


def _make_folder(path: Path) -> None:
    with store_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise RunFolderError(
                f"output_dir: the folder {path} cannot be made: {error.strerror}. Type "
                "output_dir=FOLDER, with one that is, or can be, a folder"
            ) from None


def _empty(place: LocalFolder) -> None:
    """Deletes an earlier run, but nothing that agentrl did not write."""
    marker = place.path / layout.OVERWRITING
    marker.touch()
    place.push(marker)
    place.delete(*(place.path / name for name in layout.OWNED))
    place.delete(marker)
