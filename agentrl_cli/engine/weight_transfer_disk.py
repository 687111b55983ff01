"""Whole weights to servers through a file, in RAM where there is room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.engine.server import EngineServer
from agentrl_cli.engine.weight_transfer_folder import VersionFolders

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """A version's weights as a folder with a safetensors file."""

    version: int
    folder: Path

    async def apply(self, server: EngineServer) -> None:
        """Makes ``server`` read the folder."""
        await server.load_weights(self.folder)


class DiskTransfer:
    """Weights as safetensors that each server reads for itself.

    The file is also the snapshot: the learner may change its tensors as soon as
    :meth:`prepare` returns, and a server that comes back later still finds them.
    """

    def __init__(
        self,
        folders: VersionFolders,
        *,
        model_folder: Path | None,
        tied_names: Mapping[str, str],
    ) -> None:
        """Writes nothing yet.

        Args:
            folders: where versions are written.
            model_folder: what the servers loaded at their start, if it is on this machine.
            tied_names: further name of a tensor -> the name it is published under; both are
                written, for servers that keep the two apart.
        """
        self._folders = folders
        self._model_folder = model_folder
        self._tied_names = dict(tied_names)

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> FolderUpdate:
        """Writes the weights; raises as :meth:`VersionFolders.write`."""
        aliases = {
            alias: weights[name] for alias, name in self._tied_names.items() if alias not in weights
        }
        return FolderUpdate(version, await self._folders.write(version, {**weights, **aliases}))

    @property
    def previous_folder(self) -> Path | None:
        """Safetensors of the version before the last."""
        return self._model_folder if self._folders.num_written == 1 else self._folders.previous

    async def close(self) -> None:
        """Deletes the files."""
        self._folders.close()
