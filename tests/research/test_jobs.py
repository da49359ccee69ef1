"""Units of work: resumed, joined, failures written down, processes that end replaced."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from heatproof.errors import InputError
from research.jobs import Place, join, read_results, run_all, run_one, unpack


@dataclass(frozen=True)
class Number:
    value: float

    @property
    def name(self) -> str:
        return f"number-{self.value:g}"


def root(number: Number, place: Place) -> dict[str, float]:
    if number.value == 7 and not (place.out / "ended").exists():
        (place.out / "ended").touch()
        os._exit(1)  # as a process without memory
    return {"root": math.sqrt(number.value)}


def test_units_are_measured_once_and_joined(tmp_path: Path) -> None:
    place, lines = Place(None, tmp_path / "out"), list[str]()
    run_all([Number(4), Number(-1), Number(9)], root, place, say=lines.append)
    assert [line.split(";")[0] for line in lines[:1]] == ["3 of 3 results are missing"]
    assert "failed: ValueError" in lines[2] and "ValueError" in place.error("number--1").read_text("utf-8")
    results = read_results(place.joined_file)
    assert results == [{"name": "number-4", "root": 2.0}, {"name": "number-9", "root": 3.0}]
    other = Place(None, tmp_path / "other", joined=tmp_path / "all.json.gz")
    assert unpack(place.joined_file, other) == join(other.out, other.joined_file) == 2
    run_all([Number(4), Number(9)], root, other, say=lines.append)
    assert "0 of 2 results are missing" in lines and read_results(other.joined_file) == results


def test_no_unit_is_started_after_the_time(tmp_path: Path) -> None:
    assert "time is over" in run_one(Number(4), root, Place(None, tmp_path, until=0))
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="--data"):
        _ = Place(None, tmp_path).real_data


def test_processes_that_end_are_replaced(tmp_path: Path) -> None:
    lines = list[str]()
    run_all([Number(7), Number(16)], root, Place(None, tmp_path), 2, lines.append)
    assert any("ended unexpectedly" in line for line in lines)
    assert [result["name"] for result in read_results(tmp_path / "results.json.gz")] == [
        "number-16",
        "number-7",
    ]
