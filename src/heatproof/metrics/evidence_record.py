"""Results of the interventions on a network's evidence: numbers per donor, and images. Imports no torch."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from heatproof.disk import valid_unicode
from heatproof.metrics.results import PerClass

SCHEMA, FOLDER = 1, "evidence"  # FOLDER: in a run folder, a file for each checkpoint
Numbers = tuple[float | None, ...]  # by donor; None where undefined
LARGEST = 256  # pixels of the longer side of a stored image
SUMMARY_CROPS = 3  # in verdict.json
HALF = 0.5  # share of recipients that a patch must turn
BORDER = 0.1  # share of a patch in the region from which on it is partly on the object
PART_OF_OBJECT = 0.25  # of its area: a larger patch is the object itself
PARTNERS = 3  # near-identical patches in other images, from which on a patch recurs


@dataclass(frozen=True, eq=False)
class Example:
    """A recipient before and after an intervention, with the network's answers."""

    donor: str
    recipient: str
    before: np.ndarray  # "h w 3" uint8
    after: np.ndarray
    answer_before: str
    answer_after: str


@dataclass(frozen=True, eq=False)
class EvidenceItem:
    """One thing that the network uses for a class: patches that look alike, or a property of whole images."""

    kind: str  # "patch" or "property"
    name: str  # of the property
    label: int
    donors: int  # images of the class that contain it
    of: int  # images of the class that were tested
    recipients: int  # inputs with the donors' evidence,
    turned: int  # of them, those whose answer becomes the class,
    control_recipients: int  # and the same for the controls
    control_turned: int
    recurring: bool = False  # whether near-identical patches stand in several images
    on_object: float | None = None  # mean share of the patches in the region, or of its parts in them
    painted: int = 0  # donors whose patch was removed,
    changed: int = 0  # of them, those whose answer then changes,
    changed_elsewhere: int = 0  # and those whose answer changes if the control window is removed
    crops: tuple[np.ndarray, ...] = ()
    examples: tuple[Example, ...] = ()
    control: Example | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers with the first crops, for verdict.json."""
        import msgspec  # a monitor without a run folder does not need it

        record: dict[str, Any] = msgspec.to_builtins(self, enc_hook=png)
        first_crops = record["crops"][:SUMMARY_CROPS]
        return {k: v for k, v in record.items() if k not in ("examples", "control")} | {"crops": first_crops}

    def sentence(self, class_name: str) -> str:
        """What was found, in one sentence.

        >>> item = EvidenceItem("patch", "", 0, 12, 40, 96, 81, 96, 3, on_object=0.0)
        >>> item.sentence("dog").partition(";")[0]
        "12 of 40 'dog' images contain patches such as these off the object"
        >>> " partly on the object; " in replace(item, on_object=0.4).sentence("dog")
        True
        """
        if self.kind == "property":
            return (
                f"{self.name}: transferred from '{class_name}' images to {self.recipients} other images it "
                f"turns {self.turned}; transferred from images of their own class it turns "
                f"{self.control_turned} of {self.control_recipients}"
            )
        place = ""
        if (share := self.on_object) is not None:
            where = "off" if share < BORDER else "partly on" if share < HALF else "on"
            place = f" {where} the object"
        what = "this patch" if self.recurring else "patches such as these"
        return (
            f"{self.donors} of {self.of} '{class_name}' images contain {what}{place}; pasted into "
            f"{self.recipients} other images it turns {self.turned}; control patches turn "
            f"{self.control_turned} of {self.control_recipients}"
        )


@dataclass(frozen=True)
class PatchTest:
    """Transplants of one window per donor: its strongest one, and a control window of the same image.

    Shares are over the donor's recipients; None where the donor has no window, and for controls where nothing
    turns. Gains are log-odds.
    """

    side: int
    corners: tuple[tuple[int, int], ...]  # top and left; (-1, -1) without a window
    turned: Numbers
    top5: Numbers
    gain: Numbers
    control_turned: Numbers
    control_top5: Numbers
    control_gain: Numbers
    feathered: Numbers  # turned with feathered edges, of half of the recipients, if half or more turn
    on_object: Numbers
    partners: tuple[int, ...] = ()  # near-identical patches among the donors of the class that turn half
    group: tuple[int, ...] = ()  # number of the group; -1: none


@dataclass(frozen=True)
class RemovalTest:
    """Answers after the object is removed: by donor, and by class on images of other classes."""

    kept: Numbers  # by donor: 1 if the answer is kept; None without a region
    others: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # class -> images, those answered so


@dataclass(frozen=True)
class ExchangeTest:
    """Position of a donor's map relative to the maps of other images laid over it; None where undefined."""

    pointing: Numbers
    inside: Numbers


@dataclass(frozen=True)
class PropertyTest:
    """Transfers of one whole-image property: one entry per pair of donor and recipient."""

    name: str
    label: tuple[int, ...]  # the donor's class
    donor: tuple[int, ...]  # image
    recipient: tuple[int, ...]  # image
    turned: tuple[bool, ...]
    control: tuple[bool, ...]  # with a donor of the recipient's own class


