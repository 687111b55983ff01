"""Renders the last messages of a conversation as its chat template renders them after all others.

A template is a program over all messages. Most write the messages in a loop whose rounds hand
nothing on, so that any number of its first rounds can be left out: the others write what they would
have written. Such loops are found in the template's syntax tree and begin late; everything else in
the template runs on the whole conversation. What the rounds read besides their message is digested:
two renderings of one digest have written the same in the rounds that both left out.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace

from agentrl_cli.records import Message, SharedSequence
from agentrl_cli.tracking.message_meaning import is_same_json

#: What a round may read of its own loop: nothing of it depends on what comes later, but for the
#: last message.
_LOOP_KEYS = frozenset({"first", "index", "index0", "last", "nextitem", "previtem"})
#: Objects with a state of their own.
_STATEFUL = frozenset({"cycler", "joiner"})
#: Which the sandbox prefers to keys of the same name.
_DICT_NAMES = frozenset(dir(dict))
#: Where a namespace keeps what templates set in it.
_ATTRIBUTES = "_Namespace__attrs"
_STARTS_LATE, _READS, _BEGINS = "_agentrl_starts_late", "_agentrl_reads", "_agentrl_begins"


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a rendered conversation."""

    texts: tuple[str, ...]
    """Of each of the last messages; that of the last one ends with the prompt."""
    state: object
    """Of what stands before the messages, and what those before the last depend on besides; equal:
    the same was written there."""


class TailTemplate:
    """A chat template whose loops over messages may begin late.

    Args:
        template: compiled, with its environment.
        mark: text that never occurs in a prompt; it separates the messages' texts.
    """

    def __init__(self, template: Any, mark: str) -> None:
        self._template = template
        self._mark = mark

    @classmethod
    def build(cls, source: str, mark: str) -> Self | None:
        """None: the template has no loop that may begin late."""
        # Not public, but what apply_chat_template renders with: filters, globals and syntax.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(source).environment.overlay()
        environment.getattr = partial(_read_attribute, environment.getattr)
        tree = environment.parse(source)
        if _has_side_effects(tree) or not _rewrite_loops(tree):
            return None
        template = environment.from_string(tree.set_environment(environment).set_lineno(1))
        # Where the compiled code looks for it; of this template alone.
        template.root_render_func.__globals__["LoopContext"] = _LateLoop
        return cls(template, mark)

    def render(self, messages: list[Any], num_last: int, **inputs: Any) -> Tail | None:
        """The last ``num_last`` of the messages.

        None: the template complains, or does not write them one after the other.
        """
        state: list[object] = []
        #: Of each loop, whether it is one over the messages; others run from their beginning.
        starts: list[bool] = []

        def start_late(items: Any) -> Any:
            last = items[-num_last:] if isinstance(items, list) else []
            starts.append([*map(id, last)] == [*map(id, messages[-num_last:])])
            return _LateList(items, len(items) - num_last) if starts[-1] else items

        def read(*values: Any) -> str:
            state.append(_digest(values))
            return ""

        def begin() -> str:
            return self._mark if starts[-1] else ""

        functions: dict[str, Callable[..., Any]] = {
            _STARTS_LATE: start_late,
            _READS: read,
            _BEGINS: begin,
        }
        try:
            text = self._template.render(messages=messages, **inputs, **functions)
        except Exception:  # a template may raise anything; the whole rendering says what
            return None
        before, *texts = text.split(self._mark)
        if sum(starts) != 1 or len(texts) != num_last:
            return None
        return Tail(tuple(texts), (_digest([before]), *state))


class _LateList(list[Any]):
    """A list whose iteration begins at ``start``."""

    def __init__(self, items: list[Any], start: int) -> None:
        super().__init__(items)
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(self.start, len(self)))


