"""Rankings of methods: the plan, correlations over pairs of networks, and the page made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from research.calibration.collect import FLOORS
from research.replication import pages, rankings, rankings_page
from research.replication.rankings import METHODS, MOST_ROUNDS, NETWORKS, TRUTHS, plan

BOTH = ("specificity", "insertion")


def results(count: int) -> list[dict[str, Any]]:
    """Pairs in which two metrics follow the truths, one is opposite to them, and others are random."""
    rng, made = np.random.default_rng(0), []
    for member in plan()[:count]:
        truth = dict(zip((*METHODS, *FLOORS), rng.permutation(14).tolist(), strict=True))
        names = (*TRUTHS, *BOTH, "deletion", "cscore", "cose")
        scores = {
            name: {
                m: float(
                    value if name in (*TRUTHS, *BOTH) else -value if name == "deletion" else rng.random()
                )
                for m, value in truth.items()
            }
            for name in names
        }
        made.append({"name": member.name, "member": rankings.asdict(member), "holds": True,
                     "flips": [1.0, 0.0], "scores": scores})  # fmt: skip
    failed = {**made[0], "name": "failed", "holds": False}
    return [*made, {key: value for key, value in failed.items() if key != "scores"}]


def test_the_plan_has_every_network_first() -> None:
    members = plan()
    assert len({m.name for m in members}) == len(members) == 38
    first = [m for m in members if m.seed == 0]
    assert members[: len(first)] == first and {m.network for m in first} == {*NETWORKS}
    assert max(m.seed for m in members) == MOST_ROUNDS - 1
    assert {m.token for m in members} == {"tag", "tint", "blur", "texture"}


def test_correlations_are_those_of_scipy() -> None:
    made = results(3)
    rows = rankings.correlation_rows(rankings.score_rows(made), controls=True)
    row = next(r for r in rows if (r["first"], r["second"]) == ("contrast", "cose"))
    each = [
        spearmanr(list(r["scores"]["contrast"].values()), list(r["scores"]["cose"].values())).statistic
        for r in made[:3]
    ]
    assert row["rho"] == pytest.approx(np.mean(each), abs=1e-3) and row["pairs"] == 3
    assert row["low"] <= row["rho"] <= row["high"]


def test_the_page_states_what_the_tables_hold(tmp_path: Path) -> None:
    rankings_page.write_tables(results(12), tmp_path)
    text = rankings_page.page(tmp_path)
    assert "agrees with both truths (interval above 0): specificity, insertion." in text
    assert (
        "With *transplant*, agree: specificity, insertion; opposite: deletion; undecided: cscore, cose."
        in text
    )
    assert "Rank correlation of the two truths: +1.00 (+1.00 to +1.00)." in text
    assert "13 pairs of networks, of which 12 use the token" in text
    assert (tmp_path / "rankings.png").stat().st_size < 120 * 1024
    assert "nan" not in text and "structure |" not in text.split("## Agreement of all scores")[0]


def test_the_page_is_made_from_the_tables() -> None:
    written = (pages.RESULTS / "rankings.md").read_text("utf-8")
    assert written == rankings_page.page(), "run python -m research.replication pages"
