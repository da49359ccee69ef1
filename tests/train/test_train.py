"""The epoch loop: what is frozen, what a recipe does, and that a killed training ends as if it had lived."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forked import Forked
from heatproof.errors import CheckpointError, HeatproofError, InputError, ModelError, StoreError
from heatproof.images.kinds import open_memory
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.classifier import accuracy, auc
from heatproof.models import Model, load_model
from heatproof.train import (
    Data,
    Epoch,
    History,
    Phase,
    Recipe,
    TrainProgress,
    fit,
    read_data,
    small_net,
    stratified_split,
    two_phase,
    two_phase_recipe,
)
from heatproof.train.loop import class_weights, cross_entropy

pytestmark = pytest.mark.trains


def bright_or_dark(n: int = 24, size: int = 16, seed: int = 0) -> Data:
    """Class 1 has a bright upper half; masks mark that half."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 120, (n, 3, size, size)).astype(np.uint8)
    labels = np.arange(n) % 2
    images[labels == 1, :, : size // 2] += 120
    masks = np.zeros((n, size, size), bool)
    masks[:, : size // 2] = True
    return Data(torch.from_numpy(images), torch.from_numpy(labels), {"box": torch.from_numpy(masks)})


def tiny(seed: int = 0, classes: int = 2) -> Model:
    return small_net(classes, size=16, width=4, seed=seed)


def weights(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], prefix: tuple[str, ...] = ("",)) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if name.startswith(prefix))


def one_phase(epochs: int = 2, lr: float = 1e-2, batch_size: int = 8, **settings: object) -> Recipe:
    return Recipe((Phase(epochs, lr, **settings),), batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("depth", "frozen", "moved"),
    [
        ("head", ("layer",), ("fc",)),
        ("L4", ("layer1", "layer2", "layer3"), ("layer4", "fc")),
        ("L3-L4", ("layer1", "layer2"), ("layer3", "layer4", "fc")),
        (("layer2",), ("layer1", "layer3", "layer4", "fc"), ("layer2",)),
        ("all", (), ("layer1", "layer2", "layer3", "layer4", "fc")),
    ],
)
def test_frozen_means_frozen(depth: str, frozen: tuple[str, ...], moved: tuple[str, ...]) -> None:
    """Parameters and BatchNorm's statistics of frozen parts stay, bit for bit; all others move."""
    model, data = tiny(), bright_or_dark()
    before = weights(model)
    fit(model, data, data, one_phase(trainable=depth, weight_decay=0.1))
    after = weights(model)
    assert not frozen or same(before, after, frozen)
    for name in before:
        if name.startswith(moved):
            assert not torch.equal(before[name], after[name]), name