@dataclass(frozen=True, eq=False)
class EvidenceRecord:
    """All interventions on one checkpoint. A donor is a correctly answered image with its class."""

    ids: tuple[str, ...]  # of all images
    classes: tuple[str, ...]  # names by number; may be empty
    methods: tuple[str, ...]  # whose maps choose the windows
    image: tuple[int, ...]  # of each donor
    label: tuple[int, ...]
    has_regions: bool
    off_object: tuple[PatchTest, ...]  # by side; windows off the object, of all windows without regions
    anywhere: tuple[PatchTest, ...]  # by side; all windows
    removal: RemovalTest | None
    exchange: ExchangeTest | None
    properties: tuple[PropertyTest, ...]
    object_share: Numbers = ()  # by donor: share of the image that its region covers
    window_shares: tuple[float, ...] = ()  # by side: share of the image that a window covers
    items: tuple[EvidenceItem, ...] = ()
    inputs: int = 0  # that the network was run on
    answered: int = 0  # images that the network answers correctly
    checkpoint: str = ""
    schema: int = SCHEMA

    @property
    def scores(self) -> PerClass:
        """The transplant effect and the other tests, over all donors and by class, for the rows of a run."""
        kinds = sorted(set(self.label))
        return replace(self._scores(kinds), classes={c: self._scores([c]) for c in kinds})

    def recurring(self) -> np.ndarray:
        """By donor: whether its patch turns half of its recipients and has near-identical partners.

        A patch that is not small beside the annotated object is the object, which may recur.
        """
        recurs = np.zeros(len(self.label), bool)
        shares = np.nan_to_num(np.array(self.object_share or [None] * len(self.label), float), nan=np.inf)
        for test, window in zip(self.anywhere, self.window_shares, strict=True):
            turns = np.nan_to_num(np.array(test.turned, float)) >= HALF
            on_object = np.nan_to_num(np.array(test.on_object, float)) >= HALF
            is_object = on_object & (window >= PART_OF_OBJECT * shares)
            recurs |= turns & (np.array(test.partners) >= PARTNERS) & ~is_object
        return recurs

    def _scores(self, labels: Sequence[int]) -> PerClass:
        own = np.isin(np.array(self.label), labels)
        patches = self.off_object[-1]
        turned, control = (np.array(x, float)[own] for x in (patches.turned, patches.control_turned))
        known = np.isfinite(turned)
        parts = {"recurring": float(self.recurring()[own].mean()), "n": float(own.sum())}
        effects = []
        for test in self.properties:
            chosen = np.isin(np.array(test.label), labels)
            if chosen.any():
                effects.append(float(np.subtract(test.turned, test.control, dtype=float)[chosen].mean()))
        parts["property"] = max(effects, default=math.nan)
        parts["removal"] = parts["exchange"] = math.nan
        if self.removal is not None:
            kept = np.array(self.removal.kept, float)[own]
            others = [self.removal.others.get(c, (0, 0)) for c in labels]
            if np.isfinite(kept).any() and sum(n for n, _ in others):
                parts["removal"] = float(np.nanmean(kept)) - sum(k for _, k in others) / sum(
                    n for n, _ in others
                )
        if self.exchange is not None:
            both = np.array([self.exchange.pointing, self.exchange.inside], float).mean(0)[own]
            parts["exchange"] = float(np.nanmean(both)) if np.isfinite(both).any() else math.nan
        value = float(((turned >= HALF) * 1.0 - (control >= HALF))[known].mean()) if known.any() else math.nan
        reason = "" if known.any() else "no donor has a map with a window off the object"
        return PerClass(value, int(own.sum()), reason=reason, parts=parts)

    def class_name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else f"class {label}"

    def as_json(self) -> dict[str, Any]:
        """A dict that JSON can hold; images are PNG files in base64."""
        import msgspec

        return dict(msgspec.to_builtins(self, enc_hook=png))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EvidenceRecord:
        """The record of `as_json`; raises ValueError (msgspec.ValidationError) if it is malformed."""
        import msgspec

        return msgspec.convert(record, cls, dec_hook=_from_png, strict=False)


def evidence_file(folder: Path, checkpoint: str, metric: str = FOLDER) -> Path:
    """The file of a checkpoint's record in a run folder; metric: with its options, as in the study.

    >>> evidence_file(Path("run"), "final", "evidence(donors=9)").name
    'final%2Fevidence%28donors%3D9%29.json'
    """
    name = checkpoint if metric == FOLDER else f"{checkpoint}/{metric}"
    return folder / FOLDER / f"{quote(valid_unicode(name), safe='')}.json"


def png(image: np.ndarray) -> str:
    """A small image as a PNG file in base64."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _from_png(_kind: type, content: Any) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(content, validate=True)), formats=("PNG",)) as image:
        if max(image.size) > LARGEST:
            raise ValueError("a stored image is too large")
        return np.asarray(image.convert("RGB"))
