"""Masks of constrained tokens: what their engine let them be chosen from.

The logprob of a constrained token is taken over the tokens that its structural tag allowed. The
masks are made again from the recorded ids, by walking the same grammar. A mask for a vocabulary of
150,000 has 19 kB, but a grammar has few distinct ones: each is kept once, and is unpacked only for
the tokens whose logits are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.engine.embedded.token_sampling import unpack_masks
from agentrl_cli.engine.grammar import GrammarError, TokenGrammars
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: The mask that allows everything.
FREE = 0


class MaskTable:
    """Different masks, by number.

    Args:
        num_words: 32-bit words of a mask.
    """

    def __init__(self, num_words: int) -> None:
        self._numbers: dict[bytes, int] = {}
        self._on_device: dict[torch.device, Tensor] = {}
        self.add(np.full(num_words, -1, np.int32))

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, mask: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        """The number of a mask."""
        return self._numbers.setdefault(mask.tobytes(), len(self._numbers))

    def unpack(self, numbers: Tensor, vocabulary_size: int) -> Tensor:
        """True for the tokens that the masks with ``numbers`` allow: bool [tokens, vocabulary]."""
        table = self._on_device.get(numbers.device)
        if table is None or len(table) != len(self._numbers):
            packed = np.frombuffer(b"".join(self._numbers), np.int32)
            table = torch.from_numpy(packed.reshape(len(self._numbers), -1).copy())
            table = self._on_device[numbers.device] = table.to(numbers.device)
        return unpack_masks(table[numbers], vocabulary_size)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of some tokens."""

    numbers: Tensor
    """int64 [tokens]; ``FREE`` where everything was allowed."""
    table: MaskTable


class MaskMaker:
    """Makes the masks of one batch's completions, all in one table.

    Args:
        grammars: of the model in training.
    """

    def __init__(self, grammars: TokenGrammars) -> None:
        self.table = MaskTable(grammars.num_words)
        self._grammars = grammars

    def number_masks(self, tag: str, completion_ids: Sequence[int]) -> list[int] | None:
        """The number of each token's mask; None: the tag does not allow these tokens.

        Raises:
            MissingExtraError: xgrammar is not installed.
        """
        numbers = []
        try:
            matcher = self._grammars.start(tag)
        except GrammarError as error:
            _log.warning("tokens were sampled under an invalid structural tag: %s", error)
            return None
        mask = np.empty((1, self._grammars.num_words), np.int32)
        for token in completion_ids:
            matcher.fill(mask, 0)
            if not matcher.accept(token):
                return None
            numbers.append(self.table.add(mask[0]))
        return numbers


def join_masks(parts: Sequence[TokenMasks | None], lengths: Sequence[int]) -> TokenMasks | None:
    """The masks of sequences end to end; None: nothing of them was constrained."""
    tables = [part.table for part in parts if part is not None]
    if not tables:
        return None
    assert all(table is tables[0] for table in tables)
    numbers = [
        torch.full((length,), FREE) if part is None else part.numbers
        for part, length in zip(parts, lengths, strict=True)
    ]
    return TokenMasks(torch.cat(numbers), tables[0])
