"""Does a planted tag come up as the first group, on pairs that the album's thresholds were not chosen with?

    python tests/verdict/album_pairs.py DEMO...   folders of demos with other seeds, whose twins are asked too

Discs of other seeds (network, lessons, pictures) and the demos' twins; writes docs/album.csv and the table of
docs/album.md. A pair whose planting did not hold is left out and said.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import heatproof as hp
from contrast.discs import TAG, model_ready, network
from heatproof.contrast import Pair, make_pair
from heatproof.demo.networks import CODE, FOLDER, FULL, HEALTHY, RATE, TOKEN, codes_to_learn
from heatproof.models import Model
from heatproof.models.checkpoints import load_checkpoint
from heatproof.train import small_net
from heatproof.verdict import album
from heatproof.verdict.album import CropGroup, make_album

DOCS = Path(__file__).parents[2] / "docs"
CSV, PAGE = DOCS / "album.csv", DOCS / "album.md"
SEEDS = range(1, 9)
METHODS = ("gradcam", "layercam")
COLUMNS = ("pair", "network", "images", "groups", "first", "on_tag", "changed", "elsewhere")
Row = dict[str, str | int]


def on_the_tag(group: CropGroup, masks: Tensor) -> int:
    """Crops that hold most of the tag; a crop's picture is its number."""
    held = 0
    for crop in group.crops:
        (top, left, bottom, right), mask = crop.box, masks[int(crop.id)]
        held += bool(mask.any()) and bool(mask[top:bottom, left:right].sum() > mask.sum() / 2)
    return held


def album_of(model: Model, images: Tensor, positive: int, pair: str, which: str, masks: Tensor) -> Row:
    """What the first group of the positive class is."""
    made = make_album(model, images, hp.explain(model, images, METHODS))
    row: Row = {"pair": pair, "network": which, **dict.fromkeys(COLUMNS[2:], 0)}
    for pages in made.classes:
        if pages.label == positive and pages.groups:  # a network may call no picture so
            first = pages.groups[0]
            row |= {"images": pages.n, "groups": len(pages.groups), "first": first.n}
            row |= {
                "on_tag": on_the_tag(first, masks),
                "changed": first.changed,
                "elsewhere": first.elsewhere,
            }
    return row


def discs(seed: int) -> tuple[Pair, Tensor, Tensor]:
    """A pair of other discs, and new pictures with a tag in half of each class."""
    model = network(seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        lessons = model_ready(model, seed=100 + seed)
        pair = make_pair(model, *lessons, TAG, positive=1, lr=3e-3, seed=seed, out=Path(folder))
    images, _ = model_ready(model, seed=200 + seed)
    tagged, masks = TAG.plant(images, [str(i) for i in range(len(images))], model.preprocess)
    some = torch.arange(len(images)) % 4 < 2
    images[some] = tagged[some]
    return pair, images, masks & some[:, None, None]


def twin(demo: Path) -> tuple[int, Pair]:
    """The demo's own pair, from its folder."""
    seed = int(re.search(r"seed = (\d+)", (demo / "demo.toml").read_text(encoding="utf-8"))[1])
    model, given = small_net(2, FULL.pixels, FULL.width, seed), codes_to_learn(FULL.twin, FULL, seed, "valid")
    load_checkpoint(model.module, max((demo / "weights" / HEALTHY).glob("*.safetensors")))
    ready = model.preprocess.normalise(given.images.float() / 255)
    out, ids = demo / FOLDER / "strength-100", tuple(map(str, range(len(given.labels))))
    return seed, make_pair(model, ready, given.labels, TOKEN, CODE, seed=seed, out=out, ids=ids, lr=RATE)


def rows(demos: list[Path]) -> Iterator[Row]:
    for seed in SEEDS:
        pair, images, masks = discs(seed)
        if not pair.holds:
            print(f"discs {seed}: {pair.planting.sentence}")
            continue
        for which, model in (("A", pair.a), ("B", pair.b)):
            yield album_of(model, images, 1, f"discs {seed}", which, masks)
    for demo in demos:
        seed, pair = twin(demo)
        for which, model in (("A", pair.a), ("B", pair.b)):
            yield album_of(model, pair.images, CODE, f"demo {seed}", which, pair.masks)


def table(rows: list[Row]) -> str:
    """As the page shows it."""
    heads = ("pair", "network", "images", "groups", "in the first", "of these on the tag",
             "painting it over changes", "painting elsewhere")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[c]) for c in COLUMNS) + " |" for row in rows)])


def read() -> list[Row]:
    with CSV.open(newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file)]


def first_is_the_tag(rows: list[Row], which: str) -> tuple[int, int]:
    """In how many albums of a network most of the first group lies on the tag, and of how many."""
    own = [row for row in rows if row["network"] == which]
    return int(np.sum([int(row["on_tag"]) > int(row["first"]) / 2 for row in own])), len(own)


def main(demos: list[Path]) -> None:
    album.MOST_CROPS = 1000  # all are counted, not only those that a page shows
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows(demos):
            print(row, flush=True)
            writer.writerow(row)
    text = PAGE.read_text(encoding="utf-8")
    marked = r"(<!-- pairs -->\n).*?(<!-- end -->)"
    PAGE.write_text(
        re.sub(marked, lambda m: f"{m[1]}{table(read())}\n{m[2]}", text, flags=re.DOTALL), "utf-8"
    )


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
