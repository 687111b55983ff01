"""A small library about people who don't exist, and a BM25 index of it."""

from __future__ import annotations

from functools import cache

import bm25s

_FIRST = ("Alma", "Boris", "Clara", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irma", "Jonas")
_LAST = ("Abel", "Brandt", "Conti", "Dahl", "Ekberg", "Falk", "Grant", "Holm")
_CITIES = (
    "Arvika", "Belmont", "Corvo", "Dunmore", "Elvas", "Farsund", "Gorizia", "Hobart", "Ipava",
    "Jarna",
)  # fmt: skip
_COUNTRIES = ("Norland", "Osteria", "Pallas", "Quenta", "Rovia")
_TRADES = ("painter", "chemist", "sailor", "singer", "judge", "baker", "pilot")


def list_people() -> dict[str, str]:
    """The city in which each was born."""
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    return {name: _CITIES[number * 7 % len(_CITIES)] for number, name in enumerate(names)}


def list_cities() -> dict[str, str]:
    """The country in which each lies."""
    return {city: _COUNTRIES[number * 3 % len(_COUNTRIES)] for number, city in enumerate(_CITIES)}


def list_texts() -> list[str]:
    """One text for each person and each city."""
    people = [
        f"{name} is a {_TRADES[number % len(_TRADES)]} who was born in {city}."
        for number, (name, city) in enumerate(list_people().items())
    ]
    return people + [f"{city} is a city in {country}." for city, country in list_cities().items()]


@cache
def _build_index() -> tuple[bm25s.BM25, list[str]]:
    texts = list_texts()
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, texts


def find_text(query: str) -> str:
    """The text that fits a query best; empty: no word of it occurs in any."""
    index, texts = _build_index()
    tokens = bm25s.tokenize([query], return_ids=False, show_progress=False)
    if not tokens[0]:
        return ""
    found, scores = index.retrieve(tokens, corpus=texts, k=1, show_progress=False)
    return str(found[0, 0]) if scores[0, 0] > 0 else ""
