"""How a format writes a call or a thought, so that sampling can be held to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How arguments are written, in the words of xgrammar's ``JSONSchemaFormat.style``.
ArgumentsStyle = Literal["json", "qwen_xml", "glm_xml", "minimax_xml", "deepseek_xml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The texts around the name and the arguments of a call.

    One reply's calls are ``section_begin``, the calls with ``separator`` between them,
    ``section_end``; a call is ``before_name``, its name, what ``after_name_pattern`` matches,
    ``before_arguments``, its arguments, ``end``. Text may stand before the section.
    """

    before_name: str
    before_arguments: str
    end: str
    arguments_style: ArgumentsStyle = "json"
    after_name_pattern: str = ""
    """A regular expression: a number of the call, for instance; empty: nothing stands there."""
    section_begin: str = ""
    section_end: str = ""
    separator: str = "\n"

    def begin(self, name: str) -> str:
        """What a call of ``name`` begins with; all that stands before its arguments where
        ``after_name_pattern`` is empty."""
        if self.after_name_pattern:
            return self.before_name + name
        return self.before_name + name + self.before_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSyntax:
    """The texts around a thought."""

    begin: str
    end: str
