"""One NCCL group of the trainer and a server, over the library that torch brings along.

Bound by ctypes: torch's own groups need torch.distributed on both sides, which sends pickles
through a socket; here the group's id travels over the server's HTTP endpoint.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl_cli.errors import EngineError

if TYPE_CHECKING:
    import torch

_UNIQUE_ID_BYTES = 128
#: ncclDataType_t.
_DTYPES = {"torch.float16": 6, "torch.float32": 7, "torch.float64": 8, "torch.bfloat16": 9}
_SUM = 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class NcclGroup:
    """The trainer's end, rank 0. Its methods block; only :meth:`abort` may come from aside."""

    def __init__(self) -> None:
        """Makes the id of a new group; nobody has entered it yet.

        Raises:
            EngineError: there is no NCCL library.
        """
        self._communicator = ctypes.c_void_p()
        self._stream: torch.cuda.Stream | None = None
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise EngineError(f"the NCCL library cannot be loaded: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._id = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(self._id)))

    @property
    def unique_id(self) -> bytes:
        """What the other ranks need to enter."""
        return bytes(self._id)

    def enter(self, world_size: int, device: torch.device) -> None:
        """Enters on ``device``; waits for all other ranks.

        Raises:
            EngineError: NCCL refused.
        """
        import torch

        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._check(
                self._library.ncclCommInitRank(
                    ctypes.byref(self._communicator), world_size, self._id, 0
                )
            )
            # vLLM's ranks sum one number as soon as they have entered, and wait for ours.
            number = torch.zeros(1, device=device)
            torch.cuda.synchronize()
            self._check(
                self._library.ncclAllReduce(
                    *(_pointer(number), _pointer(number), ctypes.c_size_t(1)),
                    *(_DTYPES[str(number.dtype)], _SUM, self._communicator),
                    ctypes.c_void_p(self._stream.cuda_stream),
                )
            )
            self._stream.synchronize()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcasts each tensor (contiguous, on the group's device); returns when all are sent.

        Raises:
            EngineError: NCCL failed, or the group was aborted.
        """
        import torch

        if self._stream is None:
            raise EngineError("the NCCL group was not entered")
        with torch.cuda.device(self._stream.device):
            torch.cuda.current_stream().synchronize()
            for tensor in tensors:
                self._check(
                    self._library.ncclBroadcast(
                        *(_pointer(tensor), _pointer(tensor), ctypes.c_size_t(tensor.numel())),
                        *(_DTYPES[str(tensor.dtype)], 0, self._communicator),
                        ctypes.c_void_p(self._stream.cuda_stream),
                    )
                )
            self._stream.synchronize()

    def abort(self) -> None:
        """Ends the group at once, also under a broadcast that waits for a dead server."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._library.ncclCommAbort(communicator)

    def _check(self, result: int) -> None:
        if result != 0:
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise EngineError(f"NCCL: {text} (code {result})")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
