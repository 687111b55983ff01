"""What is said to vLLM, what vLLM 0.32 answers, and which answers are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.engine.vllm.vllm_server import CacheSalts
from agentrl_cli.engine.vllm.vllm_wire import (
    SUPPORTED_VLLM,
    GivenUpError,
    VersionSpan,
    check_vllm_version,
    expand_spans,
    find_meaning,
    format_generate,
    parse_piece,
    parse_score,
    parse_version,
)
from agentrl_cli.errors import ContextLengthError, EngineError, UserInputError

#: As a server sent it, shortened by fields that are always null.
PIECE = (
    b'{"request_id":"generate-tokens-92de","usage":null,"output_mode":"tokens","choices":['
    b'{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[185,430],'
    b'"weight_versions":null,"logprobs":{"content":[{"token_id":185,"logprob":-5.096236228942871,'
    b'"rank":20,"top_logprobs":[{"token_id":185,"logprob":-5.096236228942871,"rank":20}]},'
    b'{"token_id":430,"logprob":-5.571554183959961,"rank":49,"top_logprobs":[]}]}}]}'
)
LAST = (
    b'{"request_id":"generate-tokens-92de","choices":[{"index":0,"finish_reason":"length",'
    b'"stop_reason":null,"token_ids":[93],"weight_versions":[{"version":"3","start":0,"end":2},'
    b'{"version":"4","start":2,"end":4}],"logprobs":{"content":[{"token_id":93,'
    b'"logprob":-5.816113471984863,"rank":71,"top_logprobs":[]}]}}]}'
)


def change(data: bytes, **fields: Any) -> bytes:
    """``data`` with other fields in its choice."""
    reply = json.loads(data)
    reply["choices"][0].update(fields)
    return json.dumps(reply).encode()


def make_logprobs(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}


def test_a_piece_is_read() -> None:
    piece, spans = parse_piece(PIECE, greedy=False)
    assert piece.completion_ids == (185, 430)
    assert piece.rollout_logprobs == (-5.096236228942871, -5.571554183959961)
    assert (piece.finish_reason, piece.stop_text, spans) == (None, None, ())


def test_the_last_piece_says_why_and_by_which_weights() -> None:
    piece, spans = parse_piece(LAST, greedy=False)
    assert piece.finish_reason == "length"
    assert spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 4))


def test_greedy_tokens_have_logprob_zero() -> None:
    assert parse_piece(PIECE, greedy=True)[0].rollout_logprobs == (0.0, 0.0)


def test_the_likeliest_tokens_are_ranked_without_the_sampled_one() -> None:
    tops = [(7, -3.0), (5, -0.25), (9, -1.5), (8, -9999.0)]
    content = [
        {
            "token_id": 7,
            "logprob": -3.0,
            "top_logprobs": [{"token_id": token, "logprob": x} for token, x in tops],
        }
    ]
    data = change(PIECE, token_ids=[7], logprobs={"content": content})
    piece, _ = parse_piece(data, greedy=False, num_top=2)
    assert piece.top_logprobs == (((5, -0.25), (9, -1.5)),)
    # What cannot be sampled is not among them.
    piece, _ = parse_piece(data, greedy=True, num_top=4)
    assert piece.top_logprobs == (((5, -0.25), (9, -1.5), (7, -3.0)),)
    assert parse_piece(data, greedy=False)[0].top_logprobs == ()


def test_a_stop_text_is_told_from_a_stop_token() -> None:
    by_text = change(LAST, finish_reason="stop", stop_reason="</a>")
    assert parse_piece(by_text, greedy=False)[0].stop_text == "</a>"
    by_token = change(LAST, finish_reason="stop", stop_reason=93)
    piece, _ = parse_piece(by_token, greedy=False)
    assert (piece.finish_reason, piece.stop_text) == ("stop", None)


def test_a_last_piece_may_be_empty() -> None:
    empty = change(LAST, token_ids=[], logprobs={"content": []})
    assert parse_piece(empty, greedy=False)[0].completion_ids == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": {}}',
        json.dumps({"choices": json.loads(PIECE)["choices"] * 2}).encode(),
        change(PIECE, token_ids=None),
        change(PIECE, token_ids=[185]),
        change(PIECE, token_ids=[185, 431]),
        change(PIECE, token_ids=[430, 185]),
        change(PIECE, token_ids=[185, -1], logprobs=make_logprobs((185, -1.0), (-1, -1.0))),
        change(PIECE, token_ids=["185", 430]),
        change(PIECE, token_ids=[185, True]),
        change(PIECE, logprobs=None),
        change(PIECE, logprobs={"content": None}),
        change(PIECE, logprobs={"content": [1, 2]}),
        change(PIECE, logprobs={"content": [{"token_id": 185}, {"token_id": 430}]}),
        change(PIECE, logprobs=make_logprobs((185, None), (430, -1.0))),
        change(PIECE, logprobs=make_logprobs((185, "-1"), (430, -1.0))),
        change(PIECE, logprobs=make_logprobs((185, float("nan")), (430, -1.0))),
        change(PIECE, logprobs=make_logprobs((185, float("-inf")), (430, -1.0))),
        change(PIECE, logprobs=make_logprobs((185, 0.5), (430, -1.0))),
        change(PIECE, finish_reason="error"),
        change(PIECE, finish_reason=1),
        change(LAST, weight_versions=None),
        change(LAST, weight_versions=[1]),
        change(LAST, weight_versions=[{"version": "3"}]),
        change(LAST, weight_versions=[{"version": "3", "start": 0, "end": "4"}]),
        change(LAST, weight_versions=[{"version": "v3", "start": 0, "end": 4}]),
    ],
)
def test_what_is_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        parse_piece(data, greedy=False)
    assert not isinstance(caught.value, GivenUpError)


def test_a_refusal_shows_the_start_of_the_reply() -> None:
    with pytest.raises(EngineError, match=r"\(no JSON\): <html>") as caught:
        parse_piece(b"<html>" + b"x" * 5000, greedy=False)
    assert len(str(caught.value)) < 500


def test_weights_that_make_no_numbers_are_named_as_such() -> None:
    """vLLM writes -9999 for a logprob that is NaN."""
    data = change(PIECE, logprobs=make_logprobs((185, -9999.0), (430, -1.0)))
    for greedy in (False, True):
        with pytest.raises(EngineError, match="not finite"):
            parse_piece(data, greedy=greedy)


@pytest.mark.parametrize(
    "data",
    [
        change(LAST, finish_reason="abort"),
        b'{"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}',
    ],
)
def test_what_the_server_gives_up_another_may_finish(data: bytes) -> None:
    with pytest.raises(GivenUpError):
        parse_piece(data, greedy=False)


def test_an_error_in_the_stream_is_the_servers_own() -> None:
    with pytest.raises(EngineError, match="Token id 9999 is out of vocabulary") as caught:
        parse_piece(
            b'{"error":{"message":"Token id 9999 is out of vocabulary","code":400}}', greedy=False
        )
    assert not isinstance(caught.value, GivenUpError)


def test_a_prompt_that_is_too_long_for_the_server_says_so() -> None:
    meaning = find_meaning(
        "The decoder prompt (length 600) is longer than the maximum model length of 512. Make"
    )
    assert isinstance(meaning, ContextLengthError)
    assert (meaning.num_prompt_tokens, meaning.max_model_len) == (600, 512)
    assert find_meaning("something else") is None


@pytest.mark.parametrize(("label", "version"), [("default", -1), ("0", 0), ("12", 12)])
def test_versions_are_numbers(label: str, version: int) -> None:
    assert parse_version(label) == version


@pytest.mark.parametrize("label", ["-1", "1.0", "step-3", "", "٣", None, 3, "9" * 40])
def test_weights_that_somebody_else_named_are_refused(label: object) -> None:
    with pytest.raises(EngineError, match="names weights by numbers"):
        parse_version(label)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_spans_become_the_version_of_every_token(runs: list[tuple[int, int]]) -> None:
    spans, expected = [], []
    for version, length in runs:
        spans.append(VersionSpan(version, len(expected), len(expected) + length))
        expected += [version] * length
    assert expand_spans(spans, len(expected)) == tuple(expected)


@given(st.lists(st.tuples(st.integers(-3, 12), st.integers(-3, 12)), max_size=5), st.integers(0, 9))
def test_spans_that_leave_a_token_in_doubt_are_refused(
    bounds: list[tuple[int, int]], num_tokens: int
) -> None:
    spans = [VersionSpan(i, start, end) for i, (start, end) in enumerate(bounds)]
    owners = [[s for s in spans if s.start <= i < s.end] for i in range(-3, 12)]
    is_covered = [len(o) == (1 if 0 <= i < num_tokens else 0) for i, o in enumerate(owners, -3)]
    try:
        versions = expand_spans(spans, num_tokens)
    except EngineError:
        return
    assert all(is_covered)
    assert versions == tuple(owners[i + 3][0].version for i in range(num_tokens))


SCORES = [None, {"99": {"logprob": -8.6, "rank": 598}}, {"3": {"logprob": -8.1}, "7": {}}]


def test_scores_are_read_from_their_position_on() -> None:
    data = json.dumps({"prompt_logprobs": SCORES, "choices": [{}]}).encode()
    assert parse_score(data, [10, 99, 3], 1) == [-8.6, -8.1]
    assert parse_score(data, [10, 99, 3], 2) == [-8.1]
    assert parse_score(data, [10, 99, 3], 3) == []


@pytest.mark.parametrize(
    "reply",
    [
        {},
        [],
        {"choices": [{}]},
        {"prompt_logprobs": SCORES[:2]},
        {"prompt_logprobs": [*SCORES, None]},
        {"prompt_logprobs": [None, {"98": {"logprob": -1.0}}, SCORES[2]]},
        {"prompt_logprobs": [None, None, SCORES[2]]},
        {"prompt_logprobs": [None, {"99": {"logprob": None}}, SCORES[2]]},
    ],
)
def test_malformed_scores_are_refused(reply: Any) -> None:
    with pytest.raises(EngineError):
        parse_score(json.dumps(reply).encode(), [10, 99, 3], 1)


def say(sampling: Sampling, **arguments: Any) -> dict[str, Any]:
    arguments = {"cache_salt": "s", "adapter": None, "stream_interval": 4, **arguments}
    return format_generate((1, 2), sampling, max_tokens=7, **arguments)


def test_a_request_asks_for_tokens_logprobs_and_pieces() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=3, stop_token_ids=(5,))
    assert say(sampling) == {
        "token_ids": [1, 2],
        "sampling_params": {
            "max_tokens": 7,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "stop_token_ids": [5],
            "logprobs": 0,
            "stream_interval": 4,
            "detokenize": False,
        },
        "cache_salt": "s",
        "stream": True,
    }


def test_what_constrains_a_completion_is_said() -> None:
    body = say(Sampling(structural_tag='{"a": 1}', num_top_logprobs=4))
    params = body["sampling_params"]
    assert params["structured_outputs"] == {"structural_tag": '{"a": 1}'}
    # vLLM 0.32 counts the sampled token among them.
    assert params["logprobs"] == 5
    # Even a server with a reasoning parser holds to it from the first token.
    assert body["reasoning_ended"] is True
    assert "structured_outputs" not in say(Sampling())["sampling_params"]


@pytest.mark.parametrize(("interval", "streamed"), [(6, True), (7, False)])
def test_what_comes_in_one_piece_anyway_is_not_streamed(interval: int, streamed: bool) -> None:
    """A stream costs the server more, and its first token comes alone."""
    assert say(Sampling(), stream_interval=interval)["stream"] is streamed


def test_text_is_made_only_to_find_stop_texts_in_it() -> None:
    plain = say(Sampling(stop=("",)))["sampling_params"]
    assert plain["detokenize"] is False
    assert "stop" not in plain
    stopped = say(Sampling(stop=("</a>", "")))["sampling_params"]
    assert stopped["detokenize"] is True
    assert stopped["stop"] == ["</a>"]
    # An end tag may be one special token, which vLLM leaves out of the text otherwise.
    assert stopped["skip_special_tokens"] is False


@pytest.mark.parametrize(("temperature", "sent"), [(0.0, 0.0), (1e-6, 0.0), (1e-4, 1e-4)])
def test_what_vllm_treats_as_greedy_is_said_so(temperature: float, sent: float) -> None:
    body = say(Sampling(temperature=temperature))
    assert body["sampling_params"]["temperature"] == sent


def test_the_base_model_is_asked_for_by_no_name() -> None:
    assert "model" not in say(Sampling())
    assert say(Sampling(), adapter="a")["model"] == "a"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post2", "v0.32.0rc1+cpu", " 0.32\n"])
def test_supported_versions_pass(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2", "0.320.1", "dev", ""])
def test_other_versions_are_refused_with_what_to_type(version: str) -> None:
    with pytest.raises(UserInputError) as caught:
        check_vllm_version(version)
    message = str(caught.value)
    assert f"vLLM {version or '(unknown)'} was found" in message
    assert f"supports vLLM {SUPPORTED_VLLM}" in message
    assert f"pip install 'vllm{SUPPORTED_VLLM}'" in message
    assert "engine.python=PATH" in message


def test_calls_share_their_cache_while_the_weights_stay() -> None:
    cache = CacheSalts()
    assert cache.make() == cache.make()


def test_no_salt_outlives_a_change_of_the_weights() -> None:
    cache = CacheSalts()
    salts = [{cache.make()}]
    for _ in range(3):
        cache.begin_change()
        # Sent while the weights are replaced: may be half old and half new, each for itself.
        during = {cache.make(), cache.make()}
        assert len(during) == 2
        salts.append(during)
        cache.end_change()
        salts.append({cache.make()})
    assert len(set.union(*salts)) == sum(map(len, salts))


def test_two_clients_share_nothing() -> None:
    """A trainer that resumes publishes the same version again, with other weights maybe."""
    assert CacheSalts().make() != CacheSalts().make()
