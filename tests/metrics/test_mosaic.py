"""Mosaics: maps of a class on its own pictures, and cells that cannot have had any influence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import heatproof as hp
from conftest import same, small_cnn, state_of
from heatproof.errors import InputError, UnknownNameError
from heatproof.metrics.mosaic import Mosaics, disconnected_grid, grid_pointing, make_mosaics
from heatproof.models.derived import cut, disconnected, join
from heatproof.models.model import as_model
from heatproof.registry import metrics
from heatproof.run.config import read_metrics, toml

SIDE, PATCH = 16, 6
COLOURS = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
BLIND = ["random", "edges", "centre", "eigencam"]  # the same map for every class


def patches(count: int, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Dark noise with a square somewhere, whose colour is the class."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = (
        0.3 * torch.rand(count, 3, SIDE, SIDE, generator=generator),
        torch.arange(count) % classes,
    )
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = torch.randint(0, SIDE - PATCH, (2,), generator=generator).tolist()
        image[:, top : top + PATCH, left : left + PATCH] = COLOURS[label][:, None, None]
    return images, labels


@pytest.fixture(scope="module")
def trained() -> nn.Sequential:
    """Two convolutions, pooling and a linear head, that know the colours."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    images, labels = patches(128, seed=1)
    weights = list(net.parameters())
    for _ in range(150):
        slopes = torch.autograd.grad(nn.functional.cross_entropy(net(images), labels), weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 0.5 * slope  # type: ignore[misc]
    return net.eval()


@torch.no_grad()
def undecided(net: nn.Module, head: nn.Linear, images: Tensor) -> nn.Module:
    """A network without training that does not give every picture the same class."""
    head.bias -= net.eval()(images).mean(0)  # type: ignore[misc]
    return net


class Tokens(nn.Module):
    """A transformer of 4x4 patches with a class token, for pictures of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 12, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.position = nn.Parameter(torch.randn(1, (SIDE // 4) ** 2 + 1, 12))
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(12, 2, 24, norm_first=True, batch_first=True)
                                      for _ in range(2)))  # fmt: skip
        self.head = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        return self.head(self.blocks(tokens + self.position)[:, 0])


# --- grid pointing ------------------------------------------------------------------------------------------


def test_gradcam_is_far_above_chance_and_what_ignores_the_class_exactly_at_it(trained: nn.Sequential) -> None:
    images, labels = patches(48)
    result = grid_pointing(["gradcam", "hirescam", *BLIND], labels, model=trained, images=images)
    assert result["gradcam"]["inside"].shape == (12,)  # each picture once
    assert result["gradcam"]["above"].mean() > 0.3 and (result["gradcam"]["above"] > 0).all()
    assert result["hirescam"]["above"].mean() > 0.1
    for method in BLIND:
        assert (result[method]["inside"] == 0.25).all() and (result[method]["above"] == 0).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_fewer_classes_than_cells_have_another_chance(trained: nn.Sequential, classes: int) -> None:
    images, labels = patches(24, classes)
    result = grid_pointing(["gradcam", *BLIND], labels, model=trained, images=images)
    for method in BLIND:
        assert torch.allclose(result[method]["inside"], torch.tensor(1 / classes), atol=1e-6)
        assert (result[method]["above"] == 0).all()
    assert result["gradcam"]["above"].mean() > 0.2


def test_the_share_is_that_of_the_definition(trained: nn.Sequential) -> None:
    """Mosaic by mosaic and class by class, with pixels counted on a map enlarged by repetition."""
    images, labels = patches(16)
    result = grid_pointing("gradcam", labels, model=trained, images=images, mosaics=3, seed=5)["gradcam"]
    built = make_mosaics(images, labels, model=trained, mosaics=3, seed=5)
    for i, (mosaic, classes) in enumerate(zip(built.images(), built.cell_classes, strict=True)):
        shares = []
        for row in range(2):
            for column in range(2):
                heat = hp.explain(trained, mosaic[None], "gradcam", int(classes[row, column]))[
                    "gradcam"
                ].values
                big = heat[0].clamp(min=0).double().repeat_interleave(2, 0).repeat_interleave(2, 1)
                cell = big[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
                shares.append(float(cell.sum() / big.sum()))
        assert float(result["inside"][i]) == pytest.approx(sum(shares) / 4, abs=1e-6)
        assert float(result["above"][i]) == pytest.approx(sum(shares) / 4 - 0.25, abs=1e-6)


def test_mosaics_hold_the_pictures_as_they_are_where_the_network_takes_them(trained: nn.Sequential) -> None:
    images, labels = patches(40)
    built = make_mosaics(images, labels, model=trained, cells=3, seed=1)
    assert built.images().shape == (4, 3, 3 * SIDE, 3 * SIDE) and built.rows == (0, SIDE, 2 * SIDE, 3 * SIDE)
    cells = cut(built.images(), 3)
    assert torch.equal(cells, built.pictures[built.places.flatten()])
    assert torch.equal(built.classes[built.places], built.cell_classes)
    counts = torch.stack([cells.flatten().bincount(minlength=4) for cells in built.cell_classes])
    assert counts.min() == 2 and counts.max() == 3  # nine cells, four classes
    again = make_mosaics(images, labels, model=trained, cells=3, seed=1, batch_size=7)
    assert torch.equal(built.places, again.places)
    assert not torch.equal(built.places, make_mosaics(images, labels, model=trained, cells=3, seed=2).places)


def test_only_pictures_the_network_is_sure_of_and_right_about_are_used(trained: nn.Sequential) -> None:
    images, labels = patches(20)
    faint = images[:4].mean(1, keepdim=True).expand(-1, 3, -1, -1)  # without their colour
    wrong = images[4:8]
    chosen, chosen_labels = (
        torch.cat([faint, wrong, images[8:]]),
        torch.cat([labels[:4], (labels[4:8] + 1) % 4, labels[8:]]),
    )
    highest = trained(chosen).softmax(1).amax(1).detach()
    least = float(highest[:4].max()) + 1e-4
    assert highest[4:].min() > least
    assert torch.equal(
        make_mosaics(chosen, chosen_labels, model=trained, confident=least).pictures, images[8:]
    )
    assert torch.equal(make_mosaics(chosen, model=trained, confident=least).pictures, images[4:])


def test_a_network_of_one_size_gets_shrunk_pictures() -> None:
    net, (images, _) = Tokens(), patches(24)
    undecided(net, net.head, images)
    built = make_mosaics(images, model=net, confident=0.0)
    assert built.images().shape[1:] == images.shape[1:] and built.rows == (0, 8, 16)
    result = grid_pointing(["gradcam", *BLIND], model=net, images=images, confident=0.0, mosaics=3)
    for method in BLIND:
        assert (result[method]["above"] == 0).all()
    # Sure of a picture also when it is shrunk: as many as a slow twin finds.
    shrink: Any = {"mode": "bilinear", "antialias": True}
    small = nn.functional.interpolate(
        nn.functional.interpolate(images, size=(8, 8), **shrink), size=SIDE, **shrink
    )
    first, second = (net(x).detach().softmax(1).max(1) for x in (images, small))
    least = float(second.values.median())
    confident = (first.values >= least) & (second.values >= least) & (first.indices == second.indices)
    assert 4 <= confident.sum() < (first.values >= least).sum()
    assert torch.equal(make_mosaics(images, model=net, confident=least).pictures, images[confident])


def test_cells_of_odd_pictures_share_the_mosaic_out_to_the_pixel() -> None:
    built = Mosaics(
        torch.zeros(1, 3, 15, 15), torch.zeros(1), torch.zeros(1, 2, 2).long(), (0, 8, 15), (0, 8, 15)
    )
    assert built.images().shape == (1, 3, 15, 15)
    assert torch.allclose(built.mass(torch.ones(1, 15, 15))[0] / 225, built.areas)
    assert torch.allclose(built.mass(torch.ones(1, 3, 3))[0], 9 * built.areas)
    corner = torch.zeros(1, 5, 5)
    corner[0, 4, 4] = 2.0
    assert built.mass(corner)[0].tolist() == [[0, 0], [0, 2]]


def test_one_logit_has_two_classes() -> None:
    images, _ = patches(16, 2)
    net = nn.Sequential(nn.Conv2d(3, 1, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([9.0, -9.0, 0.0]).view(1, 3, 1, 1))  # red against green
    result = grid_pointing(["gradient", "hirescam"], model=net, images=images, layer="0", confident=0.5)
    assert result["hirescam"]["above"].mean() > 0.1
    assert result["gradient"]["above"].isnan().all()  # the same everywhere


# --- the disconnected grid ----------------------------------------------------------------------------------


def test_what_cannot_have_influence_gets_nothing_from_honest_methods(trained: nn.Sequential) -> None:
    images, labels = patches(24)
    honest = ["gradient", "smoothgrad(samples=3)", "integrated_gradients(steps=4)", "hirescam", "layercam"]
    result = disconnected_grid([*honest, "gradcam", *BLIND], labels, model=trained, images=images)
    for method in honest:
        assert (result[method]["outside"] == 0).all()
    assert (result["gradcam"]["outside"] > 0).all()  # its weights hold wherever the channel is active
    for method in BLIND:
        assert (result[method]["outside"] == 0.75).all()


def test_every_method_runs_disconnected(cnn: nn.Sequential) -> None:
    """A head that flattens is as good as one that pools; so is a layer by name, or several."""
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    undecided(cnn, cnn[-1], images)  # type: ignore[arg-type]
    costly = ["ablationcam", "scorecam(channels=3)", "lime(samples=20)", "rise(masks=8)",
              "guided_ig(steps=3)", "blur_ig(steps=3)", "ms-gradcam++", "xgradcam"]  # fmt: skip
    result = disconnected_grid(costly, model=cnn, images=images, mosaics=1, confident=0.0)
    assert all(0 <= float(scores["outside"]) <= 1 or scores["outside"].isnan() for scores in result.values())
    assert float(result["guided_ig(steps=3)"]["outside"]) == float(result["blur_ig(steps=3)"]["outside"]) == 0
    for layer in ("5", ["2", "5"]):
        named = disconnected_grid("hirescam", model=cnn, images=images, layer=layer, mosaics=1, confident=0.0)
        assert float(named["hirescam"]["outside"]) == 0


def test_a_disconnected_network_answers_as_the_cell_alone_does() -> None:
    images, _ = patches(4)
    mosaic = join(images, 2)
    assert torch.equal(cut(mosaic, 2), images)
    assert torch.equal(mosaic[0, :, :SIDE, SIDE:], images[1]) and torch.equal(
        mosaic[0, :, SIDE:, :SIDE], images[2]
    )
    for net in (small_cnn().eval(), Tokens().eval()):
        model = as_model(net)
        needs = frozenset({"activations", "gradients"})
        whole = hp.explain(model, images, "hirescam", 1)["hirescam"].values
        for cell, cell_model in enumerate(disconnected(model, images, needs, None, 2)):
            torch.testing.assert_close(
                cell_model.logits(mosaic)[0], net(images)[cell].detach(), rtol=1e-4, atol=1e-5
            )
            heat = hp.explain(cell_model, mosaic, "hirescam", 1)["hirescam"].values
            parts = cut(heat[:, None], 2)[:, 0]
            torch.testing.assert_close(parts[cell], whole[cell], rtol=1e-4, atol=1e-5)
            assert not parts[[i for i in range(4) if i != cell]].any()


def test_a_function_behind_the_layer_is_part_of_it() -> None:
    class Rectifies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(torch.relu(self.conv(images)).mean((2, 3)))

    net, (images, _) = Rectifies(), patches(8)
    model = as_model(undecided(net, net.head, images))
    assert hp.models.default_layer(model, images) == "conv+relu"
    (first, *_) = disconnected(model, images, frozenset({"activations"}), None, 2)
    mosaic = join(images[:4], 2)
    alone = hp.explain(model, images[:4], "eigencam")["eigencam"]
    assert hp.explain(first, mosaic, "eigencam")["eigencam"].values.shape == (1, 2 * SIDE, 2 * SIDE)
    assert alone.values.shape == (4, SIDE, SIDE)
    result = disconnected_grid("hirescam", model=model, images=images, confident=0.0, mosaics=1)
    assert float(result["hirescam"]["outside"]) == 0


# --- both ---------------------------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize("function", [grid_pointing, disconnected_grid])


@BOTH
def test_a_blank_map_has_a_reason_and_the_model_stays(function: Any) -> None:
    class Colour(nn.Module):
        """The mean colour, and a branch in which every unit is dead."""

        def __init__(self) -> None:
            super().__init__()
            self.dead, self.head = nn.Conv2d(3, 4, 1), nn.Linear(3, 3, bias=False)
            nn.init.constant_(self.dead.bias, -99.0)  # type: ignore[arg-type]
            nn.init.eye_(self.head.weight)

        def forward(self, images: Tensor) -> Tensor:
            nothing = torch.relu(self.dead(images)).mean((1, 2, 3))
            return 20 * self.head(images.mean((2, 3))) + nothing[:, None]

    net, (images, labels) = Colour().train(), patches(12, 3)
    net.head.weight.requires_grad_(False)
    before = state_of(net)
    result = function(["gradcam", "edges"], labels, model=net, images=images, layer="dead+relu")
    assert same(before, state_of(net))
    for scores, why in ((result["gradcam"], "every map of the mosaic is constant"), (result["edges"], "")):
        for name, values in scores.items():
            assert len(values) == 3 and bool(values.isnan().all()) == bool(why)
            assert all(
                reason.startswith(why) and bool(reason) == bool(why) for reason in scores.reasons(name)
            )


@BOTH
def test_bad_input_raises_a_clear_error(function: Any, trained: nn.Sequential) -> None:
    images, labels = patches(16)

    def refusal(inputs: Tensor = images, labels: Any = None, methods: Any = "gradcam", **options: Any) -> str:
        with pytest.raises((InputError, UnknownNameError)) as error:
            function(methods, labels, **({"model": trained, "images": inputs} | options))
        assert "\n" not in str(error.value)
        return str(error.value)

    nan = nn.Sequential(*trained[:-1], nn.Linear(16, 4))
    nn.init.constant_(nan[-1].weight, float("nan"))  # type: ignore[arg-type]
    flat = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    before = state_of(trained)
    asks = "; a mosaic of 2x2 cells takes 4, of two classes or more: give more images, or lower confident"
    sure = "are classified with a probability of at least"
    assert refusal(images[:3]) == f"3 of 3 images {sure} 0.5{asks}"
    assert refusal(images[::4]) == f"4 of 4 images {sure} 0.5, all of class 0{asks}"
    wrong = "0 of 16 images are correctly classified with a probability of at least 0.5"
    assert refusal(labels=(labels + 1) % 4) == wrong + asks
    assert refusal(model=flat, confident=1.0).startswith("0 of 16")
    assert refusal(model=nan).startswith("0 of 16")
    assert refusal(labels=labels[:5]) == "16 images need one target or 16; got shape (5,)"
    assert refusal(labels=labels + 9) == "target 9 is out of range; the model has classes 0 to 3"
    assert refusal(cells=1) == "cells must be a whole number of at least 2, got 1"
    assert refusal(confident=50) == "confident must be a probability from 0 to 1, got 50"
    assert refusal(mosaics=0) == "mosaics must be a whole number of at least 1, or None; got 0"
    assert refusal(seed=-1) == "seed must be 0 or more, got -1"
    assert "unknown method 'gradcan'" in refusal(methods="gradcan")
    assert "unknown layer 'nowhere'" in refusal(layer="nowhere")
    assert refusal(images[0]).startswith("images must be 'b c h w'")
    assert same(before, state_of(trained))


def test_pictures_smaller_than_the_grid_cannot_be_shrunk() -> None:
    with pytest.raises(InputError, match="images of 2x2 cannot be shrunk into mosaics of 3x3 cells"):
        grid_pointing(
            model=nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), images=torch.rand(9, 3, 2, 2), cells=3
        )


# --- in a run -----------------------------------------------------------------------------------------------

NETWORK = f"""
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def colours():
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return Model(net, "colours", Preprocess(({SIDE}, {SIDE}), {SIDE}, (0.0,) * 3, (1.0,) * 3))
"""
NAMES = ("grid_pointing", "disconnected_grid")


def run_of(folder: Path, net: nn.Module, metrics: list[str], count: int = 44, **run: Any) -> hp.Run:
    """Of pictures of four classes, in a folder."""
    (folder / "net.py").write_text(NETWORK)
    torch.save(net.state_dict(), folder / "weights.pt")
    images, labels = patches(count)
    for i, picture in enumerate((255 * images).round().byte().permute(0, 2, 3, 1).numpy()):
        place = folder / "pictures" / str(labels[i].item()) / f"{i:02d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place)
    study = {
        "methods": ["gradcam", "hirescam", "edges"],
        "metrics": metrics,
        "run": {"batch_size": 7, "threads": 1, "workers": 1, "device": "cpu", **run},
        "model": {"spec": "net.py:colours", "checkpoints": ["weights.pt"]},
        "images": {"kind": "folder", "path": "pictures"},
    }
    (folder / "study.toml").write_text(toml(study))
    return hp.run(folder / "study.toml", folder / "out")


def rows_of(run: hp.Run) -> dict[tuple[str, str], tuple[float, str]]:
    rows = run.folder.scores().sql("from scores where contains(metric, 'grid')")
    assert {(row["image"], row["label"]) for row in rows} == {("", None)}
    return {(row["method"], row["metric"]): (row["value"], row["reason"]) for row in rows}


def test_a_run_gives_what_the_functions_give(tmp_path: Path, trained: nn.Sequential) -> None:
    run = run_of(tmp_path, trained, ["grid_pointing(mosaics=9)", "disconnected_grid", "accuracy"])
    rows = rows_of(run)
    files = sorted((tmp_path / "pictures").rglob("*.png"))
    images = torch.stack([torch.from_numpy(np.array(Image.open(f))).permute(2, 0, 1) / 255 for f in files])
    labels = torch.tensor([int(f.parent.name) for f in files])
    methods = ["gradcam", "hirescam", "edges"]
    for function, name, options in (
        (grid_pointing, "grid_pointing_{}(mosaics=9)", {"mosaics": 9}),
        (disconnected_grid, "disconnected_grid_{}", {}),
    ):
        given = function(methods, labels, model=trained, images=images, **options)  # type: ignore[arg-type]
        for method, scores in given.items():
            for part, values in scores.items():
                value, reason = rows[method, name.format(part)]
                assert value == pytest.approx(float(values.mean()), abs=1e-5) and reason == ""
                assert rows[method, name.format(f"{part}_n")][0] == len(values)
                low, high = (rows[method, name.format(f"{part}_{end}")][0] for end in ("low", "high"))
                assert low <= value <= high
    assert rows["edges", "grid_pointing_above(mosaics=9)"][0] == 0
    assert rows["edges", "disconnected_grid_above"][0] == pytest.approx(0, abs=1e-6)
    assert rows["hirescam", "disconnected_grid_outside"][0] == 0
    tests = {test.name: test for test in run.verdict().methods[0].tests}
    assert tests["grid_pointing_above(mosaics=9)"].n == 9 and not any(test.votes for test in tests.values())
    assert "above chance: +" in str(tests["grid_pointing_above(mosaics=9)"])


def test_what_cannot_be_measured_in_a_run_is_reported_and_the_run_goes_on(
    tmp_path: Path, trained: nn.Sequential
) -> None:
    run = run_of(tmp_path, trained, [f"{name}(confident=1.0)" for name in NAMES] + ["accuracy"])
    rows = rows_of(run)
    for (_, metric), (value, reason) in rows.items():
        if metric.partition("(")[0].endswith("_n"):
            assert value == 0
        else:
            why = (
                "there is no interval"
                if "_low" in metric or "_high" in metric
                else "a probability of at least 1"
            )
            assert math.isnan(value) and why in reason
    assert run.status().state == "complete"


def test_a_metric_that_comes_late_gets_the_same_rows(tmp_path: Path, trained: nn.Sequential) -> None:
    """Whatever the batch size, which a mosaic knows nothing of."""
    for name in "ab":
        (tmp_path / name).mkdir()
    at_once = rows_of(run_of(tmp_path / "a", trained, ["grid_pointing"], 24, batch_size=24))
    run_of(tmp_path / "b", trained, ["accuracy"], 24)
    late = rows_of(run_of(tmp_path / "b", trained, ["accuracy", "grid_pointing"], 24))
    assert late.keys() == at_once.keys()
    assert all(value == pytest.approx(at_once[key][0], abs=1e-5) for key, (value, _) in late.items())


def test_mosaic_tests_belong_to_the_map_question() -> None:
    assert {metrics.get(name).question for name in NAMES} == {"map"}
    assert [request.text for request in read_metrics([*NAMES])] == [*NAMES]
    assert all(request.per_method and request.runs_network for request in read_metrics([*NAMES]))


@BOTH
def test_numbers_do_not_depend_on_the_batch(function: Any, trained: nn.Sequential) -> None:
    images, labels = patches(80)
    whole, pieces = (
        function(["gradcam", "random"], labels, model=trained, images=images, batch_size=size)
        for size in (64, 3)
    )
    for method, scores in whole.items():
        for name, values in scores.items():
            assert len(values) == 20 and torch.allclose(values, pieces[method][name], atol=1e-4)
