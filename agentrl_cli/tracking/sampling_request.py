"""What OpenAI's two APIs say of sampling, of the form of a reply, and of the template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.tracking.model_request import RequestError
from agentrl_cli.tracking.request_fields import take, take_choice, take_int, take_number
from agentrl_cli.tracking.template import TemplateInputs, make_template_inputs
from agentrl_cli.tracking.tool_request import Tool

#: What OpenAI allows; engines compute no more beside each token.
MAX_TOP_LOGPROBS = 20
_VERBOSITIES = frozenset({"low", "medium", "high"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
#: What the gateway itself passes to the tokenizer, or would change what comes back from it.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def parse_sampling(
    body: Mapping[str, Any],
    defaults: Sampling,
    *,
    limits: tuple[str, ...],
    stop: tuple[str, ...] = (),
    num_top_logprobs: int = 0,
) -> Sampling:
    """How to sample; ``defaults`` hold where the body says nothing, and limit its length.

    Args:
        body: of the request.
        defaults: the session's.
        limits: the names of the keys that limit the length.
        stop: texts that end the reply.
        num_top_logprobs: how many tokens are reported beside each sampled one.

    Raises:
        RequestError: naming the key that is wrong.
    """
    limit = defaults.max_tokens
    for key in limits:
        if key in body:
            asked = take_int(body, key, 1, minimum=1)
            limit = asked if limit is None else min(asked, limit)
    seed = None
    if "seed" in body:
        seed = take_int(body, "seed", 0, minimum=-(2**63), maximum=2**63 - 1)
    return replace(
        defaults,
        max_tokens=limit,
        temperature=take_number(body, "temperature", defaults.temperature, 0.0, 10.0),
        # 0 asks for the one most probable token.
        top_p=take_number(body, "top_p", defaults.top_p, 0.0, 1.0) or 1e-6,
        stop=(*defaults.stop, *stop),
        # The session's gives each of its calls another one.
        seed=seed,
        num_top_logprobs=num_top_logprobs,
    )


def parse_template_inputs(
    body: Mapping[str, Any], tools: tuple[Tool, ...], effort: str | None
) -> TemplateInputs:
    """What the chat template gets besides the messages.

    The effort of reasoning is the template's affair: it gets ``reasoning_effort``, and with
    ``none`` ``enable_thinking=False``, which templates that know neither pass over. What
    ``chat_template_kwargs`` say comes first.

    Raises:
        RequestError: a keyword that is not the template's.
    """
    asked = take(body, "chat_template_kwargs", dict, {})
    for key in asked:
        if key in _RESERVED_TEMPLATE_KWARGS:
            raise RequestError(
                f"chat_template_kwargs.{key} is not the template's; pass only what the model's "
                "chat template reads, such as enable_thinking",
                "chat_template_kwargs",
            )
    kwargs: dict[str, Any] = {}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    return make_template_inputs(tools, kwargs | asked)


def take_effort(body: Mapping[str, Any], key: str, path: str = "") -> str | None:
    """How much to reason, as OpenAI names it; None: not said.

    Raises:
        RequestError: an unknown name.
    """
    return take_choice(body, key, _EFFORTS, path)


def check_verbosity(body: Mapping[str, Any], path: str = "") -> None:
    """Passes over how long replies shall be, a wish that the OpenAI Agents SDK sends unasked.

    Raises:
        RequestError: an unknown name.
    """
    take_choice(body, "verbosity", _VERBOSITIES, path)


def parse_format(
    format_body: Mapping[str, Any], schema_body: Mapping[str, Any], where: str
) -> dict[str, Any] | None:
    """A wanted form of the reply as chat completions write it; None: any text.

    Args:
        format_body: the object with the ``type``.
        schema_body: the object with ``name``, ``schema`` and ``strict``.
        where: the key of the request that holds it.

    Raises:
        RequestError: an unknown type, or a schema that is none.
    """
    kind = format_body.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise RequestError(
            f"{where}.type {kind!r:.80} is not known; allowed: text, json_object, json_schema",
            where,
        )
    name = take(schema_body, "name", str, "", f"{where}.")
    schema = schema_body.get("schema")
    if not name or not isinstance(schema, dict):
        raise RequestError(
            f"{where} of type json_schema needs a name and a schema that is an object", where
        )
    strict = take(schema_body, "strict", bool, False, f"{where}.")
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": schema, "strict": strict},
    }