def test_dropout_of_frozen_parts_is_off_and_of_trained_parts_is_on() -> None:
    def network(seen: dict[str, bool]) -> nn.Sequential:
        class Drop(nn.Dropout):
            def forward(self, x: Tensor) -> Tensor:
                seen[self.where] |= self.training
                return super().forward(x)

        early, late = Drop(0.5), Drop(0.5)
        early.where, late.where = "early", "late"  # type: ignore[assignment]
        torch.manual_seed(0)
        convolve = nn.Sequential(nn.Conv2d(3, 4, 3), early, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
        return nn.Sequential(convolve, nn.Flatten(), late, nn.Linear(4, 2))

    seen = {"early": False, "late": False}
    fit(Model(network(seen)), bright_or_dark(), bright_or_dark(), one_phase(1, trainable="head"))
    assert seen == {"early": False, "late": True}


def test_the_network_learns_and_history_tells_it() -> None:
    model, train, valid = tiny(), bright_or_dark(64), bright_or_dark(32, seed=1)
    history = fit(model, train, valid, one_phase(6))
    assert [e.epoch for e in history.epochs] == [1, 2, 3, 4, 5, 6]
    assert history.epochs[-1].loss < 0.5 * history.epochs[0].loss
    logits = model.logits(model.preprocess.normalise(valid.images.float() / 255))
    assert history.epochs[-1].accuracy == accuracy(valid.labels, logits, logits=True).value > 0.9
    assert history.epochs[-1].auc == auc(valid.labels, logits, logits=True).value
    assert History.from_json(history.to_json()) == history


def test_the_caller_gets_everything_back() -> None:
    model, data = tiny(), bright_or_dark()
    model.module.layer1.train()
    model.module.fc.weight.requires_grad_(False)
    modes = [part.training for part in model.module.modules()]
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fit(model, data, data, one_phase(1))
    assert torch.equal(torch.rand(3), wanted)
    assert [part.training for part in model.module.modules()] == modes
    flags = {name: p.requires_grad for name, p in model.module.named_parameters()}
    assert flags.pop("fc.weight") is False and all(flags.values())
    assert all(p.grad is None for p in model.module.parameters())
    assert not any(part._forward_hooks for part in model.module.modules())


def test_the_seed_decides() -> None:
    data = bright_or_dark()
    runs = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        model = tiny()
        torch.manual_seed(noise)  # the caller's random numbers do not
        fit(model, data, data, Recipe((Phase(1, 1e-2),), 8, flip=True), seed=seed)
        runs.append(weights(model))
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def resumable(
    model: Model, data: Data, out: Path | None, progress: Callable[[TrainProgress], object] | None = None
) -> History:
    """Two phases, momentum and flips: everything that a resumed training must carry on."""
    phases = (Phase(3, 1e-2, "L4", schedule="cosine"), Phase(4, 1e-3, "all", optimiser="sgd"))
    return fit(model, data, data, Recipe(phases, 8, flip=True), out, 3, keep=(2, 7), progress=progress)


def die(reported: TrainProgress) -> None:
    """In the middle of the sixth epoch, without a chance to clean up."""
    if (reported.epoch, reported.batch) == (6, 2):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    """kill -9 in the middle of an epoch, then again from the start: bit-identical weights."""
    child = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[2]);"
        "from test_train import *; resumable(tiny(), bright_or_dark(), Path(sys.argv[1]), die)"
    )
    process = Forked(child, tmp_path, Path(__file__).parent, cwd=Path(__file__).parents[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the child: sums depend on how they are divided
    try:
        straight, again, data = tiny(), tiny(), bright_or_dark()
        history = resumable(straight, data, None)
        assert process.wait() == -signal.SIGKILL
        assert len(json.loads((tmp_path / "history.json").read_text())) == 5
        resumed = resumable(again, data, tmp_path)
    finally:
        process.communicate()
        torch.set_num_threads(threads)
    assert same(weights(straight), weights(again))
    assert [e.loss for e in resumed.epochs] == [e.loss for e in history.epochs]


def test_every_epoch_is_a_place_to_stop_at(tmp_path: Path) -> None:
    recipe = Recipe((Phase(2, 1e-2, "L4"), Phase(2, 1e-3, optimiser="adamw", clip=1.0)), 8)
    straight, data = tiny(), bright_or_dark()
    fit(straight, data, data, recipe, tmp_path / "straight")

    def stop(at: int) -> Callable[[TrainProgress], None]:
        def progress(reported: TrainProgress) -> None:
            if reported.result is not None and reported.epoch == at:
                raise KeyboardInterrupt

        return progress

    for epoch in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            fit(tiny(), data, data, recipe, tmp_path / "halting", progress=stop(epoch))
    model = tiny()
    epochs: list[int] = []
    fit(model, data, data, recipe, tmp_path / "halting", progress=lambda p: epochs.append(p.epoch))
    assert same(weights(straight), weights(model))
    assert set(epochs) == {4}  # nothing is trained twice
    complete = tiny()
    assert len(fit(complete, data, data, recipe, tmp_path / "halting")) == 4
    assert same(weights(straight), weights(complete))


def test_files_of_a_training(tmp_path: Path) -> None:
    model, data = tiny(), bright_or_dark()
    states = {}

    def remember(reported: TrainProgress) -> None:
        if reported.result is not None:
            states[reported.epoch] = weights(model)

    history = fit(model, data, data, one_phase(3), tmp_path, keep=(1, 3), progress=remember)
    names = ["epoch01.safetensors", "epoch03.safetensors", "history.json", "recipe.json", "state.pt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    for epoch in (1, 3):
        loaded = load_model(tiny(seed=9).module, checkpoint=tmp_path / f"epoch{epoch:02d}.safetensors")
        assert same(states[epoch], weights(loaded))
    rows = json.loads((tmp_path / "history.json").read_text())
    assert [row["loss"] for row in rows] == [e.loss for e in history.epochs]
    assert set(rows[0]) == {
        "epoch",
        "phase",
        "loss",
        "accuracy",
        "auc",
        "lr",
        "seconds",
        "gradients",
        "loss_deviation",
    }
    assert torch.load(tmp_path / "state.pt", weights_only=True)["epoch"] == 3


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    data = bright_or_dark()
    fit(tiny(), data, data, one_phase(1), tmp_path)
    others: list[tuple[str, Callable[[], object]]] = [
        ("recipe", lambda: fit(tiny(), data, data, one_phase(2), tmp_path)),
        ("seed", lambda: fit(tiny(), data, data, one_phase(1), tmp_path, seed=1)),
        ("pictures", lambda: fit(tiny(), bright_or_dark(seed=4), data, one_phase(1), tmp_path)),
        ("starting weights", lambda: fit(tiny(seed=1), data, data, one_phase(1), tmp_path)),
    ]
    for what, start in others:
        with pytest.raises(StoreError, match=f"{what} other than"):
            start()
    (tmp_path / "state.pt").write_bytes(b"not a state")
    with pytest.raises(CheckpointError, match="not the state of a training"):
        fit(tiny(), data, data, one_phase(1), tmp_path)


def test_the_schedule_is_the_cosine() -> None:
    data = bright_or_dark(8)
    phases = (Phase(4, 1e-3, "head", schedule="cosine"), Phase(2, 1e-5, schedule="constant"))
    rates = [e.lr for e in fit(tiny(), data, data, Recipe(phases, 8)).epochs]
    network = nn.Linear(1, 1)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(network.parameters(), 1e-3), 4)
    for rate in rates[:4]:
        assert rate == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
        reference.optimizer.step()
        reference.step()
    assert rates[4:] == [1e-5, 1e-5]


def test_one_step_equals_a_step_by_hand() -> None:
    """Label smoothing, class weights, clipping and SGD, against the same step spelled out."""
    data = bright_or_dark(6)
    phase = Phase(1, 0.5, optimiser="sgd", momentum=0.0, schedule="constant", label_smoothing=0.1, clip=0.05,
                  class_weights=(1.0, 3.0))  # fmt: skip
    model, twin = tiny(), tiny()
    fit(model, data, data, Recipe((phase,), 6))
    twin.module.train()
    images = twin.preprocess.normalise(data.images.float() / 255)
    log_p = twin.module(images).log_softmax(1)
    smooth = torch.full_like(log_p, 0.05).scatter(1, data.labels[:, None], 0.95)
    weight = torch.tensor([1.0, 3.0])
    loss = -(smooth * weight * log_p).sum() / weight[data.labels].sum()
    loss.backward()
    squares = [float((p.grad**2).sum()) for p in twin.module.parameters()]
    norm = math.sqrt(sum(squares))
    assert norm > 0.05  # or clipping would not be seen
    with torch.no_grad():
        for ours, theirs in zip(model.module.parameters(), twin.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs - 0.5 * theirs.grad * 0.05 / norm, rtol=1e-4, atol=1e-6)


def test_balanced_weights_and_one_logit_models() -> None:
    labels = torch.tensor([0, 1, 1, 1])
    phase = Phase(1, 1e-3, class_weights="balanced", label_smoothing=0.2)
    weight = class_weights(phase, labels, 2)
    assert weight is not None and weight.tolist() == pytest.approx([2.0, 2 / 3])
    z = torch.tensor([[0.3], [-1.0], [2.0], [0.1]])
    targets = labels * 0.8 + 0.1
    single = nn.functional.binary_cross_entropy_with_logits(z[:, 0], targets)
    assert float(cross_entropy(phase, z, labels, None)) == pytest.approx(float(single))
    data = bright_or_dark(64)
    history = fit(tiny(classes=1), data, data, one_phase(6))
    assert history.epochs[-1].accuracy > 0.9


def test_flips_carry_the_masks_along() -> None:
    """A penalty that looks: masks mark the bright left half in flipped pictures too."""
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    images[..., :8] = 200
    mask = torch.zeros(8, 16, 16, dtype=torch.bool)
    mask[..., :8] = True
    data = Data(images, torch.arange(8) % 2, {"box": mask})
    turned = []

    class Look:
        def prepare(self, *_: object) -> tuple[str, ...]:
            return ()

        def __call__(self, step: Any) -> Tensor:
            bright = step.images[:, 0] > 0
            assert torch.equal(bright, step.masks["box"])
            turned.extend((~step.masks["box"][:, 0, 0]).tolist())
            return step.logits.sum() * 0

    fit(tiny(), data, data, Recipe((Phase(3, 1e-3, penalty=Look()),), 8, flip=True))
    assert 0 < sum(turned) < len(turned) == 24


def test_two_phases_as_the_paper_has_them(tmp_path: Path) -> None:
    first, second = two_phase_recipe().phases
    assert (first.epochs, first.lr, first.trainable, first.optimiser, first.schedule) == (
        20,
        1e-4,
        "head",
        "adam",
        "cosine",
    )
    assert (first.label_smoothing, first.clip) == (0.0, None)
    assert (second.epochs, second.lr, second.trainable, second.optimiser) == (10, 1e-5, "all", "adam")
    assert (second.label_smoothing, second.clip) == (0.1, 1.0)
    data, model = bright_or_dark(8), tiny()
    start = weights(model)
    at = {}
    history = two_phase(
        model, data, data, tmp_path, batch_size=8, progress=lambda p: at.setdefault(p.epoch, weights(model))
    )
    stored = sorted(int(p.stem.removeprefix("epoch")) for p in tmp_path.glob("*.safetensors"))
    assert stored == [1, 5, 10, 15, 20, 25, 30]
    assert [e.phase for e in history.epochs] == ["transfer"] * 20 + ["fine-tuning"] * 10
    assert same(start, at[20], ("layer",)) and not same(start, at[21], ("layer1",))


def test_the_split_is_stratified_and_follows_the_seed() -> None:
    labels = torch.tensor([0] * 50 + [1] * 150)
    train, valid = stratified_split(labels, 0.2, seed=1)
    assert torch.bincount(labels[valid]).tolist() == [10, 30]
    assert sorted(torch.cat([train, valid]).tolist()) == list(range(200))
    assert torch.equal(stratified_split(labels, 0.2, seed=1)[1], valid)
    assert not torch.equal(stratified_split(labels, 0.2, seed=2)[1], valid)
    with pytest.raises(InputError, match="single image"):
        stratified_split([0, 0, 1], 0.2)


def test_pictures_of_a_source_arrive_in_8_bits() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3)).astype(np.uint8)
    source = open_memory(pictures, labels=[0, 1, 0, 1, 1])
    data, failures = read_data(source, Preprocess((16, 16), 16), indices=[4, 0, 2])
    assert torch.equal(data.images, torch.from_numpy(pictures[[4, 0, 2]]).permute(0, 3, 1, 2))
    assert data.labels.tolist() == [1, 0, 0] and not failures


