"""Audits of trained networks with a budget of minutes: how long they take and what they decide.

    python -m benchmarks --section budgets --data DATA --csv docs/results/speed/cpu-budgets.csv

DATA holds imagenet (photographs with boxes) and weights. 100 photographs, methods and metrics chosen by the
audit. Wall time from the first check to the report in a process that has imported heatproof; inputs are all
that pass through the network, those that are timed included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.common import Part, Row, cost
from benchmarks.sections import BenchOptions
from heatproof.errors import InputError, UnknownNameError
from heatproof.explain.baselines import is_floor
from heatproof.run.progress import Progress
from heatproof.studies.audit.protocol import plan_audit, run_audit
from heatproof.studies.audit.settings import AuditSettings
from heatproof.timeline import recording

PHOTOGRAPHS = 100
BUDGETS = {"squeezenet1_1": (1, 3, 10), "resnet50": (3, 10)}  # minutes
WEIGHTS = {"squeezenet1_1": "squeezenet1_1.pt", "resnet50": "resnet50.safetensors"}
FACTORY = '''
import torchvision
from heatproof.images import Preprocess
from heatproof.models import Model

def make():
    """The first version of ResNet-50: strides in the 1x1 convolutions, eps of 1e-3, means of 0 to 255."""
    network = torchvision.models.resnet50()
    for layer in (network.layer2, network.layer3, network.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    for part in network.modules():
        if isinstance(part, torchvision.models.resnet.nn.BatchNorm2d):
            part.eps = 1e-3
    mean = tuple(value / 255 for value in (123.68, 116.779, 103.939))
    return Model(network, preprocess=Preprocess((224, 224), 256, mean, (1 / 255,) * 3))
'''


def parts(options: BenchOptions) -> Iterator[Part]:
    if options.data is None or not (options.data / "imagenet").is_dir():
        raise InputError("the section budgets needs --data: a folder with imagenet/ and weights/")
    data = options.data.resolve()
    for name in options.network or BUDGETS:
        if name not in BUDGETS:
            raise UnknownNameError("network", name, BUDGETS)
        for minutes in BUDGETS[name][: 1 if options.quick else None]:
            made = partial(audit, name, data, minutes, options.device)
            yield Part(f"{name}, {minutes} min", made, options.device)


def audit(name: str, data: Path, minutes: int, device: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        spec = f"torchvision:{name}"
        if name == "resnet50":
            (Path(place) / "network.py").write_text(FACTORY, encoding="utf-8")
            spec = f"{place}/network.py:make"
        settings = AuditSettings(
            model=spec, images=data / "imagenet", checkpoint=(str(data / "weights" / WEIGHTS[name]),),
            limit=PHOTOGRAPHS, minutes=minutes, device=device, out=Path(place) / "audit",
        )  # fmt: skip
        began, answers = time.perf_counter(), list[float]()

        def say(text: str) -> None:
            if text.startswith("decided:"):
                answers.append(time.perf_counter() - began)

        with recording() as recorded:
            plan = plan_audit(settings, say=say, began=began)
            outcome = run_audit(settings, plan, Progress(quiet=True))
        seconds = time.perf_counter() - began
        verdict = outcome.verdict
        assert verdict is not None and plan.scheduler is not None and plan.scheduler.planner.done is not None
        done = plan.scheduler.planner.done
    methods = [answer for answer in verdict.methods if not is_floor(answer.method)]
    decided = sum(answer.follows != "undecided" for answer in methods)
    inputs = sum(span.inputs for span in recorded.spans if span.name == "forward")
    what = f"audit of {name}, {minutes} min"
    note = (
        f"{decided} of {len(methods)} methods decided; object used: {verdict.network.answer}; "
        f"{done.images} images; {inputs:,} inputs"
    )
    rows = [cost(what, seconds * 1e3, "budget", minutes * 6e4, "<= 1.1", note)]
    rows.append(cost(f"{what}: estimate at the start", plan.seconds * 1e3, "measured", seconds * 1e3))
    if answers:
        rows.append(cost(f"{what}: first answer", answers[0] * 1e3, "audit", seconds * 1e3))
    if decided:
        each = inputs / decided
        rows.append(
            Row(f"{what}: inputs per decided method", each, "images", done.images, each / done.images)
        )
    return rows
