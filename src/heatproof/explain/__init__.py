"""Explanation methods. A module in this package registers its methods; their facts are in methods.toml."""

import tomllib
from dataclasses import replace
from pathlib import Path

from heatproof.registry import Card, Explainer

FACTS = tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))
CARDS = {name: Card(**texts) for name, texts in FACTS.pop("cards").items()}


def read_card(like: str = "", **texts: str) -> Card:
    """A card with these texts; the others are those of the card named `like`."""
    return replace(CARDS.get(like, Card()), **texts)


def method(name: str) -> Explainer:
    """A decorator that registers the method of this name in methods.toml."""
    facts = FACTS[name]
    card, aliases = read_card(**facts.get("card", {})), tuple(facts.get("aliases", ()))
    return Explainer(**facts | {"name": name, "card": card, "aliases": aliases})
