"""The example projects: tasks by seed, and what their rewards and environments say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from examples.alphabet_sort.reward import score_turn
from examples.guess_number.agent import Game
from examples.reverse_text.reward import similarity
from examples.twenty_questions.answerer import ANIMALS, Answerer
from examples.word_problems.reward import score as score_word_problem

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/tasks.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_training_and_held_out_tasks_are_made_by_seed_and_share_none(name: str) -> None:
    build_rows = importlib.import_module(f"examples.{name}.tasks").build_rows
    train, test = ({json.dumps(row) for row in build_rows(split)} for split in ("train", "test"))
    assert train == {json.dumps(row) for row in build_rows("train")}
    assert len(train) > 2 * len(test) >= 20
    assert not train & test


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("three two one", 1.0),
        ("Three two one\n", 1.0),
        # Of 2 x 3 words 2 x 2 match in order.
        ("three two four", 4 / 6),
        # Of 3 + 4 words 2 x 3 match.
        ("so: three two one", 6 / 7),
        ("one two three", 2 / 6),
        ("", 0.0),
    ],
)
def test_similarity_of_reversed_words(said: str, reward: float) -> None:
    assert similarity(said, "three two one") == pytest.approx(reward)


def test_a_turn_is_scored_by_all_words_so_far() -> None:
    words = ["tree", "cat", "bird"]
    assert score_turn("bird, cat, tree", words) == 1.0
    assert score_turn("cat tree", words) == pytest.approx(2 / 3)
    assert words == ["tree", "cat", "bird"], "the agent's list is not sorted for it"


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ("2 + 3 = 5\n#### 5", {"reward": 1.0, "format": 1.0, "accuracy": 1.0}),
        ("She has 5 apples.", {"reward": 0.5, "format": 0.0, "accuracy": 1.0}),
        ("#### 6", {"reward": 0.0, "format": 1.0, "accuracy": 0.0}),
        ("#### 5 or 6", {"reward": 0.0, "format": 0.0, "accuracy": 0.0}),
        ("", {"reward": 0.0, "format": 0.0, "accuracy": 0.0}),
    ],
)
def test_a_format_alone_earns_nothing(said: str, parts: dict[str, float]) -> None:
    assert score_word_problem(said, "5") == parts


def test_a_game_of_numbers() -> None:
    game = Game(secret=5, max_guesses=4)
    assert [game.answer(reply) for reply in ("8", "I say 3!", "none")] == [
        *("lower", "higher", "Say a number.")
    ]
    assert not game.is_over
    assert game.score() == 0.0
    game.answer("5")
    assert game.is_over
    # The fourth guess: 1 - 3 / 8.
    assert game.score() == 0.625
    lost = Game(secret=5, max_guesses=1)
    lost.answer("4")
    assert lost.is_over
    assert lost.score() == 0.0


def test_the_scripted_player_answers_by_what_it_knows() -> None:
    duck = Answerer("duck")
    asked: dict[str, Any] = {
        "Can it fly?": "yes",
        "Is it large?": "no",
        "Is it a bird on a farm?": "yes",
        "What is love?": "I do not understand.",
        "Is it a hen?": "no",
        "A hen or a duck?": "Name one animal only.",
    }
    assert {question: duck.answer(question) for question in asked} == asked
    assert not duck.is_found
    assert duck.answer("Is it a DUCK?") == "yes"
    assert duck.is_found
    assert len(set(ANIMALS.values())) > len(ANIMALS) // 2, "most can be told apart"
