"""Alarms: the published tables replayed, collapses built into a real network, a healthy training."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from heatproof.metrics.cscores import global_cscore
from heatproof.metrics.results import PerClass
from heatproof.models import Model, probabilities
from heatproof.store import Manifest, RunFolder
from heatproof.types import Score, Unit
from heatproof.verdict.alarms import (
    Alarm,
    Thresholds,
    find_alarms,
    surely_above,
)
from heatproof.verdict.trajectory import (
    CheckpointState,
    ClassState,
    Trajectory,
    auc_error,
    auc_falls,
    difference_error,
)
from published_training import TABLES, published

pytestmark = pytest.mark.trains

DOCS = Path(__file__).parents[2] / "docs" / "alarms.md"
ARCHITECTURES = TABLES["archs"]


def brief(alarms: list[Alarm]) -> list[tuple[int, str, str | None, str | None]]:
    return [(a.mechanism, a.checkpoint, a.method, a.class_name) for a in alarms]


def single_alarm(architecture: str, mechanism: int, checkpoint: str, method: str | None = None) -> Alarm:
    alarms = [
        a
        for a in find_alarms(published(architecture))
        if (a.mechanism, a.checkpoint) == (mechanism, checkpoint) and method in (None, a.method)
    ]
    assert len(alarms) == 1, brief(alarms)
    return alarms[0]


def test_scorecam_of_resnet_is_caught_one_checkpoint_before_auc_falls() -> None:
    alarm = single_alarm("ResNet50V2", 2, "E25", "ScoreCAM")
    assert (alarm.method, alarm.label, alarm.epoch, alarm.auc_tells_at) == ("ScoreCAM", None, 25, "E30")
    assert alarm.evidence["cscore"] == 0.014 and alarm.evidence["best_before"] == 0.698


def test_gradcam_of_densenet_hides_pneumonia() -> None:
    alarm = single_alarm("DenseNet201", 3, "E20")
    assert (alarm.method, alarm.class_name, alarm.severity) == ("GradCAM", "Pneumonia", "critical")
    assert (alarm.evidence["cscore"], alarm.evidence["overall"]) == (0.014, 0.197)
    assert alarm.auc_tells_at is None


def test_a_class_that_falls_from_its_own_best_is_a_collapse_of_that_class() -> None:
    """What the global score hides and what a class has lost are two things: 0.887 at E25, 0.008 at E30."""
    alarm = single_alarm("InceptionV3", 2, "E30")
    assert (alarm.method, alarm.class_name, alarm.severity) == ("GradCAM", "Pneumonia", "critical")
    assert (alarm.evidence["cscore"], alarm.evidence["best_before"]) == (0.008, 0.887)
    assert (
        "the GradCAM maps of Pneumonia no longer agree: C-Score 0.008, after 0.887 at E25" in alarm.sentence
    )
    never = [a for a in find_alarms(published("DenseNet201")) if a.checkpoint == "E5"]
    assert brief(never) == [(3, "E5", "GradCAM", "Pneumonia")]  # 0.078 before was nothing to lose


def test_densenet_calls_every_image_pneumonia() -> None:
    alarm = single_alarm("DenseNet201", 1, "E25")
    assert (alarm.class_name, alarm.method) == ("Normal", None)
    assert (alarm.evidence["gold"], alarm.evidence["images"]) == (0, 317)
    assert "0 of 317 images of Normal" in alarm.sentence and "0.987" in alarm.sentence


def test_densenet_never_has_an_attribution_collapse() -> None:
    assert not [a for a in find_alarms(published("DenseNet201")) if a.mechanism == 2]


def test_no_alarm_where_auc_falls_too() -> None:
    """ResNet50V2 at E30: the Normal list is empty and ScoreCAM is at 0, but so is AUC, nearly."""
    run = published("ResNet50V2")
    assert auc_falls(run) == [False] * 6 + [True]
    assert not [a for a in find_alarms(run) if a.checkpoint == "E30"]


def test_the_page_lists_every_alarm_on_the_published_tables() -> None:
    rows = [
        f"| {architecture} | {a.checkpoint} | {a.mechanism} | {a.where} | {a.severity} | "
        f"{a.auc_tells_at or '-'} |"
        for architecture in ARCHITECTURES
        for a in find_alarms(published(architecture))
    ]
    listed = [re.sub(r"\|[^|]*\|$", "|", line) for line in DOCS.read_text().splitlines() if "CAM /" in line
              or re.match(r"\| (DenseNet201|InceptionV3|ResNet50V2) \|", line)]  # fmt: skip
    assert [line.strip() for line in listed] == rows and len(rows) == 10


def test_the_page_states_the_thresholds() -> None:
    text = DOCS.read_text()
    for name in Thresholds.__dataclass_fields__:
        assert re.search(rf"\| `{name}` \| {getattr(Thresholds(), name):g} \|", text), name


def test_the_alarms_do_not_hang_on_exact_thresholds() -> None:
    """The page says how far each may be moved; the list is the same at both ends."""
    ranges = re.findall(r"\| `(\w+)` \|.*\| ([\d.]+) to ([\d.]+) \|", DOCS.read_text())
    assert {name for name, *_ in ranges} == set(Thresholds.__dataclass_fields__) - {"most"}
    for name, *ends in ranges:
        for end in ends:
            moved = replace(Thresholds(), **{name: float(end)})  # type: ignore[arg-type]
            for run in map(published, ARCHITECTURES):
                assert brief(find_alarms(run, moved)) == brief(find_alarms(run)), (name, end)


# --- a real network whose failures we build ourselves ----------------------------------------

PIXELS, PATCH, CLASSES = 28, 8, 3
HOME = torch.tensor([[2, 2], [2, 18], [18, 10]])  # where the evidence of each class lies
LABELS = torch.arange(72) % CLASSES
METHODS = ["gradcam", "layercam", "eigencam"]


def pictures(labels: Tensor, places: Tensor, seed: int) -> Tensor:
    """Noise with one patch of texture each: lying bars, standing bars, or a chequerboard."""
    stripes = (torch.arange(PATCH) % 2).float() * 4 - 2
    lying, standing = stripes[:, None].expand(PATCH, PATCH), stripes[None].expand(PATCH, PATCH)
    textures = torch.stack([lying, standing, lying * standing / 2])
    noise = torch.randn(len(labels), 1, PIXELS, PIXELS, generator=torch.Generator().manual_seed(seed))
    images = 0.3 * noise
    for image, label, (row, column) in zip(images, labels, places.tolist(), strict=True):
        image[0, row : row + PATCH, column : column + PATCH] += textures[label]
    return images


def anywhere(count: int, seed: int) -> Tensor:
    return torch.randint(0, PIXELS - PATCH, (count, 2), generator=torch.Generator().manual_seed(seed))


class Network(nn.Module):
    """Two convolutions and the strongest response of each channel; `silent` zeroes a class's activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.layer = nn.MaxPool2d(2)
        self.head = nn.Linear(12, CLASSES)
        self.silent: int | None = None

    def forward(self, images: Tensor) -> Tensor:
        features = self.block(self.stem(images))
        if self.silent is not None:
            seen = self.head(features.amax((2, 3))).argmax(1)
            features = features * (seen != self.silent)[:, None, None, None]
        return self.head(self.layer(features).amax((2, 3)))


