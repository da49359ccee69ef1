"""Every metric on volumes: numbers, those of pictures where the third axis is constant, or one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from heatproof.errors import InputError
from heatproof.metrics.agreement import NO_SSIM, map_similarity
from heatproof.metrics.results import PerClass, PerImage
from heatproof.registry import Metric, metrics, takes_volumes
from heatproof.types import Maps

DEPTH, SIDE, COUNT = 4, 12, 5
BUDGET = 0.25  # a whole number of pixels in each slice
MANY = [entry for entry in metrics if entry.needs & {"maps", "images", "model", "ssim"}]


def network(three: bool) -> nn.Module:
    torch.manual_seed(0)
    flat = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    if not three:
        return flat.eval()
    deep = nn.Sequential(
        nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1)), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip
    state = flat.state_dict()
    deep.load_state_dict({k: v[:, :, None] if v.ndim == 4 else v for k, v in state.items()})
    return deep.eval()


def deepened(values: Tensor) -> Tensor:
    """ "b ... h w" repeated along a new axis in front of the last two."""
    return values[..., None, :, :].expand(*values.shape[:-2], DEPTH, *values.shape[-2:]).contiguous()


class Given:
    """What metrics are called with: pictures, or the same repeated along depth."""

    def __init__(self, three: bool) -> None:
        random = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            drawn = torch.rand(*shape, generator=random)
            return deepened(drawn) if three else drawn

        self.three, self.model = three, network(three)
        self.images, values = draw(COUNT, 1, SIDE, SIDE), draw(COUNT, SIDE // 2, SIDE // 2)
        size = (DEPTH, SIDE, SIDE) if three else (SIDE, SIDE)
        self.maps = Maps("gradcam", values, size, torch.tensor([0, 1, 2, 0, 1]), tuple("abcde"))
        self.other = draw(COUNT, SIDE, SIDE)
        self.mask = draw(COUNT, SIDE, SIDE) > 0.7
        self.box = self.mask | (draw(COUNT, SIDE, SIDE) > 0.5)
        self.labels = self.maps.explained
        self.probs = torch.rand(COUNT, 3, generator=random).softmax(1)

    def call(self, entry: Metric) -> Any:
        """The metric's own function with what it needs."""
        name, inputs = entry.name, {"model": self.model, "images": self.images}
        if entry.bundle == "localise":
            return entry.function(self.maps, masks=self.mask, budget=BUDGET)
        if entry.bundle == "structure":
            return entry.function(self.maps, self.mask, self.other > 0.8, self.box)
        if name in ("insertion", "deletion"):
            return entry.function(self.maps, self.labels, steps=5, baseline="mean", **inputs)
        calls: dict[str, Any] = {
            "cscore": lambda f: f(self.maps, self.labels, self.probs, tau=0.0, resamples=10),
            "dom": lambda f: f(self.maps, self.other, self.labels),
            "dispersion": lambda f: f(self.maps, budget=BUDGET),
            "centre_bias": lambda f: f(self.maps),
            "occlusion_drop": lambda f: f(self.mask, self.labels, fill="mean", **inputs),
            "specificity": lambda f: f({"gradcam": self.maps}, draws=1, steps=3, **inputs),
            "untrained": lambda f: f({"gradcam": self.maps}, **inputs),
            "method_agreement": lambda f: f({"a": self.maps, "b": self.other}, budget=BUDGET),
            "ssim": lambda f: f(self.maps, self.maps),
            "structure_parts": lambda f: f(self.maps, {"lung": self.mask, "rest": self.other > 0.8}),
            "grid_pointing": lambda f: f(**inputs, labels=self.labels),
            "disconnected_grid": lambda f: f(**inputs, labels=self.labels),
        }
        return calls.get(name, lambda f: f("gradcam", **inputs))(entry.function)


