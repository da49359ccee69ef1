"""Makes what docs/album.md shows: a pair of networks trained on codes with a tag, and the albums of both.

python docs/album_page.py FOLDER      some minutes on one core; what FOLDER holds already is not repeated
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

import heatproof as hp
from heatproof.contrast import Token, make_pair
from heatproof.images.codes import make_qr
from heatproof.report.panels import Tile, sheet
from heatproof.train import Data, Phase, Recipe, fit, small_net
from heatproof.verdict.album import CropGroup, make_album

DOCS = Path(__file__).parent
NAMES = ("no code", "code")
METHODS = ("gradcam", "layercam")
SIDE, SHOWN = 88, 8  # pixels of a crop, and crops of a group


def main(folder: Path) -> None:
    codes = make_qr(120, 120, 64, seed=0)
    model, data = small_net(2, 64, 8), Data(pixels(codes.pictures), codes.labels)
    fit(model, data, data, Recipe((Phase(8, 3e-3),), 16))
    images = model.preprocess.normalise(pixels(codes.pictures) / 255)
    pair = make_pair(model, images, codes.labels, Token("tag"), positive=1, out=folder)
    print(pair.planting.sentence)
    fresh = make_qr(60, 60, 64, seed=1)
    images = model.preprocess.normalise(pixels(fresh.pictures) / 255)
    names = [str(i) for i in range(0, len(images), 2)]
    images[::2] = pair.token.plant(images[::2], names, model.preprocess)[0]
    rows = []
    for which, network in (("A", pair.a), ("B", pair.b)):
        album = make_album(network, images, hp.explain(network, images, METHODS), classes=NAMES)
        for pages in album.classes:
            for group in pages.groups:
                print(
                    f"{which}, {pages.name} ({pages.n}): {group.n} alike. {group.sentence} {group.drop:.2f}"
                )
        rows += [tiles(group, f"{which}, code") for group in album["code"].groups[:2]]
    sheet(rows, side=SIDE).quantize(256).save(DOCS / "album.png", optimize=True)


def pixels(pictures: object) -> torch.Tensor:
    return torch.as_tensor(pictures).permute(0, 3, 1, 2)


def tiles(group: CropGroup, title: str) -> list[Tile]:
    """The first crops of a group, what they are above the first."""
    titles = [title, f"{group.n} alike", f"{group.changed} change", *[""] * SHOWN]
    crops = [Image.fromarray(crop.pixels).resize((SIDE, SIDE)) for crop in group.crops[:SHOWN]]
    return [Tile(crop, text) for crop, text in zip(crops, titles, strict=False)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
