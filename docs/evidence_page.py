"""Makes what docs/evidence.md shows: the table of what the demo's two networks use, and evidence.png.

heatproof demo --out DEMO
python docs/evidence_page.py DEMO     rewrites the marked part of evidence.md, and the picture
python docs/evidence_page.py data     draws data-check.png
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import heatproof as hp
from heatproof.demo.networks import CLASSES, CODE, HEALTHY, Sizes, Twin, cheating_twin, gather_weights
from heatproof.demo.story import NETWORKS
from heatproof.metrics.evidence_record import EvidenceItem
from heatproof.report.panels import Tile, panel
from heatproof.run.worker import fixed_threads

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "evidence.md", DOCS / "evidence.png"
ITEMS, CROPS = 2, 4  # of each network; of each item, which recurs in at least four images


def read_twin(folder: Path) -> Twin:
    """The cheating twin of a finished demo."""
    stored = tomllib.loads((folder / "demo.toml").read_text(encoding="utf-8"))
    seed = stored.pop("seed")
    sizes = Sizes(**stored | {"keep": tuple(stored["keep"])})
    with fixed_threads(1):
        return cheating_twin(
            folder, sizes, seed, gather_weights(folder, HEALTHY, sizes)[-1], lambda which, at: None
        )


def found(twin: Twin) -> dict[str, list[EvidenceItem]]:
    """What recurs in the codes of each network, first off the code."""
    return {
        NETWORKS[name]: [item for item in record.items if item.label == CODE and item.recurring][:ITEMS]
        for name, record in twin.records.items()
    }


def table(items: dict[str, list[EvidenceItem]]) -> str:
    rows = ["| network | what was found | removing it changes the answer in | removing a control window in |"]
    rows.append("|---|---|---|---|")
    for network, own in items.items():
        for item in own:
            changed = f"{item.changed} of {item.painted} | {item.changed_elsewhere} of {item.painted}"
            rows.append(f"| {network} | {item.sentence(CLASSES[item.label])} | {changed} |")
    return "\n".join(rows)


def picture(items: dict[str, list[EvidenceItem]]) -> Image.Image:
    """A row per item: crops of donors, a recipient before and after, the control before and after."""
    tiles = []
    for network, own in items.items():
        for item in own:
            crops = [Image.fromarray(crop) for crop in item.crops[:CROPS]]
            tiles += [Tile(crop, network if k == 0 else "") for k, crop in enumerate(crops)]
            pairs = [(item.examples[0], "recipient"), (item.control or item.examples[0], "control")]
            for example, name in pairs:
                tiles.append(Tile(Image.fromarray(example.before), name, example.answer_before))
                tiles.append(Tile(Image.fromarray(example.after), "after", example.answer_after))
    return panel(tiles, columns=CROPS + 4)


def data_picture() -> Image.Image:
    """Drawn images of two classes, one of which has a yellow tint and a dark frame, with their result."""
    random, images = np.random.default_rng(0), []
    for i in range(80):
        colour = random.integers(120, 180) + random.integers(-8, 8, 3)
        image = Image.fromarray((colour + random.normal(0, 12, (96, 96, 3))).clip(0, 255).astype(np.uint8))
        (x, y), radius = random.integers(36, 60, 2).tolist(), int(random.integers(12, 20))
        pen, box = ImageDraw.Draw(image), (x - radius, y - radius, x + radius, y + radius)
        (pen.rectangle if i % 2 else pen.ellipse)(box, fill=tuple(random.integers(0, 255, 3).tolist()))
        if i % 2:
            image = Image.fromarray((np.asarray(image) * [1, 1, 0.8]).astype(np.uint8))
            ImageDraw.Draw(image).rectangle((0, 0, 95, 95), outline=(40, 40, 40), width=4)
        images.append(image)
    result = hp.check_data(images, np.arange(80) % 2, classes=("disc", "square"))
    tiles = []
    for score in [score for score in result.named if score.name in ("frame", "tint")]:
        for examples, note in ((score.typical[:3], score.class_name), (score.others[:3], "other class")):
            title = f"{score.name}: {score.accuracy:.2f} ({score.control:.2f})"
            tiles += [Tile(Image.fromarray(each), title, note) for each in examples]
    return panel(tiles, columns=6)


def main(folder: str) -> None:
    if folder == "data":
        data_picture().quantize(64).save(DOCS / "data-check.png", optimize=True)
        return
    items = found(read_twin(Path(folder)))
    text, content = PAGE.read_text(encoding="utf-8"), table(items)
    pattern = r"(<!-- found -->\n).*?(<!-- end -->)"
    PAGE.write_text(
        re.sub(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL),
        encoding="utf-8",
    )
    picture(items).quantize(256).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
