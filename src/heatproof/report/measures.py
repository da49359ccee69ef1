"""What the metric of a row means: its registered metric, its name in plain words, which way is better.

A row's metric is a registered name, perhaps with options ("insertion(steps=50)"), or a part of one
("randomisation_ssim", "cscore_low", "insertion_at_40"). Names nobody registered are shown as they are,
without a direction: nothing is then called best.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass
from functools import lru_cache

from heatproof.errors import InputError, UnknownNameError
from heatproof.registry import Metric, metrics, parse_call

PLAIN = {
    "cscore": "C-Score: alike within a class",
    "fmr": "mass on the finder patterns",
    "tmr": "mass on the timing patterns",
    "bl": "leakage outside the code",
    "auc_f": "coverage of the finder patterns",
    "auc_t": "coverage of the timing patterns",
    "auc_bg": "coverage of the background",
    "dts": "distance to the structure",
    "structure_score": "structure score",
    "mask_iou": "overlap with the object",
    "box_iou": "overlap of boxes",
    "inside": "share inside the object",
    "pointing": "peak on the object",
    "filled": "budget filled with zeros",
    "reachable": "best overlap within reach",
    "insertion": "insertion: evidence shown first",
    "deletion": "deletion: evidence removed first",
    "randomisation_ssim": "unchanged by random weights (SSIM)",
    "randomisation_spearman": "unchanged by random weights (ranks)",
    "fragility_ssim": "stable under noise (SSIM)",
    "fragility_spearman": "stable under noise (ranks)",
    "input_shift_ssim": "stable under a constant shift (SSIM)",
    "input_shift_spearman": "stable under a constant shift (ranks)",
    "consistency": "alike where the answer stays",
    "sensitivity": "different where the answer changes",
    "cose": "COSE: both together",
    "degenerate": "blank maps",
    "ms_per_image": "milliseconds per image",
    "accuracy": "accuracy",
    "auc": "AUC",
    "recall": "recall",
}
FAMILIES = {  # by the file that computes them, in the order of the table
    "": "Maps",
    "structure": "Structure",
    "localise": "Localisation",
    "faithfulness": "Faithfulness",
    "cscore": "Consistency",
    "cose": "Consistency and sensitivity",
    "sanity": "Sanity",
    "robustness": "Robustness",
    "occlusion": "Causes",
    "agreement": "Agreement",
    "classifier": "Classifier",
}
OTHER = "Other"
EXTRAS = {"degenerate": False, "ms_per_image": False}  # rows of no registered metric; less is better
BESIDE = re.compile(
    r"_(n|low|high|degenerate|at_\d+)$"
)  # parts that stand beside their metric, not for themselves
# A map that ignores the network is perfectly stable or perfectly alike, so floors say nothing about these.
WITHOUT_FLOOR = ("sanity", "cscore", "cose", "robustness", "")


@dataclass(frozen=True)
class Measure:
    """One metric as rows name it."""

    name: str  # with its options, as in the rows
    base: str  # without them
    entry: Metric | None  # None where nobody registered it
    higher_is_better: bool | None
    family: str
    file: str  # of the registered function, without its path; "" where there is none

    @property
    def plain(self) -> str:
        return PLAIN.get(self.base, self.base.replace("_", " "))

    @property
    def short(self) -> str:
        """For the middle of a sentence."""
        return self.plain.partition(":")[0]

    @property
    def options(self) -> str:
        return self.name.partition("(")[2].removesuffix(")")

    @property
    def bounds(self) -> tuple[float, float]:
        if self.base == "degenerate":
            return 0.0, 1.0
        return self.entry.bounds if self.entry else (-math.inf, math.inf)

    @property
    def arrow(self) -> str:
        return {True: "↑", False: "↓", None: ""}[self.higher_is_better]

    @property
    def direction(self) -> str:
        return {True: "higher is better", False: "lower is better", None: "no better direction"}[
            self.higher_is_better
        ]

    @property
    def has_floor(self) -> bool:
        """Whether a method that reads the network ought to score better than one that does not."""
        judged = self.higher_is_better is not None and self.base not in ("filled", "ms_per_image")
        return judged and self.file not in WITHOUT_FLOOR

    @property
    def floors(self) -> tuple[str, ...]:
        """Methods that know nothing of the network; the picture's middle only where objects are found."""
        return ("random", "edges", "centre") if self.file == "localise" else ("random", "edges")


@lru_cache(maxsize=4096)
def measure(name: str) -> Measure:
    """What a row's metric means.

    >>> found = measure("randomisation_ssim(depths=3)")
    >>> found.base, found.entry.name, found.arrow, found.options
    ('randomisation_ssim', 'randomisation', '↓', 'depths=3')
    """
    try:
        base, _ = parse_call(name)
    except InputError:
        base = name
    if base in EXTRAS:
        return Measure(name, base, None, EXTRAS[base], FAMILIES[""], "")
    entry = _entry(base)
    if entry is None:
        return Measure(name, base, None, None, OTHER, "")
    file = (inspect.getmodule(inspect.unwrap(entry.function)) or inspect).__name__.rpartition(".")[2]
    return Measure(name, base, entry, entry.higher_is_better, FAMILIES.get(file, OTHER), file)


def _entry(base: str) -> Metric | None:
    """The registered metric of this name, or the one it is a part of."""
    parts = base.split("_")
    for end in range(len(parts), 0, -1):
        try:
            return metrics.get("_".join(parts[:end]))
        except UnknownNameError:
            continue
    return None


def stands_beside(name: str) -> bool:
    """Whether a row only completes another metric's: its count, its interval, a point of its curve.

    >>> [stands_beside(name) for name in ("cscore_low", "insertion_at_40(steps=20)", "cscore", "my_n")]
    [True, True, False, False]
    """
    base = name.partition("(")[0]
    return bool(BESIDE.search(base)) and measure(name).entry is not None


def part(name: str, suffix: str) -> str:
    """The name of a metric's further number, where its options stand last.

    >>> part("cscore(alpha=1)", "low")
    'cscore_low(alpha=1)'
    """
    base, bracket, rest = name.partition("(")
    return f"{base}_{suffix}{bracket}{rest}"


def in_order(names: list[str]) -> list[Measure]:
    """As the table shows them: by family, registered ones in the order of the words above."""
    families, words = [*FAMILIES.values(), OTHER], list(PLAIN)
    found = [measure(name) for name in names]
    place = {word: i for i, word in enumerate(words)}
    return sorted(found, key=lambda m: (families.index(m.family), place.get(m.base, len(words)), m.name))
