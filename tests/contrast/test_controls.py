"""Controls are never reported to mark the token, Grad-CAM always is: on twelve pairs.

Four of them in `make test`, the others in `make test-portable`.
"""

from __future__ import annotations

import pytest

from contrast.discs import TAG, model_ready, network
from heatproof.contrast import ContrastScore, make_pair
from heatproof.contrast.pair import inside_token
from research.calibration.collect import CONTROLS, all_maps

pytestmark = pytest.mark.trains

EXACT = ("random", "edges", "centre", "untrained network", "untrained gradient")  # the same under A and B
SEEDS = [range(4), pytest.param(range(4, 12), marks=pytest.mark.seeds)]


def scores_of(seed: int) -> dict[str, ContrastScore] | None:
    """Grad-CAM and every control under both networks of a pair; None where its planting failed."""
    model = network(seed=seed)
    pair = make_pair(model, *model_ready(model, 40, seed), TAG, positive=1, lr=3e-3, seed=seed)
    if not pair.holds:
        return None
    a, b = (
        {
            method: inside_token(maps, pair.masks).double().numpy()
            for method, maps in all_maps(*twins, pair.images, 1, ["gradcam"], seed, seed + 1000).items()
        }
        for twins in ((pair.a, pair.b), (pair.b, pair.a))
    )
    return {method: ContrastScore(method, a[method], b[method], seed=seed) for method in a}


@pytest.fixture(scope="module", params=SEEDS, ids=["four pairs", "eight pairs"])
def result(request: pytest.FixtureRequest) -> list[dict[str, ContrastScore]]:
    made = [scores for seed in request.param if (scores := scores_of(seed))]
    assert len(made) >= 0.75 * len(request.param)  # of most pairs the flips say that they are as planted
    return made


def test_gradcam_shows_the_token_wherever_the_flips_confirm_the_pair(
    result: list[dict[str, ContrastScore]],
) -> None:
    assert [scores["gradcam"].shows for scores in result] == [True] * len(result)
    assert min(scores["gradcam"].interval[0] for scores in result) > 0.8


@pytest.mark.parametrize("control", CONTROLS)
def test_no_control_ever_shows_it(result: list[dict[str, ContrastScore]], control: str) -> None:
    assert [scores[control].shows for scores in result] == [False] * len(result)
    if control in EXACT:
        assert {scores[control].auc for scores in result} == {0.5}
