"""Stop texts found while tokens arrive one by one."""

from __future__ import annotations

import pytest

from agentrl_cli.engine.embedded.token_sampling import StopTextFinder


@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [
        ("The quick brown fox", ("k b",), "k b"),
        ("Schöne Grüße, Äpfel", ("ße",), "ße"),  # a character of several byte tokens
        ("日本語のテキスト 🙂🙃", ("🙂🙃",), "🙂🙃"),
        ("aXbYc", ("Y", "X"), "X"),  # the earliest in the text
        ("ab", ("abc", "b"), "b"),
        ("say END now", ("END", "EN"), "EN"),  # the shorter one is complete first
        ("a<tool_call>b", ("<tool_call>",), "<tool_call>"),
        ("a<|im_end|>b", ("<|im_end|>",), "<|im_end|>"),
        ("nothing of it", ("zzz",), None),
        ("almost EN D", ("END",), None),
    ],
)
def test_a_stop_text_is_found_with_the_token_that_completes_it(tiny_tokenizer, text, stop, found):
    ids = tiny_tokenizer.encode(text)
    finder = StopTextFinder(tiny_tokenizer, stop)
    results = [finder.find(token) for token in ids]
    if found is None:
        assert results == [None] * len(ids)
        return
    place = next(i for i, result in enumerate(results) if result is not None)
    assert results[place] == found
    # With this token the text holds it, and before this token it held none of them.
    assert found in tiny_tokenizer.decode(ids[: place + 1])
    assert not any(one in tiny_tokenizer.decode(ids[:place]) for one in stop)
