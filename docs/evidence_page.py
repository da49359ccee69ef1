"""Makes what docs/evidence.md shows: the table of what the demo's two networks use, and evidence.png.

heatproof demo --out DEMO
python docs/evidence_page.py DEMO     rewrites the marked part of evidence.md, and the picture
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from PIL import Image

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
    rows = ["| network | what was found | painting it over changes the answer in | painting elsewhere in |"]
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


def main(folder: str) -> None:
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
