"""Which metrics a run can compute: for these pictures, this network and this method; where not, why not."""

from __future__ import annotations

from dataclasses import dataclass

from heatproof.errors import HeatproofError
from heatproof.registry import metrics
from heatproof.run.metrics import MetricRequest, in_a_run, read_metrics
from heatproof.run.study import ALL_CLASSES_UP_TO, ResolvedStudy, check_truth


@dataclass(frozen=True)
class Possible:
    """What is known before a metric is chosen.

    Args:
        opened: the study, with its pictures.
        classes: of the network.
        labels: whether the pictures' classes are the network's.
        stored: whether the maps are read, so that no method can be run again.
        function: whether the network is only a function.
    """

    opened: ResolvedStudy
    classes: int
    labels: bool = True
    stored: bool = False
    function: bool = False

    def why_not(self, text: str) -> str:
        """Half a sentence that says why a metric, or a bundle, cannot be computed; "" where it can."""
        source = self.opened.source
        try:
            requests = read_metrics([text])
            if not self.labels and any("labels" in one.entry.needs and one.group for one in requests):
                return "the network has other classes than the pictures"
            check_truth(requests, source, self.opened.targets)
        except HeatproofError as error:
            return _short(str(error))
        found = (self._against(request) for request in requests)
        return next(filter(None, found), "")

    def _against(self, request: MetricRequest) -> str:
        entry, source = request.entry, self.opened.source
        used = {label for sample in source.samples for label in sample.stated}
        if self.stored and entry.reruns:
            return "it runs the method again, which stored maps cannot be"
        if self.function and entry.needs_gradients:
            return "it needs the network's weights or gradients, and this one is a function"
        if entry.compares_checkpoints and len(self.opened.checkpoints) < 2:
            return "it compares checkpoints, and there is one"
        if entry.name == "auc" and len(used) == 1:
            return "all pictures are of one class"
        if request.every_class and self.classes > ALL_CLASSES_UP_TO:
            return f"a run keeps the probabilities of {ALL_CLASSES_UP_TO} classes at most"
        return ""

    def all(self) -> dict[str, str]:
        """Every registered metric that a run may name, and why not."""
        names = [entry.name for entry in metrics.as_registered() if in_a_run(entry.name)]
        return {name: self.why_not(name) for name in names}


def _short(sentence: str) -> str:
    """What is missing, out of the sentence that refuses it.

    >>> _short("metrics: localise needs boxes or masks, but the images have none; leave it out")
    'it needs boxes or masks, but the images have none'
    """
    needed = sentence.partition(" needs ")[2].partition(";")[0]
    return f"it needs {needed}" if needed else sentence.partition(": ")[2] or sentence
