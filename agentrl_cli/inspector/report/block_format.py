"""Blocks: what the page reads at once, compressed.

A block of columns is the length of its header (uint32, little-endian), the header as JSON, and the
numbers of every column, each from a multiple of 8 bytes on; browsers read them without copying. A
block of details is JSON. Both are gzip, which browsers decompress themselves.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

#: gzip, whose header has no time: equal contents are equal bytes.
_GZIP = 31
#: Higher ones take three times as long, for 7 % less.
_LEVEL = 3


class TextCodes:
    """The numbers, from 0, of texts that repeat; None is -1."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def encode(self, texts: list[str | None]) -> np.ndarray[Any, Any]:
        """The numbers of ``texts``."""
        codes = self._codes
        numbers = (-1 if t is None else codes.setdefault(t, len(codes)) for t in texts)
        return np.fromiter(numbers, np.int32, len(texts))

    def list_texts(self) -> list[str]:
        """The texts by number."""
        return [*self._codes]


def pack_columns(columns: Mapping[str, np.ndarray[Any, Any]], header: Mapping[str, Any]) -> bytes:
    """A block of columns of numbers, and what else ``header`` says."""
    places: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for name, values in columns.items():
        data = values.tobytes()
        places[name] = [values.dtype.str, end, len(values)]
        parts.append(data + b"\0" * (-len(data) % 8))
        end += len(parts[-1])
    text = orjson.dumps({**header, "columns": places})
    text += b" " * (-(len(text) + 4) % 8)
    return _compress(len(text).to_bytes(4, "little") + text + b"".join(parts))


def pack_json(value: Any) -> bytes:
    """A block of JSON; numbers that are not finite are null."""
    return _compress(orjson.dumps(value))


def to_text(block: bytes) -> str:
    """The block as a script or a page may hold it."""
    return base64.b64encode(block).decode()


def _compress(data: bytes) -> bytes:
    return zlib.compress(data, _LEVEL, _GZIP)