def checkpoint(name: str, epoch: int, network: Network, images: Tensor) -> CheckpointState:
    """Explained and scored as any user would."""
    model = Model(network.eval())
    maps = hp.explain(model, images, METHODS, targets=LABELS, layer="layer")
    with torch.no_grad():
        probs = probabilities(model.logits(images))
    scores = {m: hp.metrics.cscore_by_class(v, LABELS, probs, resamples=200) for m, v in maps.items()}
    return CheckpointState.measured(name, epoch, LABELS, probs, scores)


@pytest.fixture(scope="module")
def trained() -> tuple[Network, Trajectory]:
    """A healthy training from scratch, looked at from before the first epoch to the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network()
    labels = torch.arange(192) % CLASSES
    images, still = pictures(labels, anywhere(192, 5), 6), pictures(LABELS, HOME[LABELS], 1)
    optimiser = torch.optim.Adam(network.parameters(), 5e-3)
    run = [checkpoint("epoch0", 0, network, still)]
    for epoch in range(1, 6):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimiser.step()
        run.append(checkpoint(f"epoch{epoch}", epoch, network, still))
    torch.set_num_threads(threads)
    return network, Trajectory(tuple(run), ("lying", "standing", "chequered"))


def then(trained: tuple[Network, Trajectory], network: Network, images: Tensor) -> list[Alarm]:
    """Alarms when these weights and images follow the healthy run; AUC holds."""
    run = trained[1]
    last = checkpoint("broken", 6, network, images)
    assert last.auc > 0.95
    alarms = find_alarms(replace(run, checkpoints=(*run.checkpoints, last)))
    assert {a.checkpoint for a in alarms} == {"broken"}
    return alarms


def copy_of(network: Network) -> Network:
    twin = Network()
    twin.load_state_dict(network.state_dict())
    return twin


def test_a_healthy_training_raises_nothing(trained: tuple[Network, Trajectory]) -> None:
    run = trained[1]
    assert run.checkpoints[0].auc < 0.75 and run.checkpoints[-1].auc > 0.95  # it did learn
    assert all(s.overall.value > 0.2 for s in run.checkpoints[-1].methods.values())
    assert find_alarms(run) == []


def test_a_shifted_threshold_is_a_gold_list_collapse_and_nothing_else(
    trained: tuple[Network, Trajectory],
) -> None:
    network = copy_of(trained[0])
    with torch.no_grad():
        network.head.bias[1] -= 25
    alarms = then(trained, network, pictures(LABELS, HOME[LABELS], 1))
    assert brief(alarms) == [(1, "broken", None, "standing")]


def test_a_layer_without_activation_for_one_class_raises_only_an_attribution_collapse(
    trained: tuple[Network, Trajectory],
) -> None:
    network = copy_of(trained[0])
    network.silent = 2
    with torch.no_grad():
        network.head.bias[2] = network.head.bias.max() + 1  # what says nothing is taken for class 2
    alarms = then(trained, network, pictures(LABELS, HOME[LABELS], 1))
    assert brief(alarms) == [(2, "broken", method, "chequered") for method in METHODS]
    assert all(alarm.evidence["degenerate"] == 1 for alarm in alarms)


def test_a_layer_without_activation_raises_one_alarm_per_method(trained: tuple[Network, Trajectory]) -> None:
    """Every map of every class empty, with the answers of the healthy network."""
    healthy = trained[1].checkpoints[-1]
    maps = torch.zeros(len(LABELS), 7, 7)
    probs = 0.1 + 0.7 * nn.functional.one_hot(LABELS, CLASSES).double()
    blank = CheckpointState.measured(
        "blank", 6, LABELS, probs, {"gradcam": hp.metrics.cscore_by_class(maps, LABELS, probs)}
    )
    assert brief(find_alarms(Trajectory((healthy, blank)))) == [(2, "blank", "gradcam", None)]
    early = replace(healthy, auc=0.6)  # no past: AUC did not hold
    assert brief(find_alarms(Trajectory((early, blank)))) == [(2, "blank", "gradcam", None)]
    assert find_alarms(Trajectory((blank,))) == []


def test_evidence_moved_at_random_is_class_masking_and_nothing_else(
    trained: tuple[Network, Trajectory],
) -> None:
    """And where the class had agreed more than ten times as well before, a collapse of the class."""
    places = torch.where((LABELS == 0)[:, None], anywhere(len(LABELS), 9), HOME[LABELS])
    images = pictures(LABELS, places, 1)
    early = replace(trained[1].checkpoints[-1], auc=0.6)  # no past: AUC did not hold
    broken = checkpoint("broken", 6, trained[0], images)
    alone = find_alarms(Trajectory((early, broken), trained[1].class_names))
    assert brief(alone) == [(3, "broken", method, "lying") for method in METHODS]
    alarms = then(trained, trained[0], images)
    assert [(a.method, a.class_name) for a in alarms] == [(method, "lying") for method in METHODS]
    for a in alarms:
        past = max(c.methods[str(a.method)].classes[0].value for c in trained[1] if c.auc > 0.75)
        assert a.mechanism == (2 if "best_before" in a.evidence else 3)
        assert (a.mechanism == 2) <= (a.evidence["cscore"] < past / 10)
    assert {a.mechanism for a in alarms} == {2, 3}


# --- single rules ----------------------------------------------------------------------------


def state(
    auc: float, values: tuple[float, float], gold: tuple[int, int] = (50, 50), name: str = "t"
) -> CheckpointState:
    classes = {c: ClassState(50, gold[c]) for c in (0, 1)}
    scores = {c: PerClass(values[c], gold[c], 0.0) for c in (0, 1)}
    overall = PerClass(global_cscore(values, gold), sum(gold), 0.0)
    return CheckpointState(name, None, auc, 0.9, classes, {"m": replace(overall, classes=scores)})


UNTRAINED = state(0.6, (0.5, 0.5), name="untrained")


def test_one_checkpoint_raises_none() -> None:
    """Whatever is wrong with it: there is no training to look over."""
    for alone in (state(0.95, (0.05, 0.6), name="best"), state(0.95, (0.5, 0.5), (0, 50), "best")):
        assert find_alarms(Trajectory((alone,))) == []
        assert find_alarms(Trajectory((alone, replace(alone, name="next"))))


def test_advice_does_not_hold_moving_evidence_against_a_method() -> None:
    (alarm,) = find_alarms(Trajectory((UNTRAINED, state(0.95, (0.05, 0.6)))))
    assert alarm.mechanism == 3 and "at a different position in every image" in alarm.sentence
    assert "explain class 0 with" not in alarm.sentence


def test_a_wide_interval_keeps_quiet() -> None:
    low = state(0.95, (0.05, 0.6))
    assert brief(find_alarms(Trajectory((UNTRAINED, low)))) == [(3, "t", "m", "class 0")]
    unsure = replace(low.methods["m"].classes[0], interval=(0.0, 0.3))
    method = replace(low.methods["m"], classes={**low.methods["m"].classes, 0: unsure})
    assert find_alarms(Trajectory((UNTRAINED, replace(low, methods={"m": method})))) == []


def test_an_untrained_network_is_not_alarming() -> None:
    assert find_alarms(Trajectory((UNTRAINED, state(0.6, (0.05, 0.6), gold=(0, 50))))) == []


def test_a_recovering_class_is_no_collapse_and_a_missing_class_is() -> None:
    lists = [(0, 0), (0, 50), (0, 50)]  # not sure of anything yet, then of one class only, and still
    run = [state(0.95, (0.5, 0.5), gold, f"t{k}") for k, gold in enumerate(lists)]
    assert brief(find_alarms(Trajectory(tuple(run[:2])))) == []
    assert brief(find_alarms(Trajectory(tuple(run)))) == [(1, "t2", None, "class 0")]
    assert brief(find_alarms(Trajectory((run[1], run[1])))) == [(1, "t1", None, "class 0")] * 2
    lost = Trajectory((state(0.95, (0.5, 0.5), (50, 50), "full"), run[0]))
    assert brief(find_alarms(lost)) == [(1, "t0", None, "class 0"), (1, "t0", None, "class 1")]


def test_an_untrained_network_is_no_past_to_fall_from() -> None:
    trained = state(0.95, (0.05, 0.05))
    assert find_alarms(Trajectory((state(0.6, (0.9, 0.9)), trained))) == []
    assert brief(find_alarms(Trajectory((state(0.9, (0.9, 0.9)), trained)))) == [(2, "t", "m", None)]


def test_a_class_is_held_against_its_own_past_where_the_mean_hides_it() -> None:
    before, after = state(0.95, (0.9, 0.9), name="t0"), state(0.95, (0.05, 0.9), name="t1")
    assert brief(find_alarms(Trajectory((before, after)))) == [(2, "t1", "m", "class 0")]
    assert brief(find_alarms(Trajectory((UNTRAINED, after)))) == [(3, "t1", "m", "class 0")]  # no past
    few = state(0.95, (0.9, 0.9), gold=(4, 50), name="t0")  # four images are no past
    assert brief(find_alarms(Trajectory((few, after))))[-1:] == [(3, "t1", "m", "class 0")]


def test_few_images_prove_nothing() -> None:
    """None of five images recognised may be chance (upper bound 0.52); none of six is not."""
    for total, count in ((5, 0), (6, 1)):
        classes = {0: ClassState(total, 0), 1: ClassState(50, 50)}
        few = replace(state(0.95, (0.5, 0.5)), classes=classes, methods={})
        assert len(find_alarms(Trajectory((few, few)))) == 2 * count


def test_without_auc_a_gold_list_is_not_judged_but_maps_are() -> None:
    assert brief(find_alarms(Trajectory((UNTRAINED, state(math.nan, (0.05, 0.6)))))) == [
        (3, "t", "m", "class 0")
    ]
    assert find_alarms(Trajectory((UNTRAINED, state(math.nan, (0.0, 0.6), gold=(0, 50))))) == []


def test_auc_that_dips_within_its_error_holds_and_below_it_falls() -> None:
    best, error = state(0.95, (0.5, 0.5)), auc_error(state(0.95, (0.5, 0.5)))
    for fall, expected in ((2.5 * error, False), (4 * error, True)):
        assert auc_falls(Trajectory((best, state(0.95 - fall, (0.5, 0.5)))))[1] is expected


def two_checkpoints(shift: float) -> tuple[CheckpointState, CheckpointState]:
    """The same answers twice, class 1 a little less sure the second time."""
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    logits = rng.normal(size=200) + 1.8 * labels
    later = logits - shift * labels + 0.02 * rng.normal(size=200)
    sure = [torch.sigmoid(torch.tensor(z)) for z in (logits, later)]
    first, second = (CheckpointState.measured(f"e{k}", k, labels, p, {}) for k, p in enumerate(sure))
    return first, second


def test_auc_of_the_same_images_is_compared_image_by_image() -> None:
    first, second = two_checkpoints(0.2)
    fall = first.auc - second.auc
    assert 0.01 < fall < math.hypot(auc_error(first), auc_error(second))  # apart, nobody could tell
    assert auc_falls(Trajectory((first, second))) == [False, True]
    assert auc_falls(Trajectory(two_checkpoints(0.0))) == [False, False]
    assert auc_falls(Trajectory((first, replace(second, moves={})))) == [False, False]
    # With other images in part, only those in common are compared as pairs.
    other = {f"new{k}": move for k, move in second.moves.items()}
    apart = replace(second, moves=other)
    assert difference_error(first, second) < 0.3 * difference_error(first, apart)
    assert difference_error(first, apart) == pytest.approx(
        math.hypot(*(math.sqrt(sum(e * e for e in state.moves.values())) for state in (first, apart)))
    )


@pytest.mark.parametrize(("tau", "gold"), [("0.5", [4, 1]), ("'adaptive'", [4, 4]), ("0.3", [3, 3])])
def test_gold_lists_are_counted_at_the_threshold_in_force(tmp_path: Path, tau: str, gold: list[int]) -> None:
    """All of class 1 rank above all of class 0, but the threshold of a half has left them."""
    chances = [0.1, 0.2, 0.22, 0.25, 0.28, 0.33, 0.4, 0.6]
    if tau == "0.3":
        chances[0], chances[4] = 0.75, 0.28
    metric = "cscore" if tau == "0.5" else f"cscore(tau={tau})"
    cell = {"model": "m", "checkpoint": "epoch1", "image": "", "method": "gradcam"}
    rows = [Score(**cell, label=c, explained=c, metric=metric, value=0.5) for c in (None, 0, 1)]
    for i, p in enumerate(chances):
        answer: dict[str, Any] = {**cell, "image": f"{i}.png", "method": "", "label": int(i > 3)}
        rows += [Score(**answer, explained=c, metric="probability", value=v) for c, v in ((0, 1 - p), (1, p))]
        rows.append(Score(**answer, explained=int(p > 0.5), metric="predicted", value=float(p > 0.5)))
    folder = RunFolder.resume(tmp_path / "run", Manifest.collect({}, models={"epoch1": "x"}))
    folder.write_unit(Unit("epoch1", (0, 8), (), ("any",)), rows)
    (trajectory,) = Trajectory.from_run(folder)
    assert [trajectory.classes[c] for c in (0, 1)] == [ClassState(4, n) for n in gold]
    assert list(trajectory.moves) == [f"{i}.png" for i in range(8)]


def test_the_error_of_auc_against_simulation() -> None:
    """Scores from exponentials, the model behind the formula; AUC 0.9, 60 and 40 images."""
    rng = np.random.default_rng(0)
    classes = {0: ClassState(60, 60), 1: ClassState(40, 40)}
    formula = auc_error(CheckpointState("t", None, 0.9, 0.9, classes, {}))
    spreads = []
    for own, rest in ((60, 40), (40, 60)):
        high = rng.exponential(9.0, (4000, own))
        low = rng.exponential(1.0, (4000, rest))
        spreads.append(np.mean(high[:, :, None] > low[:, None, :], axis=(1, 2)).std())
    assert formula == pytest.approx(np.mean(spreads), rel=0.03)


def test_exact_bounds_of_a_share() -> None:
    from scipy.stats import binomtest

    for hits, n in ((0, 6), (1, 9), (5, 5), (31, 317)):
        reference = binomtest(hits, n).proportion_ci(0.95, "exact")
        for share in (0.0, 0.02, 0.05, 0.07, 0.3, 0.4, 0.5, 0.9):
            assert surely_above(hits, n, share) == (reference.low > share)
            assert surely_above(n - hits, n, 1 - share) == (reference.high < share)