class _LateLoop(LoopContext):
    """``loop``, which counts the rounds that were left out."""

    def __init__(self, iterable: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(iterable, *args, **kwargs)
        if isinstance(iterable, _LateList) and iterable.start:
            self.index0 = iterable.start - 1
            self._current = iterable[iterable.start - 1]


def _digest(values: Sequence[Any]) -> object:
    """Equal for equal values of plain types; anything else equals nothing."""
    plain = [_to_plain(value) for value in values]
    try:
        return hashlib.blake2b(marshal.dumps(plain, 0), digest_size=16).digest()
    except ValueError:
        return object()


def _to_plain(value: Any) -> Any:
    if isinstance(value, Namespace):
        attributes = object.__getattribute__(value, _ATTRIBUTES)
        return ["namespace", *sorted(attributes.items())]
    return ["undefined"] if isinstance(value, Undefined) else [value]


def _read_attribute(ask: Callable[..., Any], obj: Any, name: str) -> Any:
    """What ``obj.name`` is in a template.

    The sandbox takes long to find what is in messages, namespaces and loops, and templates ask it
    for that in every round.
    """
    kind = type(obj)
    if kind is dict:
        if name in obj and name not in _DICT_NAMES:
            return obj[name]
    elif kind is Namespace:
        attributes = object.__getattribute__(obj, _ATTRIBUTES)
        if name in attributes:
            return attributes[name]
    elif kind is _LateLoop and name in _LOOP_KEYS:
        return getattr(obj, name)
    return ask(obj, name)


def _has_side_effects(tree: nodes.Template) -> bool:
    """Whether calling something in the template may change what a later round writes."""
    if any(name.name in _STATEFUL for name in tree.find_all(nodes.Name)):
        return True
    macros = list(tree.find_all(nodes.Macro))
    is_conditional = any(macro not in tree.body for macro in macros)
    return is_conditional or any(macro.find(nodes.NSRef) for macro in macros)


def _rewrite_loops(tree: nodes.Template) -> bool:
    """Lets the loops that may begin late do so; False: there is none."""
    stores = _count_stores(tree)
    macros = list(tree.find_all(nodes.Macro))
    found = False

    def rewrite(body: list[nodes.Node]) -> list[nodes.Node]:
        nonlocal found
        rewritten: list[nodes.Node] = []
        for node in body:
            if isinstance(node, nodes.If):
                node.body, node.else_ = rewrite(node.body), rewrite(node.else_)
                for branch in node.elif_:
                    branch.body = rewrite(branch.body)
            elif isinstance(node, nodes.For) and _may_start_late(node):
                found = True
                reads = {name for part in (*node.body, *macros) for name in _list_reads(part)}
                inner = _count_stores(node)
                outer = {name for name in reads if stores[name] > inner[name]}
                given = sorted(outer | (reads & {"messages"}))
                call = _call(_READS, [nodes.Name(name, "load") for name in given])
                rewritten.append(nodes.Output([call]))
                node.iter = _call(_STARTS_LATE, [node.iter])
                node.body = [nodes.Output([_call(_BEGINS, [])]), *node.body]
            rewritten.append(node)
        return rewritten

    macro_names = {macro.name for macro in macros}
    for name in macro_names:
        stores[name] = 0
    tree.body = rewrite(tree.body)
    return found


def _call(name: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)


def _count_stores(node: nodes.Node) -> Counter[str]:
    return Counter(n.name for n in node.find_all(nodes.Name) if n.ctx == "store")


def _may_start_late(loop: nodes.For) -> bool:
    """Whether no round of the loop needs another, nor the number of them."""
    if loop.recursive or loop.test is not None or loop.else_ or not loop.find(nodes.Output):
        return False
    if loop.find(nodes.NSRef) or loop.find(nodes.Break):
        return False
    return all(key in _LOOP_KEYS for part in loop.body for key in _list_loop_keys(part))


def _list_loop_keys(node: nodes.Node) -> Iterator[str]:
    """What is read of the loop itself; loops inside it have a ``loop`` of their own."""
    if isinstance(node, nodes.Getattr) and _is_loop(node.node):
        yield node.attr
    elif _is_loop(node):
        yield "as a whole"
    else:
        inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
        for child in inner:
            yield from _list_loop_keys(child)


def _list_reads(node: nodes.Node) -> Iterator[str]:
    """Names whose values count, other than a list's items at the loop's own place or near it."""
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and _is_near(node.arg):
        return
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            yield node.name
        return
    for child in node.iter_child_nodes():
        yield from _list_reads(child)


def _is_near(position: nodes.Node) -> bool:
    """Whether a position is the first one, or at most the loop's next."""
    if isinstance(position, nodes.Const):
        return position.value == 0
    offset = 0
    if isinstance(position, nodes.Add | nodes.Sub) and isinstance(position.right, nodes.Const):
        if not isinstance(position.right.value, int):
            return False
        offset = position.right.value * (1 if isinstance(position, nodes.Add) else -1)
        position = position.left
    if not (isinstance(position, nodes.Getattr) and _is_loop(position.node)):
        return False
    return offset <= {"index0": 1, "index": 0}.get(position.attr, -(2**31))


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


class TemplateForms:
    """Messages as templates expect them, each made once."""

    def __init__(self) -> None:
        #: By the message's address, which no other has while it is held beside its form.
        self._known: dict[Hashable, dict[int, tuple[Message, Message]]] = {}
        #: What was listed last, which the next one mostly continues.
        self._latest: tuple[Any, Hashable, list[Message]] = (None, None, [])

    def list_forms(
        self, messages: Sequence[Message], shape: Hashable, make: Callable[[Message], Message]
    ) -> list[Message]:
        """The forms of ``messages``; one that is its own form already is not copied.

        Args:
            messages: of a request.
            shape: equal where ``make`` makes the same of a message.
            make: the form of a message.
        """
        known = self._known.setdefault(shape, {})
        latest, latest_shape, listed = self._latest
        left, forms = messages, []
        if (
            isinstance(messages, SharedSequence)
            and messages.parent is latest
            and shape == latest_shape
        ):
            left, forms = messages.own, listed[: messages.num_shared]
        for message in left:
            found = known.get(id(message))
            if found is None:
                form = make(message)
                found = (message, message if is_same_json(form, message) else form)
                known[id(message)] = found
            forms.append(found[1])
        self._latest = (messages, shape, forms)
        return forms
