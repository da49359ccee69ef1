"""Beyond one code in one place: scenes with several objects, and codes whose finder was edited.

Rows of scenes, with the share of a map's positive mass on each side and what its best pixels mark:

    scene_codes         mass on all codes                 scene_distractors   mass on what is none
    scene_found         share of the codes of which the best pixels (as many as codes have) mark half or more
    scene_weakest       mass of the code that gets least, against an even share

Rows of edits, with `old` and `new` the places where the finder was and is:

    edit_leaves(move)   mass on `old` before the edit, less that after it
    edit_arrives(move)  mass on `new` after the edit, less that before it
    edit_drop(move)     fall of the class's logit; no method
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images.edits import EDITS, Edited, edit_finders
from heatproof.images.scenes import Scenes, make_scenes
from heatproof.metrics.kit import CONSTANT, Cause, PerImage, pixel_maps
from heatproof.metrics.localisation import budget_masks
from heatproof.models import Model
from heatproof.models.queue import all_logits
from heatproof.train import REGIMES
from heatproof.types import Maps, Unit, constant

if TYPE_CHECKING:
    from heatproof.studies.qr.protocol import Probe

CODE = 1  # the class that is explained
SCENE = ("scene_codes", "scene_distractors", "scene_found", "scene_weakest")
MARKED = 0.5  # of a code's pixels among the best ones
CODES, DISTRACTORS = 2, 1


def ready(model: Model, pictures: np.ndarray) -> Tensor:
    """Pictures "n H W 3" uint8 as the network takes them, on its device."""
    images = torch.from_numpy(np.ascontiguousarray(pictures)).to(model.device).permute(0, 3, 1, 2)
    return model.preprocess.from_bytes(images)


def masses(maps: Maps, masks: Tensor) -> Tensor:
    """ "n k": share of each map's positive mass on each of its k masks; NaN for an empty map."""
    heat = pixel_maps(maps).double()
    inside = (heat[:, None] * masks.to(heat.device)).sum((-2, -1))
    total = heat.sum((-2, -1))
    return inside / torch.where(total > 0, total, torch.nan)[:, None]


def scene_scores(maps: Maps, codes: np.ndarray, distractors: np.ndarray) -> PerImage:
    """What one method's maps say about scenes."""
    objects, others = torch.from_numpy(codes), torch.from_numpy(distractors)
    on_codes = masses(maps, objects)
    kept = _best(maps, objects.any(1))
    marked = (kept[:, None] & objects.to(kept.device)).sum((-2, -1)) / objects.sum((-2, -1)).to(kept.device)
    together = on_codes.sum(1)
    scores = {
        "scene_codes": together,
        "scene_distractors": masses(maps, others).sum(1) if others.shape[1] else torch.zeros_like(together),
        "scene_found": (marked >= MARKED).double().mean(1),
        "scene_weakest": on_codes.amin(1)
        * on_codes.shape[1]
        / torch.where(together > 0, together, torch.nan),
    }
    flat = constant(maps.values)
    off = Cause("nothing of the map lies on a code", (together == 0) & ~flat, ("scene_weakest",))
    return PerImage({name: value.float() for name, value in scores.items()}, [Cause(CONSTANT, flat), off])


def _best(maps: Maps, wanted: Tensor) -> Tensor:
    """ "n H W" bool: each map's best pixels, as many as are wanted of that picture."""
    area = wanted.flatten(1).double().mean(1).tolist()
    return torch.cat([budget_masks(maps.take([i]), share) for i, share in enumerate(area)])


def measure_scenes(probe: Probe, count: int) -> None:
    """Every method on scenes with two codes and a distractor; nothing where they do not fit the picture."""
    told = probe.settings
    try:
        scenes: Scenes = make_scenes(
            count, told.size, told.seed, symbol=told.symbol, codes=CODES, distractors=DISTRACTORS,
            photos=told.photos,
        )  # fmt: skip
    except InputError as error:
        probe.progress.say(f"no scenes with several codes: {error}")
        return
    ids = [f"scene {i}" for i in range(count)]
    left = probe.left(SCENE, count, told.every_method)
    for regime, units in _unfinished(left):
        for method, maps in probe.explained(regime, scenes.pictures, tuple(units)).items():
            found = scene_scores(maps, scenes.codes, scenes.distractors)
            probe.store.write_unit(units[method], probe.rows(regime, method, found, ids=ids))
    if any(left.values()):
        probe.progress.say(f"{count} scenes with {CODES} codes and {DISTRACTORS} distractor")


def _unfinished(left: Mapping[str, dict[str, Unit]]) -> list[tuple[str, dict[str, Unit]]]:
    return [(regime, units) for regime, units in left.items() if units]


def measure_edits(probe: Probe, count: int) -> None:
    """Every method on codes before and after one finder was removed, moved and swapped."""
    codes = probe.codes(count)
    unedited: dict[tuple[str, str], Maps] = {}
    for kind in EDITS:
        edited = edit_finders(codes, kind, probe.settings.seed)
        if not edited.done.any():
            probe.progress.say(f"no code has a finder that could be edited ({kind})")
            continue
        _drops(probe, codes.pictures, edited, kind)
        names = tuple(f"edit_{what}({kind})" for what in ("leaves", "arrives"))
        left = probe.left(names, count, probe.settings.every_method)
        for regime, units in _unfinished(left):
            new = tuple(method for method in units if (regime, method) not in unedited)
            seen = probe.explained(regime, codes.pictures, new)
            unedited |= {(regime, method): maps for method, maps in seen.items()}
            after = probe.explained(regime, edited.pictures, tuple(units))
            for method, unit in units.items():
                found = edit_scores(unedited[regime, method], after[method], edited, kind)
                probe.store.write_unit(unit, probe.rows(regime, method, found))
        if any(left.values()):
            probe.progress.say(f"{int(edited.done.sum())} codes, one finder edited: {kind}")


def edit_scores(before: Maps, after: Maps, edited: Edited, kind: str) -> PerImage:
    """How much of a map's mass went with the finder."""
    old, new = (torch.from_numpy(mask)[:, None] for mask in (edited.before, edited.after))
    leaves = (masses(before, old) - masses(after, old))[:, 0]
    arrives = (masses(after, new) - masses(before, new))[:, 0]
    device = leaves.device
    undone = Cause("the finder could not be edited so", torch.from_numpy(~edited.done).to(device))
    empty = Cause("one of the maps is empty", (leaves.isnan() | arrives.isnan()) & ~undone.where)
    removed = torch.full_like(undone.where, kind == "remove")
    nowhere = Cause("a finder that is removed arrives nowhere", removed, (f"edit_arrives({kind})",))
    return PerImage(
        {f"edit_leaves({kind})": leaves.float(), f"edit_arrives({kind})": arrives.float()},
        [undone, empty, nowhere],
    )


def _drops(probe: Probe, pictures: np.ndarray, edited: Edited, kind: str) -> None:
    """How far the class's logit falls by the edit, for each regime."""
    name, done = f"edit_drop({kind})", probe.store.done()
    for regime in REGIMES:
        unit = Unit(regime, (0, len(pictures)), (), (name,), probe.seed)
        if unit.hash in done:
            continue
        model = probe.models[regime]
        logits = [all_logits(model, ready(model, lot))[:, CODE] for lot in (pictures, edited.pictures)]
        undone = Cause(
            "the finder could not be edited so", torch.from_numpy(~edited.done).to(logits[0].device)
        )
        found = PerImage({name: logits[0] - logits[1]}, [undone])
        probe.store.write_unit(unit, probe.rows(regime, "", found))