def numbers(result: Any) -> dict[str, Tensor]:
    if isinstance(result, PerClass) and "images" in result.parts:
        return {kind: result.images[kind] for kind in ("spearman", "overlap")}
    if isinstance(result, PerImage):
        return dict(result)
    if isinstance(result, dict):
        return {f"{m} {k}": v for m, scores in result.items() for k, v in scores.items()}
    if hasattr(result, "overall"):
        return {"overall": torch.tensor(result.overall.value)}
    return {"value": torch.tensor(result.value)}


# Along a constant third axis a distance is measured against a longer diagonal, and so is what it is part of;
# quantiles lie between other pixels; random weights are others.
DRAWN = ("ssim", "spearman", "kept", "null", "excess", "entropy")
NEAR = {
    "auc_f": 0.03,
    "auc_t": 0.03,
    "auc_bg": 0.03,
    "coverage_lung": 0.03,
    "coverage_rest": 0.03,
    "coverage_outside": 0.03,
}
OTHERWISE = {
    "dts",
    "distance",
    "score",
    "centre_bias",
    "gradcam weights",
    "gradcam place",
    *(f"gradcam {k}" for k in DRAWN),
}
BUILT = [entry for entry in MANY if entry.volumes]
# COSE is given numbers; a run refuses to make them of volumes.
REFUSING = [entry for entry in MANY if not takes_volumes(entry) and "ssim" not in entry.needs]


@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry.name)
def test_what_is_built_for_volumes_gives_the_numbers_of_pictures(entry: Metric) -> None:
    deep, flat = (numbers(Given(three).call(entry)) for three in (True, False))
    ranked = [value for name, value in deep.items() if name.endswith("spearman")]
    assert all(value.isfinite().all() for value in ranked)
    assert deep.keys() == flat.keys()
    for name, value in deep.items():
        if name in OTHERWISE:
            assert value.shape == flat[name].shape
        else:
            assert value.isfinite().all(), name
            torch.testing.assert_close(value, flat[name], rtol=0, atol=NEAR.get(name, 1e-4))


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.name)
def test_the_others_refuse_volumes_with_a_clear_error(entry: Metric) -> None:
    with pytest.raises(InputError, match=r"^\w+ is not built for volumes; leave it out or use one of"):
        Given(True).call(entry)


def test_a_metric_that_looks_at_numbers_alone_takes_volumes() -> None:
    assert takes_volumes(metrics.get("auc")) and not takes_volumes(metrics.get("cose"))


def test_masks_and_maps_of_volumes_must_fit() -> None:
    given = Given(True)
    with pytest.raises(InputError, match=r"masks must be one mask 'D H W' or one per map, 'b D H W'"):
        hp.metrics.localise(given.maps, masks=given.mask[0, 0])
    with pytest.raises(InputError, match="boxes are for images; give masks"):
        hp.metrics.localise(given.maps, boxes=[[(0, 0, 3, 3)]] * COUNT)


def test_the_box_around_a_volume() -> None:
    """Of the tight boxes around two balls, one inside the other."""
    maps, mask = torch.zeros(1, 8, 10, 12), torch.zeros(1, 8, 10, 12, dtype=torch.bool)
    maps[0, 2:4, 3:6, 4:8] = 1
    mask[0, 2:6, 3:6, 4:8] = True
    result = hp.metrics.localise(maps, masks=mask, budget=24 / maps.numel())
    assert result["box_iou"].item() == pytest.approx(24 / 48) and result["inside"].item() == 1


def test_volumes_have_no_ssim_and_say_so() -> None:
    given = Given(True)
    alike = map_similarity(given.maps, given.other)
    assert alike["ssim"].isnan().all() and alike.reasons("ssim") == [NO_SSIM] * COUNT
    assert alike["spearman"].isfinite().all() and alike.reasons("spearman") == [""] * COUNT
    result = metrics.get("fragility").function("gradcam", model=given.model, images=given.images, draws=1)
    assert result["gradcam"].reasons("ssim") == [NO_SSIM] * COUNT
    both = metrics.get("method_agreement").function({"a": given.maps, "b": given.other})
    assert both.ssim.reasons == {("a", "b"): NO_SSIM} and both.spearman["a", "b"] == both.spearman["a", "b"]