IMAGES = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 0, 1])
GOOD, ONE_CLASS = Data(IMAGES, LABELS), Data(IMAGES, LABELS * 0)


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (lambda: Data(IMAGES[:0], LABELS[:0]), "nothing to train on"),
        (lambda: Data(IMAGES, LABELS[:3]), "4 .* 3|3 .* 4"),
        (lambda: Data(IMAGES, LABELS.float()), "one class number"),
        (lambda: Data(IMAGES, LABELS - 1), "start at 0"),
        (lambda: Data(IMAGES.float(), LABELS), "8 bits"),
        (lambda: Data(IMAGES, LABELS, {"box": torch.zeros(4, 8, 8)}), "masks of 'box'"),
        (lambda: fit(tiny(), ONE_CLASS, GOOD, one_phase()), "training images are of class 0"),
        (lambda: fit(tiny(), GOOD, ONE_CLASS, one_phase()), "validation images are of class 0"),
        (lambda: fit(tiny(), Data(IMAGES, LABELS * 2), GOOD, one_phase()), "has classes 0 to 1"),
        (lambda: fit(tiny(), Data(IMAGES[:, :1], LABELS), GOOD, one_phase()), "images are 1x16x16"),
        (lambda: fit(tiny(), GOOD, GOOD, one_phase(2), keep=(3,)), "no epoch 3"),
        (lambda: fit(tiny(), GOOD, GOOD, one_phase(trainable="L9")), "unknown depth"),
        (lambda: fit(tiny(), GOOD, GOOD, one_phase(trainable=("layr4",))), "did you mean"),
        (lambda: fit(tiny(), GOOD, GOOD, one_phase(class_weights=(1.0,))), "class weights are 2 numbers"),
        (lambda: Phase(0, 1e-3), "at least one epoch"),
        (lambda: Phase(1, 0.0), "above 0"),
        (lambda: Phase(1, 1e-3, optimiser="adma"), "did you mean 'adam'"),
        (lambda: Phase(1, 1e-3, label_smoothing=1.0), "label smoothing"),
        (lambda: Recipe(()), "at least one phase"),
    ],
)  # fmt: skip
def test_bad_input_raises_a_clear_error_before_training(start: Callable[[], object], sentence: str) -> None:
    with pytest.raises(HeatproofError, match=sentence) as caught:
        start()
    assert "\n" not in str(caught.value)


def test_a_loss_that_explodes_stops_the_training(tmp_path: Path) -> None:
    data = bright_or_dark()
    with pytest.raises(ModelError, match="not finite in epoch"):
        fit(tiny(), data, data, one_phase(30, 1e30, optimiser="sgd"), tmp_path)


def test_bfloat16_trains_too() -> None:
    data = bright_or_dark(64)
    history = fit(tiny(), data, data, Recipe((Phase(6, 1e-2),), 16, amp=True))
    assert history.epochs[-1].accuracy > 0.9
    assert isinstance(history.epochs[0], Epoch)
