"""The scripted player: knows some animals, and answers yes or no."""

from __future__ import annotations

import re

#: What is true of each animal, by the words that a question about it holds.
ANIMALS: dict[str, frozenset[str]] = {
    name: frozenset(facts.split())
    for name, facts in {
        "ant": "insect small",
        "bat": "mammal fly small wild",
        "bear": "mammal big wild fur",
        "bee": "insect fly small",
        "cat": "mammal pet fur small",
        "cow": "mammal farm big milk",
        "crab": "water shell small",
        "dog": "mammal pet fur",
        "duck": "bird fly farm water eggs feathers",
        "eagle": "bird fly wild eggs feathers",
        "fish": "water swim pet eggs",
        "frog": "water swim small green eggs",
        "goat": "mammal farm milk horns",
        "hen": "bird farm eggs feathers",
        "horse": "mammal farm big ride",
        "lion": "mammal wild big fur",
        "mouse": "mammal small fur",
        "owl": "bird fly wild eggs feathers night",
        "pig": "mammal farm",
        "rabbit": "mammal pet fur small",
        "shark": "water swim big wild",
        "sheep": "mammal farm milk wool",
        "snake": "wild eggs long",
        "spider": "small web",
        "tiger": "mammal wild big fur stripes",
        "turtle": "water shell eggs slow green",
        "whale": "mammal water swim big",
        "wolf": "mammal wild fur",
        "zebra": "mammal wild big stripes",
    }.items()
}
_FACTS = frozenset[str]().union(*ANIMALS.values())
#: Other words for the facts.
_SYNONYMS = {
    "flies": "fly", "flying": "fly", "wings": "fly", "swims": "swim", "swimming": "swim",
    "large": "big", "huge": "big", "little": "small", "tiny": "small", "feather": "feathers",
    "egg": "eggs", "sea": "water", "ocean": "water", "furry": "fur", "hair": "fur",
    "striped": "stripes", "mammals": "mammal", "birds": "bird", "insects": "insect",
    "domestic": "farm", "jungle": "wild", "forest": "wild", "pets": "pet",
}  # fmt: skip


class Answerer:
    """Answers questions about one secret animal."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.is_found = False

    def answer(self, question: str) -> str:
        """yes, no, or what is wrong with the question; the secret's name, alone, finds it."""
        words = re.findall(r"[a-z]+", question.lower())
        named = {word for word in words if word in ANIMALS}
        if len(named) > 1:
            return "Name one animal only."
        if named:
            self.is_found = named == {self._secret}
            return "yes" if self.is_found else "no"
        asked = {_SYNONYMS.get(word, word) for word in words} & _FACTS
        if not asked:
            return "I do not understand."
        return "yes" if asked <= ANIMALS[self._secret] else "no"
