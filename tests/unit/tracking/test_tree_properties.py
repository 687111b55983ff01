"""Whatever an agent does with its history, every sampled token is trained exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.sequences import build_sequences
from agentrl_cli.tracking.template import ChatTemplate, TemplateInputs
from agentrl_cli.tracking.tree import ConversationTree

_TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
_ACTIONS = st.sampled_from(["continue", "branch", "edit", "new", "other_tools", "fail", "repeat"])
_REPLIES = st.sampled_from(["The answer", "is", "", "\n\nforty two ", "Paris\n", "é"])
_STEPS = st.lists(
    st.tuples(_ACTIONS, _REPLIES, st.sampled_from(["stop", "length"]), st.integers(0, 50)),
    min_size=1,
    max_size=12,
)


class _Conversation:
    """An agent that goes on from any turn it has seen, in any of the ways agents do."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.tree = ConversationTree(template)
        self.interactions: list[Interaction] = []
        self.clock = 0

    def completed(self) -> list[Interaction]:
        return [i for i in self.interactions if i.status is InteractionStatus.COMPLETED]

    def build_request(self, action: str, number: int) -> tuple[list[Any], TemplateInputs]:
        known = self.completed()
        if not known or action == "new":
            return [{"role": "user", "content": f"question {number}"}], TemplateInputs()
        past = known[-1] if action == "continue" else known[number % len(known)]
        inputs = TemplateInputs(past.tools)
        if action == "repeat":
            return list(past.messages), inputs
        reply = dict(past.reply or {})
        if action == "edit":
            reply["content"] = f"{reply['content']} edited"
        if action == "other_tools":
            inputs = TemplateInputs(() if past.tools else _TOOLS)
        return [*past.messages, reply, {"role": "user", "content": f"more {number % 3}"}], inputs

    def take_turn(self, action: str, text: str, finish: str, number: int) -> None:
        messages, inputs = self.build_request(action, number)
        plan = self.tree.plan(messages, inputs)
        ids = self.template.encode(text)
        if finish == "stop" or not ids:
            finish, ids = "stop", (*ids, self.template.tokenizer.eos_token_id)
        failed = action == "fail"
        self.clock += 2
        interaction = Interaction(
            id=str(len(self.interactions)),
            parent_id=plan.parent_id,
            extends_parent=plan.extends_parent,
            break_cause=plan.break_cause,
            messages=tuple(messages),
            tools=inputs.tools,
            prompt_ids=plan.prompt_ids,
            reply=None if failed else {"role": "assistant", "content": text},
            completion_ids=() if failed else ids,
            rollout_logprobs=() if failed else (-1.0,) * len(ids),
            versions=() if failed else (0,) * len(ids),
            finish_reason=finish,
            status=InteractionStatus.FAILED if failed else InteractionStatus.COMPLETED,
            started=self.clock,
            ended=self.clock + 1,
        )
        self.interactions.append(interaction)
        if not failed:
            self.tree.add(plan, interaction)


@settings(max_examples=150, deadline=None)
@given(steps=_STEPS)
def test_every_sampled_token_is_trained_once(tokenizer: Any, steps: list[Any]) -> None:
    conversation = _Conversation(ChatTemplate(tokenizer))
    for step in steps:
        conversation.take_turn(*step)
    completed = conversation.completed()
    for style in ("concat", "individual"):
        trained: Counter[str] = Counter()
        for sequence in build_sequences(conversation.interactions, style):  # type: ignore[arg-type]
            assert len(sequence.input_ids) == len(sequence.loss_mask) == len(sequence.versions)
            masked_in = set()
            for span in sequence.spans:
                turn = span.interaction
                assert sequence.input_ids[: span.start] == turn.prompt_ids
                assert sequence.input_ids[span.start : span.end] == turn.completion_ids
                if span.trained:
                    trained[turn.id] += 1
                    masked_in |= set(range(span.start, span.end))
            assert {n for n, m in enumerate(sequence.loss_mask) if m} == masked_in
            assert {n for n, v in enumerate(sequence.versions) if v >= 0} >= masked_in
        assert trained == Counter({i.id: 1 for i in completed})


@settings(max_examples=150, deadline=None)
@given(steps=_STEPS)
def test_continued_turns_keep_their_ids_and_mean_the_same(tokenizer: Any, steps: list[Any]) -> None:
    conversation = _Conversation(ChatTemplate(tokenizer))
    for step in steps:
        conversation.take_turn(*step)
    by_id = {i.id: i for i in conversation.completed()}
    for interaction in conversation.interactions:
        shown = tokenizer.apply_chat_template(
            list(interaction.messages),
            tools=list(interaction.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert tokenizer.decode(interaction.prompt_ids) == shown
        if interaction.extends_parent:
            parent = by_id[interaction.parent_id or ""]
            known = parent.prompt_ids + parent.completion_ids
            assert interaction.prompt_ids[: len(known)] == known
