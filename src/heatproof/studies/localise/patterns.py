"""What the flagged pictures of a class share: a shortcut is a habit, not one picture.

For each class with at least FEWEST pictures that are faithful but off-object, the crops under the strongest
place of those maps are grouped by what they look like to the network, as the evidence album does it
(verdict/album.py), and painted over. A group of several says what the network reads there in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from heatproof.disk import valid_unicode
from heatproof.report.panels import Tile, panel
from heatproof.studies.localise.panels import Studio
from heatproof.studies.localise.scored import OFF, Flag
from heatproof.verdict.album import CROP, CropGroup, bind
from heatproof.verdict.crops import find_crops

FEWEST = 3  # pictures, of a class that is looked at and of a group that is shown
MOST = 40  # pictures of a class
SHOWN = 8  # crops of a group


@dataclass(frozen=True)
class Pattern:
    """What several flagged pictures of a class share."""

    class_name: str
    method: str
    flagged: int
    group: CropGroup
    picture: Path

    @property
    def sentence(self) -> str:
        return (
            f"**{self.class_name}** ({self.method}): {self.group.n} of {self.flagged} flagged pictures share "
            f"what these crops show. {self.group.sentence}"
        )


def find_patterns(studio: Studio, flags: Sequence[Flag]) -> list[Pattern]:
    """The largest group of each class, the largest first."""
    scored, found = studio.scored, []
    off = [flag for flag in flags if flag.kind == OFF]
    for label in sorted({scored.explained[flag.image] for flag in off}):
        mine = [flag for flag in off if scored.explained[flag.image] == label]
        method = Counter(flag.method for flag in mine).most_common(1)[0][0]
        images = sorted({flag.image for flag in mine if flag.method == method})
        if len(images) >= FEWEST:
            found += _pattern(studio, label, method, images)
    return sorted(found, key=lambda pattern: -pattern.group.n)


def _pattern(studio: Studio, label: int, method: str, images: Sequence[str]) -> list[Pattern]:
    name = studio.scored.class_name(label)
    batches = [batch for batch, _ in studio.lots([(image, "") for image in images[:MOST]])]
    ids = [valid_unicode(one) for batch in batches for one in batch.ids]
    maps = studio.maps.read(studio.scored.checkpoint, method, ids)
    shown = torch.cat([batch.images for batch in batches])
    crops = find_crops(studio.model, label, shown, [maps], CROP, studio.settings.layer)
    (pages,) = bind({label: crops}, studio.scored.classes)
    group = pages.groups[0] if pages.groups else None
    if group is None or group.n < FEWEST:
        return []
    tiles = [Tile(Image.fromarray(crop.pixels), f"{i + 1}") for i, crop in enumerate(group.crops[:SHOWN])]
    drawn = panel(tiles, columns=SHOWN, heading=f"{name}: under the strongest place of {method}")
    return [Pattern(name, method, len(images), group, studio.save(drawn, f"{label}", "shared"))]
