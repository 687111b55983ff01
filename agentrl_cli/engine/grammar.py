"""Structural tags as masks over a vocabulary: which tokens may come next.

The engines and the trainer make the same masks of a tag: vLLM, SGLang and this module all use
xgrammar, with the model's own end tokens as those that end a constrained text.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np

#: Tags whose grammars are kept: a compiled one is some MB with a large vocabulary.
_NUM_KEPT = 64
_WORD_BITS = 32
_LOCATION = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")


class GrammarError(Exception):
    """A structural tag of which no grammar can be made."""


def require_xgrammar() -> Any:
    """The xgrammar module, which imports torch and transformers.

    Raises:
        MissingExtraError: it is not installed.
    """
    return _require("xgrammar")


def require_jsonschema() -> Any:
    """The jsonschema module.

    Raises:
        MissingExtraError: it is not installed.
    """
    return _require("jsonschema")


def _require(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"constrained sampling (response_format, tool_choice) needs {name}: {error}. Type "
            "pip install 'agentrl-cli[constrained]'"
        ) from None


def check_structural_tag(tag: str) -> None:
    """Refuses a tag of which no grammar can be made, or one without any text.

    Takes milliseconds, and seconds for a grammar of thousands of states.

    Raises:
        GrammarError: xgrammar's own complaint.
        MissingExtraError: xgrammar is not installed.
    """
    import numpy as np

    compiled = _compile(_build_byte_compiler(), tag)
    matcher = TokenMatcher(require_xgrammar().GrammarMatcher(compiled))
    if not matcher.fill(np.empty((1, -(-257 // _WORD_BITS)), np.int32), 0):
        raise GrammarError("it allows no text: a reference leads back to itself")


@functools.lru_cache(maxsize=1)
def _build_byte_compiler() -> Any:
    """A compiler whose tokens are the bytes: small, so that all it takes is the grammar's time."""
    xgrammar = require_xgrammar()
    vocabulary = [b"", *(bytes([byte]) for byte in range(256))]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compile(compiler: Any, tag: str) -> Any:
    try:
        return compiler.compile_structural_tag(tag)
    except (RuntimeError, ValueError) as error:
        problem = _LOCATION.sub("", str(error)).strip()
        raise GrammarError(f"no grammar can be made of it: {problem}") from None


class TokenGrammars:
    """Makes masks over one model's tokens; safe to use from several threads.

    Args:
        tokenizer: the model's.
        vocabulary_size: logits to a token; may be more than the tokenizer knows.
        end_ids: the tokens that end a completion.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, end_ids: Iterable[int]) -> None:
        self.vocabulary_size = vocabulary_size
        self._tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._compile = functools.lru_cache(_NUM_KEPT)(lambda tag: _compile(self._compiler, tag))
        self._lock = threading.Lock()

    @property
    def num_words(self) -> int:
        """32-bit words of one mask."""
        return -(-self.vocabulary_size // _WORD_BITS)

    def start(self, tag: str) -> TokenMatcher:
        """The matcher of a completion that is constrained by ``tag``, before its first token.

        Compiles the tag's grammar, which takes up to seconds; it is kept.

        Raises:
            GrammarError: none can be made.
            MissingExtraError: xgrammar is not installed.
        """
        # One at a time: compiling holds no lock of Python's, and takes all cores it gets.
        with self._lock:
            compiled = self._compile(tag)
        matcher = require_xgrammar().GrammarMatcher(compiled, override_stop_tokens=self._end_ids)
        return TokenMatcher(matcher)

    @functools.cached_property
    def _compiler(self) -> Any:
        xgrammar = require_xgrammar()
        if not self._end_ids:
            raise GrammarError(
                "the model has no end token, so a constrained text could never end. Name one in "
                "its generation_config.json: eos_token_id"
            )
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self.vocabulary_size
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class TokenMatcher:
    """Where one completion stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, masks: np.ndarray[Any, Any], row: int) -> bool:
        """Sets a row of int32 ``masks`` [rows, words] to the tokens that may come next.

        Returns:
            Whether any may.
        """
        masks[row] = -1
        self._matcher.fill_next_token_bitmask(masks, row)
        return bool(masks[row].any())

    def accept(self, token: int) -> bool:
        """Advances past a token; False: it was not allowed."""
        return bool(self._matcher.accept_token(token))


def find_end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a completion by the word of the model and of its tokenizer.

    vLLM goes by the same two, SGLang by the model's.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
    """
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
