"""The album on pairs that chose nothing: its page says what was counted, and one pair is counted again."""

from __future__ import annotations

import re

import pytest

from heatproof.verdict import album
from verdict import album_pairs


def test_the_page_says_what_was_counted() -> None:
    pairs = album_pairs.read()
    page = album_pairs.PAGE.read_text(encoding="utf-8")
    assert album_pairs.table(pairs) in page
    page = page.replace("\n", " ")
    of_a, of_b = (album_pairs.first_is_the_tag(pairs, which) for which in "AB")
    sentence = "The tag was the first group of A in {} of {} albums, and the first group of B in {} of {}."
    assert sentence.format(*of_a, *of_b) in page
    every = all(row["on_tag"] == row["first"] for row in pairs if row["network"] == "A")
    assert every == ("Every crop of A's first groups lies on the tag" in page)
    several = [row["pair"] for row in pairs if row["network"] == "A" and int(row["groups"]) > 1]
    assert several == ["discs 8"] and "seven of the eight networks A use the tag alone" in page
    left_out = [seed for seed in album_pairs.SEEDS if f"discs {seed}" not in {row["pair"] for row in pairs}]
    match = re.search(r"Planting failed with the discs (\d+) and (\d+)", page)
    assert match is not None and [int(seed) for seed in match.groups()] == left_out


def test_one_of_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair in which A uses both the tag and the discs."""
    monkeypatch.setattr(album, "MOST_CROPS", 1000)
    pair, images, masks = album_pairs.discs(8)
    assert pair.holds
    row = album_pairs.album_of(pair.a, images, 1, "discs 8", "A", masks)
    assert row["groups"] == 2 and int(row["on_tag"]) > 0.9 * int(row["first"]) > 25
