"""Metrics as a study names them: registered names with options, families, and what a run can give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heatproof.errors import InputError, UnknownNameError
from heatproof.registry import Metric, check_options, metrics, parse_call

FAMILIES = {
    "localise": ("mask_iou", "box_iou", "inside", "pointing", "reachable", "filled"),
    "structure": ("fmr", "tmr", "bl", "auc_f", "auc_t", "auc_bg", "dts", "structure_score"),
    "insertion_deletion": ("insertion", "deletion"),
}
ACROSS = ("cose",)  # about several checkpoints
OFFERED = frozenset({"maps", "labels", "probabilities", "boxes", "masks", "model", "images"})
STORED = frozenset({"maps", "labels", "probabilities"})  # of all images of a checkpoint
OWN_CLASS = ("accuracy", "recall", "cscore")  # read no probability but those of the true and predicted class
OTHERWISE = {  # metrics whose inputs a run does not have
    "ssim": "it compares two lots of maps; method_agreement does that for the methods of a run",
    "occlusion_drop": "it occludes one named part; call hp.metrics for it",
}
RESERVED = ("progress", "batch_size", "layer", "anchor", "boxes", "masks", "targets", "seed", "logits",
            "same_images", "changed_images")  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One metric as it is asked for; `text` is how rows and units name it."""

    text: str
    entry: Metric
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def group(self) -> bool:
        """Whether it is about all images of a checkpoint, or of its classes."""
        return self.entry.level != "image"

    @property
    def every_class(self) -> bool:
        """Whether it reads the stored probabilities of all classes."""
        values = dict(self.options).values()
        reads = self.group and "probabilities" in self.entry.needs and self.entry.name not in OWN_CLASS
        return reads or "adaptive" in values or "calibrated" in values

    @property
    def across(self) -> bool:
        return self.entry.name in ACROSS

    @property
    def per_method(self) -> bool:
        """Whether there is a value for each method, not one for the classifier."""
        return not self.group or "maps" in self.entry.needs

    def named(self, part: str) -> str:
        """The name of a further number of the same metric.

        >>> read_metrics(["randomisation(depths=3)"])[0].named("ssim")
        'randomisation_ssim(depths=3)'
        """
        return f"{self.entry.name}_{part}{self.text[len(self.entry.name) :]}"


def read_metrics(texts: Sequence[str]) -> list[Request]:
    """Requests in the order given, families taken apart, aliases replaced by the registered name."""
    found: dict[str, Request] = {}
    for text in texts:
        name, options = parse_call(text)
        try:
            entries = [metrics.get(each) for each in FAMILIES.get(name, (name,))]
        except UnknownNameError:
            raise UnknownNameError("metric", name, [*metrics.names(), *FAMILIES]) from None
        for entry in entries:
            _refuse(entry, options)
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            request = Request(
                f"{entry.name}({given})" if given else entry.name, entry, tuple(options.items())
            )
            if request.text in found:
                raise InputError(f"metrics name {request.text} twice; leave one out")
            found[request.text] = request
    return list(found.values())


def _refuse(entry: Metric, options: dict[str, Any]) -> None:
    check_options(entry, options)
    for option in options:
        if option in RESERVED:
            raise InputError(f"{entry.name}: {option} is set by the run itself; leave it out")
    if entry.name in OTHERWISE:
        raise InputError(f"a run cannot compute {entry.name}: {OTHERWISE[entry.name]}")
    if entry.name in ACROSS:  # the run makes its pairs
        return
    if missing := sorted(entry.needs - OFFERED):
        raise InputError(
            f"a run cannot compute {entry.name}, which needs {', '.join(missing)}; call hp.metrics for it"
        )
    if entry.level != "image" and (missing := sorted(entry.needs - STORED)):
        raise InputError(
            f"a run cannot compute {entry.name}: at level {entry.level!r} it has maps, labels and "
            f"probabilities, but no {', '.join(missing)}; register the metric with level='image'"
        )
