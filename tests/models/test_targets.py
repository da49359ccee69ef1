"""What is explained: a class, a class in a region, a box, a value, a similarity, a function of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import small_cnn
from heatproof.errors import HeatproofError
from heatproof.models.accel import Graphs
from heatproof.models.dense_heads import Detection, Segmentation, box_overlap
from heatproof.models.derived import untrained_copy
from heatproof.models.heads import Embedding, Regression
from heatproof.models.layers import default_layer, guessed_layer, why
from heatproof.models.model import bind_targets, with_head

SIDE = 16


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def gradient_of(score: Any, given: Tensor) -> Tensor:
    """ "b H W", by hand: the sum over channels of the gradient's size."""
    inputs = given.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(inputs).sum(), inputs)
    return gradient.abs().sum(1)


def pixels() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 3, padding=1)).eval()


# --- functions of the output --------------------------------------------------------------------------------


def test_a_function_of_the_output_is_explained_as_it_is() -> None:
    net = small_cnn(4).eval()

    def gap(output: Tensor) -> Tensor:
        return output[:, 2] - output[:, 0]

    result = hp.explain(net, images(), "gradient", gap)["gradient"]
    torch.testing.assert_close(
        result.values, gradient_of(lambda x: gap(net(x)), images()), rtol=1e-4, atol=1e-6
    )
    both = hp.explain(net, images(), ["gradcam", "rise(masks=4)"], gap)
    assert torch.isfinite(both["rise(masks=4)"].values).all()
    scores = hp.metrics.insertion_deletion(both["gradcam"], gap, model=net, images=images(), steps=4)  # type: ignore[call-overload]
    ends = scores.insertion[:, [0, -1]]
    assert ((ends == torch.tensor([0.0, 1.0])).all(1) | ends.isnan().all(1)).all()


@pytest.mark.parametrize("wrong", [lambda z: z, lambda z: z.mean(), lambda z: 1.0])
def test_a_function_that_gives_no_number_per_image_raises_a_clear_error(wrong: Any) -> None:
    with pytest.raises(HeatproofError, match=r"one number per image, shape \(3,\)"):
        hp.explain(small_cnn(4).eval(), images(), "gradient", wrong)


def test_what_was_recorded_of_a_network_with_one_head_is_not_replayed_for_another() -> None:
    model = hp.load_model(small_cnn(4).eval())
    model.logits(images())
    model.facts.acceleration.graphs, model.facts.columns = Graphs(), 4
    other = with_head(model, Regression())
    assert other.facts.acceleration.graphs is None and other.facts.columns is None
    assert other.facts.fits is model.facts.fits
    assert model.head_name == "softmax" and other.head_name == "regression"
    assert torch.equal(other.logits(images()).chunk(2, 1)[0], model.logits(images()))


# --- values -------------------------------------------------------------------------------------------------


def test_a_value_and_minus_the_value() -> None:
    net = small_cnn(2).eval()
    model = hp.load_model(net, head="regression")
    up, down = (hp.explain(model, images(), "gradient-x-input", t)["gradient-x-input"] for t in (1, 3))
    torch.testing.assert_close(up.signed, -down.signed)
    logits = model.logits(images())
    torch.testing.assert_close(logits, torch.cat([net(images()), -net(images())], 1).detach())
    with pytest.raises(HeatproofError, match="out of range"):
        hp.explain(model, images(), "gradient", 4)


