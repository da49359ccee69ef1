"""What 0.1 called otherwise still works in this release, and says what it is called now."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import heatproof as hp
from conftest import small_cnn
from heatproof.moved import MODULES

PLACES = [(old, place) for old, places in MODULES.items() for place in places]


@pytest.mark.parametrize(("old", "place"), PLACES, ids=lambda name: name)
def test_a_module_is_found_by_its_old_name(old: str, place: str) -> None:
    module, today = (importlib.import_module(f"heatproof.{name}") for name in (old, place))
    own = next(
        name for name, thing in vars(today).items() if getattr(thing, "__module__", "") == today.__name__
    )
    with pytest.warns(DeprecationWarning, match=rf"heatproof\.{old}\.{own} is now heatproof\.{place}\.{own}"):
        assert getattr(module, own) is getattr(today, own)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_every_way_to_import_works_and_leaves_functions_alone() -> None:
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
import heatproof.images.geometry, heatproof as hp
from heatproof.metrics.structure import CONSTANT, Cause, PerImage
from heatproof.images.qr import QRSet, make_qr
from heatproof.metrics.localise import budget_masks
import heatproof.metrics.cscore
from heatproof.images import geometry
import heatproof.images.geometry as also
from heatproof.metrics.kit import Cause as today
assert heatproof.images.geometry is geometry is also and geometry.TRANSFORMS and Cause is today
assert all(callable(getattr(hp.metrics, name)) for name in ("cose", "cscore", "localise", "structure"))
assert hp.metrics.cscore.__module__ == "heatproof.metrics.consistency"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_other_modules_are_as_absent_as_ever() -> None:
    for name in ("heatproof.nothing", "heatproof.images.nothing", "images.geometry"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAPS = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1))
CALLS: dict[str, tuple[Any, ...]] = {
    "insertion_deletion": (MAPS, 1), "part_occlusion": (MAPS > 0.5, 1), "fragility": ("gradcam",),
    "input_shift": (["gradcam"], 1), "parameter_randomisation": ("gradcam", [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_model_and_images_may_still_come_first(name: str) -> None:
    function, network = getattr(hp.metrics, name), small_cnn().eval()
    today = function(*CALLS[name], model=network, images=IMAGES)
    with pytest.warns(DeprecationWarning, match="write model=... and images=..."):
        old = function(network, IMAGES, *CALLS[name])
    with pytest.warns(DeprecationWarning, match="write model=... and images=..."):
        named = function(hp.load_model(network), images=IMAGES, **arguments(function, CALLS[name]))
    assert numbers(today) == numbers(old) == numbers(named)


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_nobody_takes_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="batchsize"):
        getattr(hp.metrics, name)(*CALLS[name], model=small_cnn(), images=IMAGES, batchsize=3)


def arguments(function: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(inspect.signature(function).parameters, values, strict=False))


def numbers(found: Any) -> list[list[float]]:
    if name := next((n for n in ("insertion", "depths") if hasattr(found, n)), None):
        found = {"": {"": found.insertion}} if name == "insertion" else found.mean()
    lots = [found] if isinstance(found, hp.metrics.kit.PerImage) else list(found.values())
    return [value.flatten().tolist() for lot in lots for value in lot.values()]


def test_reasons_of_curves_are_those_of_their_scores() -> None:
    found = hp.metrics.insertion_deletion(torch.ones(2, 4, 4), model=small_cnn(), images=IMAGES, steps=3)
    with pytest.warns(DeprecationWarning, match=r"scores\.reasons"):
        assert found.reasons == tuple(found.scores.reasons("deletion")) and all(found.reasons)
