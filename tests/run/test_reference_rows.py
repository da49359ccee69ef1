"""The reference study gives the rows it gave before: to the bit where they were made, nearly so elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_rows as reference
from heatproof.errors import HeatproofError
from heatproof.models import accel, model
from heatproof.registry import Explainer, Metric, explainers, metrics, parse_call
from heatproof.run.config import read_metrics

RECORDED = json.loads(reference.MADE_WITH.read_text())
EXPECTED = reference.read_rows()


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> reference.Rows:
    return reference.compute(tmp_path_factory.mktemp("reference"))


def test_same_rows_for_the_same_reasons(actual: reference.Rows) -> None:
    assert actual.keys() == EXPECTED.keys()
    assert {k: reason for k, (_, reason) in actual.items()} == {
        k: reason for k, (_, reason) in EXPECTED.items()
    }


@pytest.mark.skipif(reference.made_with() != RECORDED, reason=f"bits are compared on {RECORDED}")
def test_same_bits(actual: reference.Rows) -> None:
    other = {
        key: (EXPECTED[key][0], actual[key][0]) for key in EXPECTED if actual[key][0] != EXPECTED[key][0]
    }
    assert not other, f"{len(other)} rows changed; see tests/reference_rows.py"


def test_near_everywhere(actual: reference.Rows) -> None:
    assert reference.strays(EXPECTED, actual) == []


def test_same_bits_if_gpu_memory_runs_out_at_the_end_of_every_part(
    actual: reference.Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is computed again at its size, so nothing that its first attempt left behind may count."""
    in_parts, failures = accel.in_parts, 0

    def short(device: torch.device, name: str, count: int, work: Any, *options: Any) -> Any:
        failed = set[int]()

        def fails_once(start: int, stop: int) -> Any:
            nonlocal failures
            result = work(start, stop)
            if start not in failed:
                failed.add(start)
                failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        return in_parts(torch.device("cuda"), name, count, fails_once, *options)

    monkeypatch.setattr(model, "in_parts", short)
    monkeypatch.setattr(accel, "release_memory", lambda _device: None)
    rows = reference.compute(tmp_path)
    assert {key: row for key, row in rows.items() if row != actual[key]} == {} and failures > 1000


def test_every_method_and_every_metric_of_a_run_is_in_it() -> None:
    methods = {name for name in explainers.names() if _ours(explainers.get(name))}
    run = {
        text
        for network in reference.SEEDS
        for s in reference.STUDIES
        for text in reference.methods_of(s, network)
    }
    # cam needs global average pooling, which the reference networks do not have.
    assert {parse_call(text)[0] for text in run} == methods - {"cam"}
    in_a_run = {name for name in metrics.names() if _ours(metrics.get(name)) and _runs(name)}
    measured = [text for study in reference.STUDIES.values() for text in set(study["metrics"])]
    # Evidence is about the network and needs correct answers, which reference networks do not give.
    assert {r.entry.name for text in measured for r in read_metrics([text])} == in_a_run - {"evidence"}


def test_most_of_it_is_numbers() -> None:
    """A study of NaN would hold nothing: every metric of every network has a number for most methods."""
    measured: dict[tuple[str, str], set[str]] = {}
    defined: dict[tuple[str, str], set[str]] = {}
    for key, (value, _) in EXPECTED.items():
        if key[-2] in reference.METHODS:
            measured.setdefault((key[1], key[-1]), set()).add(key[-2])
            if value != "nan":
                defined.setdefault((key[1], key[-1]), set()).add(key[-2])
    assert len(measured) > 100
    few = {name for name in measured if len(defined.get(name, ())) < 0.8 * len(measured[name])}
    assert {metric for _, metric in few} == {"map_error"}  # rise has none


def test_maps_that_ignore_the_network_are_exactly_their_own_shadows() -> None:
    of = {key: value for key, (value, _) in EXPECTED.items() if key[-1].startswith("specificity_weights")}
    values = [
        value for key, value in of.items() if key[-2] in ("edges", "centre", "random") and value != "nan"
    ]
    assert len(values) > 20 and {float.fromhex(value) for value in values} == {0.0}


@pytest.mark.parametrize(("column", "name"), [(-1, "dts"), (-2, "edges"), (-1, "accuracy")])
def test_a_wrong_formula_is_seen_also_where_bits_are_not_compared(column: int, name: str) -> None:
    changed = {
        key: ((float.fromhex(value) * 1.02).hex(), reason) if key[column] == name else (value, reason)
        for key, (value, reason) in EXPECTED.items()
    }
    assert any(text.startswith(f"{name}: ") for text in reference.strays(EXPECTED, changed))


def test_a_pixel_that_changes_places_is_no_wrong_formula() -> None:
    key = next(key for key, (value, _) in EXPECTED.items() if key[-1] == "pointing" and value != "nan")
    flipped = (1 - float.fromhex(EXPECTED[key][0])).hex()
    assert reference.strays(EXPECTED, EXPECTED | {key: (flipped, "")}) == []


def _ours(entry: Explainer | Metric) -> bool:
    """No plug-in, which a machine or another test may have."""
    return entry.function.__module__.startswith("heatproof.")


def _runs(name: str) -> bool:
    try:
        return bool(read_metrics([name]))
    except HeatproofError:
        return False
