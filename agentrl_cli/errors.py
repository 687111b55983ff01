"""Every error that agentrl raises on purpose.

A message says what was found, where, what is allowed and what to type; the
command line prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal


class AgentrlError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command ends with."""

    exit_code: ClassVar[int] = 1


class UserInputError(AgentrlError):
    """The user's input is wrong (config, import path, data, model folder): exit code 2."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserInputError):
    """A configuration file or an override that cannot be used."""


class ImportPathError(UserInputError):
    """A builder, reward or workflow path that does not lead to a usable object."""


class BuilderError(UserInputError):
    """An agent builder that raised, or returned something agentrl cannot run."""


class RewardSignatureError(UserInputError):
    """A reward function that asks for arguments which nothing can supply."""


class DatasetError(UserInputError):
    """A dataset that is missing, empty, or has a row that cannot be used."""


class ModelError(UserInputError):
    """A model or tokenizer that cannot be loaded or used."""


class RunFolderError(UserInputError):
    """A run folder that does not exist, or belongs to another configuration."""


class MissingExtraError(UserInputError):
    """An optional package is needed and not installed."""


class InlineLimitError(BaseException):
    """Something that agents can do in a process of their own, and not in this one.

    No Exception: SDKs take those for a broken connection, and try again twice after a sleep.
    """

    num_raised: ClassVar[int] = 0
    """Of all; frameworks may keep one from whoever runs the agent."""
    last_message: ClassVar[str] = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        InlineLimitError.num_raised += 1
        InlineLimitError.last_message = message


class StoppedError(AgentrlError):
    """The run was asked to stop before it had anything to finish or to keep."""


class RunError(AgentrlError):
    """The run could not continue: exit code 1."""


class StoreError(RunError):
    """The run folder cannot be written or read (disk full, permissions, corruption)."""


class AlarmError(RunError):
    """An alarm triggered whose action in ``train.alarms`` is to stop the run."""


class NotFiniteError(RunError):
    """A loss or a gradient is NaN or infinite."""


class RolloutFailedError(RunError):
    """Every trajectory of a batch failed in the same way, or none called the model.

    Attributes:
        trajectories: the batch, for the record.
    """

    def __init__(self, message: str, trajectories: Sequence[Any]) -> None:
        super().__init__(message)
        self.trajectories = list(trajectories)


class RewardError(RunError):
    """A reward function passed its deadline, died, or returned something that is no reward."""


class WeightMismatchError(RunError):
    """The engine does not hold the weights that the trainer gave it."""


class EngineError(RunError):
    """The inference engine answered with an error, died, or was closed."""


class EngineTimeoutError(EngineError):
    """A call to the engine did not finish before its deadline."""


class ServerDownError(EngineError):
    """An engine server cannot be reached: it died, was killed, or closed the connection.

    Another server, or the same one after its restart, may well answer.
    """


class ServerBusyError(EngineError):
    """A healthy engine server did not serve a call, and may serve the same one a little later.

    Attributes:
        is_rate_limit: it has too much to do; otherwise something went wrong in it.
    """

    def __init__(self, message: str, *, is_rate_limit: bool = False) -> None:
        super().__init__(message)
        self.is_rate_limit = is_rate_limit


class ContextLengthError(EngineError):
    """A prompt (plus what it asks to generate) does not fit ``engine.max_model_len``.

    Attributes:
        num_prompt_tokens: length of the refused prompt, in tokens, or the least that it can be.
        max_model_len: the limit of the engine, in tokens.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        *,
        counted: Literal["exactly", "at least"] = "exactly",
    ) -> None:
        number = f"at least {num_prompt_tokens}" if counted == "at least" else num_prompt_tokens
        super().__init__(
            f"the prompt has {number} tokens and engine.max_model_len is "
            f"{max_model_len}: at least one token must be left for the answer. "
            "Shorten the messages or raise engine.max_model_len."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


def format_nearest(name: str, allowed: Iterable[str], *, max_listed: int = 12) -> str:
    """A clause such as ``did you mean 'n_samples'? allowed: a, b`` for an unknown name."""
    names = sorted(set(allowed))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    # Half a name is far from the whole one.
    near = near or [one for one in names if name and one.startswith(name)]
    listed = ", ".join(names[:max_listed]) + (", ..." if len(names) > max_listed else "")
    allowed_clause = f"allowed: {listed}" if names else "nothing is allowed here"
    return f"did you mean {near[0]!r}? {allowed_clause}" if near else allowed_clause


def build_error(class_name: str, message: str, exit_code: int) -> AgentrlError:
    """The error of that name in this module, with this message and exit code.

    The nearest base class stands for one that takes more than a message.
    """
    found = globals().get(class_name)
    fallback = UserInputError if exit_code == UserInputError.exit_code else RunError
    if not (isinstance(found, type) and issubclass(found, AgentrlError)):
        return fallback(message)
    for base in found.__mro__:
        if issubclass(base, AgentrlError) and "__init__" not in vars(base):
            inherits_init = base.__init__ is Exception.__init__
            if inherits_init and base.exit_code == exit_code:
                return base(message)
    return fallback(message)
