"""Methods and networks from elsewhere in a run: where a study's files lie, and what cannot be done with them.

Maps that are stored cannot be made again, so a metric that runs methods again is NaN for them, and says why.
A network that is only a function has neither weights nor gradients, so what needs them is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from heatproof.errors import InputError
from heatproof.explain.api import check_insides, is_stored, read_methods
from heatproof.explain.providers import is_path, provided
from heatproof.explain.providers.files import Stored
from heatproof.explain.providers.function import FromFile
from heatproof.images import Source
from heatproof.images.findings import entry_id, finding_name
from heatproof.metrics.kit import Cause, PerImage
from heatproof.models import Model
from heatproof.models.function import function_in, is_function
from heatproof.registry import check_volumes, explainers, parse_call
from heatproof.run.metrics import MetricRequest
from heatproof.run.provenance import code_hashes
from heatproof.types import Maps

READ = "the method's maps are read from files, and this metric runs the method again"


def lend_methods(methods: Sequence[str], folder: Path, order: Callable[[], Sequence[str]]) -> None:
    """Know FILE.py:FUNCTION and files:PATH of a study, which are relative to its folder."""
    for name in (parse_call(text)[0] for text in methods):
        if is_path(name):
            explainers.lend(provided(name, folder, order))


def map_names(source: Source, is_multilabel: bool) -> list[str]:
    """What maps of labels are called, in the source's order: as pictures, or as each of their findings."""
    if not is_multilabel:
        return [sample.id for sample in source.samples]
    return [
        entry_id(sample.id, finding_name(source.classes, finding))
        for sample in source.samples
        for finding in sample.stated
    ]


def refuse_methods(
    methods: Sequence[str], model: Model, source: Source, is_multilabel: bool, targets: str
) -> None:
    """Refuse files that are not there or do not fit, and what looks inside a network that is a function."""
    calls = read_methods(methods)
    check_insides(model, calls)
    for call in calls:
        if len(model.preprocess.size) > 2:
            check_volumes(call.entry)
        if isinstance(call.entry, FromFile):
            with function_in(call.entry.path, call.entry.name.rpartition(":")[2]):
                continue
        if isinstance(call.entry, Stored):
            if is_multilabel and targets != "label":
                raise InputError(
                    f"{call.text} holds maps of findings that are known, not of those a network will say; "
                    "set run.targets = 'label'"
                )
            call.entry.check(map_names(source, is_multilabel), model.preprocess.size)


def refuse_metrics(requests: Sequence[MetricRequest], model: Model) -> None:
    """Refuse what needs weights or gradients where there are none, or pictures where there are volumes."""
    if len(model.preprocess.size) > 2:
        for request in requests:
            check_volumes(request.entry)
    if is_function(model.module) and (lost := [r.text for r in requests if r.entry.needs_gradients]):
        raise InputError(
            f"{lost[0]} needs the network's weights or gradients, and {model.name} is only a function; "
            "leave it out"
        )


def method_hashes(methods: Sequence[str], folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Of what lies behind the methods that a study brings: maps, or code with all that it imports."""
    found = {}
    for call in read_methods(methods):
        if isinstance(call.entry, Stored):
            found[call.text] = call.entry.hash(names)
        elif isinstance(call.entry, FromFile):
            code = json.dumps(code_hashes(call.entry.name, folder), sort_keys=True)
            found[call.text] = hashlib.sha256(code.encode()).hexdigest()[:16]
    return found


def runnable(request: MetricRequest, methods: Sequence[str]) -> list[str]:
    """The methods that a metric can be computed for."""
    return [m for m in methods if not (request.entry.reruns and is_stored(m))]


def not_runnable(request: MetricRequest, maps: Maps) -> PerImage:
    """What a metric says that would have to run a stored method again."""
    parts = tuple(request.entry.parts) or (request.entry.name,)
    nothing = torch.full((len(maps),), torch.nan)
    return PerImage(dict.fromkeys(parts, nothing), [Cause(READ, torch.ones(len(maps), dtype=torch.bool))])


def in_order(
    found: Mapping[str, PerImage], request: MetricRequest, maps: Mapping[str, Maps]
) -> dict[str, PerImage]:
    """What was found, and beside it the methods that nothing was found for."""
    return {method: found.get(method) or not_runnable(request, one) for method, one in maps.items()}
