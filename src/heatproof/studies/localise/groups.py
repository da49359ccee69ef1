"""Classes that belong together, and labels that no person could be sure of.

ImageNet's classes stand in the order of WordNet, so that its subtrees are ranges of numbers; GROUPS names
the large ones, and LIVING the two sides that keak2026budget compares. Other data sets bring a CSV file with
the columns class and group, a row for each class and group it is in.

AMBIGUOUS are ImageNet's classes whose pictures could as well bear another one's label (two kinds of maillot,
sunglass and sunglasses): a network that is called wrong there is not. The thesis leaves wrong labels out by
eye, picture by picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from heatproof.errors import InputError
from heatproof.images import csv
from heatproof.report.tables import Cell, Column, Table
from heatproof.studies.localise.scored import Scored, macro_value
from heatproof.studies.localise.tables import FAITHFULNESS, LOCALISATION, head

IMAGENET = "imagenet"
Span = tuple[int, int]  # first and last class
SUBTREES: dict[str, tuple[Span, ...]] = {
    "fish": ((0, 6), (389, 397)),
    "birds": ((7, 24), (80, 100), (127, 146)),
    "amphibians and reptiles": ((25, 68),),
    "mammals": ((101, 106), (147, 299), (330, 388)),
    "dogs": ((151, 268),),
    "insects, spiders and other invertebrates": ((69, 79), (107, 126), (300, 329)),
    "people": ((981, 983),),
    "plants and fungi": ((984, 998),),
    "food": ((922, 969),),
    "landscapes": ((970, 980),),
    "artefacts": ((398, 921), (999, 999)),
}
LIVING = {
    "living things": ((0, 397), (981, 998)),
    "not living": ((398, 980), (999, 999)),
}
CLASSES = 1000
AMBIGUOUS = (
    (435, 876), (461, 524), (482, 848), (620, 681), (638, 639), (657, 744), (664, 782), (836, 837),
    (987, 998),
)  # fmt: skip


def class_groups(given: str, classes: Sequence[str]) -> dict[str, set[int]]:
    """Group -> classes, from a CSV file or ImageNet's own; a sentence where a class is not known."""
    if given == IMAGENET:
        if len(classes) != CLASSES:
            raise InputError(
                f"groups = {IMAGENET!r} is for its 1,000 classes; this network has {len(classes)}"
            )
        return {
            name: {k for low, high in spans for k in range(low, high + 1)}
            for name, spans in (LIVING | SUBTREES).items()
        }
    found: dict[str, set[int]] = {}
    for line, row in csv.read_rows(Path(given), "class", "group"):
        where = f"{Path(given).name}, line {line}"
        found.setdefault(row["group"], set()).add(class_number(row["class"], classes, where))
    if not found:
        raise InputError(f"{given} names no group")
    return found


def class_number(said: str, classes: Sequence[str], where: str) -> int:
    """A class by its number or its name."""
    named = [int(said)] if said.isdecimal() else [k for k, name in enumerate(classes) if name == said]
    if len(named) > 1:
        raise InputError(f"{where}: {said!r} is the name of {len(named)} classes; write the number ({named})")
    if not named or named[0] >= len(classes):
        raise InputError(f"{where}: there is no class {said!r} among the network's {len(classes)}")
    return named[0]


def excluded(given: str, classes: Sequence[str]) -> tuple[dict[int, str], set[str]]:
    """Classes, each with the reason, and pictures that are left out.

    given: "ambiguous" for ImageNet's, or a text file with a class or a picture in each line.
    """
    if given == "ambiguous":
        if len(classes) != CLASSES:
            raise InputError(f"the ambiguous labels are ImageNet's; this network has {len(classes)} classes")
        return {
            one: f"its label is ambiguous: {classes[one]} ({one}) against {classes[other]} ({other})"
            for pair in AMBIGUOUS for one, other in (pair, pair[::-1])
        }, set()  # fmt: skip
    path = Path(given)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {given}, the list of what is left out: {error}") from error
    named = [line for line in lines if line and not line.startswith("#")]
    labels = {class_number(line, classes, given) for line in named if line.isdecimal() or line in classes}
    pictures = {line for line in named if not line.isdecimal() and line not in classes}
    return dict.fromkeys(labels, f"its class is listed in {path.name}"), pictures


def group_table(scored: Scored, groups: Mapping[str, Iterable[int]]) -> Table | None:
    """A row per group and method: means over the group's classes; None where no group has a picture."""
    metrics = (*LOCALISATION, *FAITHFULNESS)
    rows: list[tuple[Cell, ...]] = []
    for group, labels in groups.items():
        recall = {k: v for k, v in scored.recall().items() if k in set(labels)}
        images = sum(map(len, recall.values()))
        for method in scored.methods if images else ():
            columns = (scored.by_class(scored.column(method, metric)) for metric in metrics)
            means = [macro_value({k: v for k, v in c.items() if k in recall}, scored.seed) for c in columns]
            hits = macro_value(recall, scored.seed).value
            rows.append((group, len(recall), images, method, hits, *means))
    heads = (Column("Group"), Column("classes"), Column("images"), Column("Method"), Column("Recall", ".3f"))
    note = "Means over the classes of a group with 95 % bootstrap intervals over its images."
    found = (*heads, *map(head, metrics))
    return Table("groups", "By group of classes", found, tuple(rows), note, marked=False) if rows else None