def test_curves_of_a_value_are_shares_of_what_the_picture_has_above_its_baseline() -> None:
    class Bright(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1, 3, SIDE, SIDE), 7.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum((1, 2, 3))[:, None] + 100

    inputs = torch.zeros(2, 3, SIDE, SIDE)
    inputs[0, :, :8] = 1.0  # brighter than black, the other is black itself
    maps = inputs.sum(1) + torch.linspace(0, 1e-3, SIDE * SIDE).view(SIDE, SIDE)
    model = hp.load_model(Bright(), head="regression", preprocess=hp.images.Preprocess((SIDE, SIDE), SIDE))
    black = -torch.tensor(model.preprocess.mean) / torch.tensor(model.preprocess.std)
    inputs = inputs + black[:, None, None]
    result = hp.metrics.insertion_deletion(maps, model=model, images=inputs, steps=2, baseline="black")
    torch.testing.assert_close(result.insertion[0], torch.tensor([0.0, 1.0, 1.0]))
    torch.testing.assert_close(result.deletion[0], torch.tensor([1.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    assert result.insertion[1].isnan().all()
    assert "the head is 'regression'" in result.scores.reasons("insertion")[1]


def test_a_value_is_the_same_prediction_within_its_tolerance() -> None:
    before, after = torch.tensor([[1.0, -1.0]] * 3), torch.tensor([[1.05, -1.05], [1.2, -1.2], [0.95, -0.95]])
    assert Regression(tolerance=0.1).same(before, after, torch.zeros(3, dtype=torch.long)).tolist() == [
        True, False, True,
    ]  # fmt: skip


# --- embeddings ---------------------------------------------------------------------------------------------


def test_similarity_to_prototypes_and_to_a_file_of_them(tmp_path: Path) -> None:
    net = small_cnn(6).eval()
    prototypes = hp.load_model(net).embeddings(images(4)).view(2, 2, 6).mean(1)
    np.save(tmp_path / "prototypes.npy", prototypes.numpy())
    model = hp.load_model(net, head="embedding", references=prototypes)
    again = hp.load_model(net, references=tmp_path / "prototypes.npy")
    expected = nn.functional.cosine_similarity(net(images())[:, None], prototypes, dim=2).detach()
    torch.testing.assert_close(model.logits(images()), expected)
    assert torch.equal(again.logits(images()), model.logits(images()))
    result = hp.explain(model, images(), "gradient")["gradient"]
    assert torch.equal(result.explained, expected.argmax(1))

    def near(x: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(net(x), prototypes[1], dim=1)

    values = hp.explain(model, images(), "gradient", 1)["gradient"].values
    torch.testing.assert_close(values, gradient_of(near, images()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "embedding"}, "give load_model references"),
        ({"references": torch.ones(2, 5)}, "references have 5 numbers, the network's vectors 6"),
        ({"references": "nowhere.npy"}, "cannot read the references in nowhere.npy"),
        ({"references": torch.ones(6)}, "references are vectors 't d'"),
        ({"head": "regression", "references": torch.ones(2, 6)}, "'regression' has no references"),
        ({"head": "regression", "tolerance": -1.0}, "a tolerance is a number from 0 on"),
    ],
)
def test_references_that_do_not_fit_raise_a_clear_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HeatproofError, match=words) as caught:
        hp.load_model(small_cnn(6).eval(), **options).logits(images())
    assert "\n" not in str(caught.value)


# --- segmentation -------------------------------------------------------------------------------------------


def test_a_class_in_a_region_is_the_sum_of_its_logits_there() -> None:
    net = pixels()
    mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    mask[3:7, 2:12] = True
    result = hp.explain(net, images(), "gradient", (2, mask))["gradient"]
    expected = gradient_of(lambda x: (net(x)[:, 2] * mask).sum((1, 2)), images())
    torch.testing.assert_close(result.values, expected, rtol=1e-4, atol=1e-6)
    assert result.explained.tolist() == [2, 2, 2]
    each = torch.stack([mask, ~mask, mask.T])
    result = hp.explain(net, images(), "gradient", ([2, 0, 1], each))["gradient"]
    rows = torch.arange(3)
    expected = gradient_of(lambda x: (net(x)[rows, [2, 0, 1]] * each).sum((1, 2)), images())
    torch.testing.assert_close(result.values, expected, rtol=1e-4, atol=1e-6)


def test_without_a_region_it_is_where_the_clean_image_shows_the_class() -> None:
    net = pixels()
    predicted = net(images()).argmax(1).detach()
    result = hp.explain(net, images(), "gradient", 1)["gradient"]
    expected = gradient_of(lambda x: (net(x)[:, 1] * (predicted == 1)).sum((1, 2)), images())
    torch.testing.assert_close(result.values, expected, rtol=1e-4, atol=1e-6)
    model, columns = bind_targets(hp.load_model(net), images(), None)
    own = columns.numbers
    assert isinstance(model.head, Segmentation)
    most = [
        int((classes[classes > 0] if (classes > 0).any() else classes).mode().values)
        for classes in predicted.flatten(1)
    ]
    assert model.head.labels(own).tolist() == most


def test_the_region_stays_when_images_and_weights_change() -> None:
    model, columns = bind_targets(hp.load_model(pixels()), images(), 1)
    regions = model.head.where  # type: ignore[attr-defined]
    stranger = untrained_copy(model, images(), 0)
    assert bind_targets(stranger, images() + 1, 1)[0].head.where is stranger.head.where  # type: ignore[attr-defined]
    assert torch.equal(stranger.head.where, regions)  # type: ignore[attr-defined]
    assert torch.equal(bind_targets(model, images() * 2, None)[1].numbers, columns.numbers)


def test_the_probability_in_a_region_is_the_softmax_of_its_mean_logits() -> None:
    net = pixels()
    model, columns = bind_targets(hp.load_model(net), images(), (0, torch.ones(SIDE, SIDE)))
    expected = net(images()).mean((2, 3)).softmax(1)[:, 0].detach()
    torch.testing.assert_close(model.measured(model.logits(images()), columns.numbers), expected)


@pytest.mark.parametrize(
    ("end", "undone"), [(nn.Sigmoid(), torch.logit), (nn.Softmax(1), torch.log), (nn.Identity(), lambda z: z)]
)
def test_a_function_at_the_end_of_a_segmentation_is_undone(end: nn.Module, undone: Any) -> None:
    net = nn.Sequential(*pixels(), end).eval()
    model = hp.load_model(net)
    torch.testing.assert_close(model.logits(images()), undone(net(images())).mean((2, 3)).detach())


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ((1, torch.ones(5, 4, 4)), "a region is a mask 'H W' or one for each of 3 images"),
        ((1.5, torch.ones(SIDE, SIDE)), "targets are class numbers"),
        (7, "target 7 is out of range"),
        ([1, 2], "3 images need one target or 3"),
        (-1, "no class; they begin at 0"),
    ],
)
def test_places_that_are_not_there_raise_a_clear_error(targets: Any, words: str) -> None:
    with pytest.raises(HeatproofError, match=words):
        hp.explain(pixels(), images(), "gradient", targets)


