"""Tensors into a safetensors file that is written again and again without taking new memory."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Safetensors' names of number types, by torch's.
_DTYPE_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
#: The header is padded to this, so that every tensor lies at a multiple of its item's size.
_ALIGNMENT = 64
#: Bytes of one write call: the deadline is looked at in between.
_CHUNK_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the file."""

    tensor: torch.Tensor
    start: int
    end: int


class WeightFile:
    """One safetensors file; every :meth:`write` replaces its tensors, in the same memory.

    Its first content is written by system calls, which report a full disk; in a RAM-backed
    folder the next ones are one copy into the mapped file: fresh pages cost seven times as
    much as the copy itself (200 MB: 90 ms against 12 ms). A mapping of pages that are not
    there yet would end the process when the memory is full.
    """

    def __init__(self, path: Path, *, in_memory: bool) -> None:
        self._path = path
        self._in_memory = in_memory
        self._num_bytes = 0
        self._mapped: torch.Tensor | None = None

    def write(self, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> None:
        """Replaces the file's content; it is whole only when this returns.

        Args:
            tensors: by name; from any device.
            check: called between pieces; raises to stop.

        Raises:
            OSError: there is no room, or the file cannot be written.
        """
        header, places, num_bytes = _plan(tensors)
        is_same_size = num_bytes == self._num_bytes
        if not is_same_size:
            self._mapped, self._num_bytes = None, 0
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if self._in_memory and is_same_size:
                self._write_mapped(descriptor, header, places, check)
            else:
                os.ftruncate(descriptor, num_bytes)
                _write_plain(descriptor, header, places, check)
        finally:
            os.close(descriptor)
        self._num_bytes = num_bytes

    def close(self) -> None:
        """Lets go of the memory once the file is deleted."""
        self._mapped = None

    def _write_mapped(
        self, descriptor: int, header: bytes, places: list[_Place], check: Callable[[], None]
    ) -> None:
        import torch

        if self._mapped is None:
            mapping = mmap.mmap(descriptor, self._num_bytes)
            self._mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        os.pwrite(descriptor, header, 0)
        for place in places:
            check()
            target = self._mapped[place.start : place.end].view(place.tensor.dtype)
            target.view(place.tensor.shape).copy_(place.tensor)


def _plan(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[_Place], int]:
    """The header, where each tensor goes, and the size of the whole file."""
    # The largest items first: everything is then aligned without gaps, which the format forbids.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans: list[tuple[int, int]] = []
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        spans.append((start, end))
        entries[name] = {
            "dtype": _DTYPE_NAMES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    first = len(header)
    places = [
        _Place(tensors[name].detach(), first + start, first + stop)
        for name, (start, stop) in zip(names, spans, strict=True)
        if stop > start
    ]
    return header, places, first + end


def _write_plain(
    descriptor: int, header: bytes, places: list[_Place], check: Callable[[], None]
) -> None:
    import torch

    os.pwrite(descriptor, header, 0)
    for place in places:
        # One tensor at a time stands twice in memory, and only if it is on a GPU.
        flat = place.tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        data = memoryview(flat.numpy())  # type: ignore[arg-type]
        written = 0
        while written < len(data):
            check()
            piece = data[written : written + _CHUNK_BYTES]
            written += os.pwrite(descriptor, piece, place.start + written)