def test_a_region_is_no_target_of_a_classifier() -> None:
    with pytest.raises(HeatproofError, match=r"for segmentation and detection.*'softmax'"):
        hp.explain(small_cnn(3).eval(), images(), "gradient", (1, torch.ones(SIDE, SIDE)))
    assert hp.explain(small_cnn(9).eval(), images(2), "gradient", (3, 4))["gradient"].explained.tolist() == [
        3,
        4,
    ]


# --- detection ----------------------------------------------------------------------------------------------


class TwoBoxes(nn.Module):
    """Two boxes of two classes; the first moves to the right as pictures get brighter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        halves = torch.stack([x[..., :8].mean((1, 2, 3)), x[..., 8:].mean((1, 2, 3))], 1)
        detections = []
        for scores in (halves * self.weight).sigmoid():
            moved = 20 * (scores[0].detach() - 0.5)
            boxes = torch.tensor([[0.0, 0, 6, 6], [8, 8, 14, 14]]) + torch.stack([moved, moved * 0])[:, None]
            detections.append({"boxes": boxes, "scores": scores, "labels": torch.tensor([1, 2])})
        return detections


def test_the_score_of_a_box_is_found_again_by_its_overlap() -> None:
    net = TwoBoxes().eval()
    dark = torch.zeros(2, 3, SIDE, SIDE)
    model, columns = bind_targets(hp.load_model(net, head="detection"), dark, 1)
    assert isinstance(model.head, Detection) and columns.numbers.tolist() == [0, 1]
    near, far = dark + 0.2, dark + 3.0
    expected = [detected["scores"][0].item() for detected in net(near)]
    assert model.scores(model.logits(near), columns.numbers).tolist() == pytest.approx(expected)
    assert model.scores(model.logits(far), columns.numbers).tolist() == [0, 0]  # it has moved away
    assert model.same(model.logits(near), model.logits(far), columns.numbers).tolist() == [False, False]
    left = hp.explain(hp.load_model(net, head="detection"), dark, "gradient", 1)["gradient"].values
    assert (left[..., :8] > 0).all() and (left[..., 8:] == 0).all()


def test_a_reference_box_is_given_or_the_best_one() -> None:
    net = hp.load_model(TwoBoxes().eval(), head="detection")
    inputs = torch.zeros(1, 3, SIDE, SIDE)
    inputs[..., 8:] = 1.0
    assert hp.explain(net, inputs, "gradient")["gradient"].explained.tolist() == [2]
    given = hp.explain(net, inputs, "gradient", (1, (0.0, 0.0, 6.0, 7.0)))["gradient"]
    assert given.explained.tolist() == [1] and (given.values[..., :8] > 0).all()
    nothing = hp.explain(net, inputs, "gradient", (1, (9.0, 9.0, 16.0, 16.0)))["gradient"]
    assert nothing.degenerate.all()
    with pytest.raises(HeatproofError, match="a box is four numbers"):
        hp.explain(net, inputs, "gradient", (1, (1.0, 2.0, 3.0)))


def test_overlap_is_that_of_torchvision() -> None:
    ops = pytest.importorskip("torchvision.ops")
    corners = 10 * torch.rand(2, 5, 2)
    first, second = (torch.cat([corner, corner + 5 * torch.rand(5, 2)], 1) for corner in corners)
    torch.testing.assert_close(box_overlap(first, second), ops.box_iou(first, second))


def test_embeddings_of_one_reference_are_the_same_within_the_tolerance() -> None:
    head = Embedding(references=torch.ones(1, 4), tolerance=0.1)
    before, after = torch.tensor([[0.5], [0.5]]), torch.tensor([[0.55], [0.7]])
    assert head.same(before, after, torch.zeros(2, dtype=torch.long)).tolist() == [True, False]


# --- where CAMs look in networks that answer place by place -------------------------------------------------


class SmallUNet(nn.Module):
    """One step down, one up, and a convolution that makes the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.middle = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.answer = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.up(self.middle(self.down(x))))


def test_cams_of_a_segmentation_look_at_its_coarsest_grid() -> None:
    model = hp.load_model(SmallUNet().eval())
    assert hp.explain(model, images(), "gradcam")["gradcam"].values.shape[1:] == (8, 8)
    assert default_layer(model, images()) == "middle" and "coarsest grid" in why(model, "middle")


@pytest.mark.parametrize(
    "name", ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_fpn"]
)
def test_cams_of_torchvision_s_dense_networks_look_at_the_backbone(name: str) -> None:
    pytest.importorskip("torchvision")
    layer = guessed_layer(hp.load_model(f"torchvision:{name}", num_classes=2))
    assert layer is not None and layer.startswith("backbone.") and layer.endswith("16.2")
