"""What a network's output is taken for: found once, read right, refused where it has no one class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, small_cnn
from heatproof.errors import HeatproofError, InputError, ModelError
from heatproof.models import probabilities
from heatproof.models.heads import Multilabel
from heatproof.models.model import as_model


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Through(nn.Module):
    """A small network whose logits go through a function."""

    def __init__(self, end: Callable[[Tensor], Any], classes: int = 5) -> None:
        super().__init__()
        self.net, self.end = small_cnn(classes), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.net(x))


@pytest.mark.parametrize(
    ("end", "classes", "head"),
    [
        (lambda z: z, 5, "softmax"),
        (lambda z: z, 1, "one logit"),
        (lambda z: z[:, 0], 1, "one logit"),
        (lambda z: z.log_softmax(1), 5, "softmax"),
        (lambda z: z.softmax(1), 5, "probabilities"),
        (nn.Softmax(1), 2, "probabilities"),
        (lambda z: torch.stack([z.softmax(1), (2 * z).softmax(1)]).mean(0), 5, "probabilities"),
        (torch.sigmoid, 1, "one probability"),
        (lambda z: nn.Sigmoid()(z).squeeze(1), 1, "one probability"),
        (lambda z: z.sigmoid_(), 1, "one probability"),
    ],
)
@pytest.mark.parametrize("gradients", [True, False])
def test_each_head_gives_the_network_s_own_probabilities(
    end: Any, classes: int, head: str, gradients: bool
) -> None:
    net = Through(end, classes).eval()
    model = as_model(net)
    assert model.head_name is None
    with torch.set_grad_enabled(gradients):
        chances = probabilities(model.logits(images()))
        expected = net(images()).detach()
    assert model.head_name == head
    if "probabilit" not in head:
        expected = probabilities(expected.view(3, -1))
    if "one" in head:
        expected = expected.view(-1) if "probability" in head else expected[:, 1]
        chances = chances[:, 1]
    torch.testing.assert_close(chances, expected)


@pytest.mark.parametrize("classes", [1, 5])
def test_logits_are_left_to_the_bit(classes: int) -> None:
    net = small_cnn(classes).eval()
    with torch.no_grad():
        expected = net(images().contiguous(memory_format=torch.channels_last))
    model = as_model(net)
    for _ in range(2):  # the pass that finds the head, and those behind it
        assert torch.equal(model.logits(images()), expected)


def test_a_softmax_at_the_end_changes_no_answer_and_no_insertion_curve() -> None:
    plain, ended = small_cnn(4).eval(), nn.Sequential(small_cnn(4), nn.Softmax(1)).eval()
    maps = {name: hp.explain(net, images(), "gradcam") for name, net in (("a", plain), ("b", ended))}
    assert torch.equal(maps["a"]["gradcam"].explained, maps["b"]["gradcam"].explained)
    scores = [
        hp.metrics.insertion_deletion(maps["a"]["gradcam"], model=net, images=images(), steps=4).insertion
        for net in (plain, ended)
    ]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)


def test_a_saturated_probability_has_a_finite_logit() -> None:
    for classes, end in ((3, lambda z: (1e4 * z).softmax(1)), (1, lambda z: (1e4 * z).sigmoid())):
        assert torch.isfinite(as_model(Through(end, classes).eval()).logits(images())).all()


@pytest.mark.parametrize("end", [torch.sigmoid, nn.Sigmoid(), lambda z: torch.special.expit(z)])
def test_several_sigmoids_are_several_labels(end: Any) -> None:
    net = Through(end, 4).eval()
    model = as_model(net)
    logits = model.logits(images())
    assert model.head_name == "multilabel" and "several labels at once" in model.head_meaning
    with torch.no_grad():
        torch.testing.assert_close(model.probabilities(logits), net(images()))
    torch.testing.assert_close(logits, as_model(net.net).logits(images()), atol=1e-5, rtol=1e-4)


def test_the_prediction_of_several_labels_is_a_set_with_a_threshold_each() -> None:
    head = Multilabel(thresholds=(0.5, 0.9, 0.1))
    odds = torch.tensor([0.6, 0.8, 0.05]).logit()
    logits = torch.stack([odds, -odds, odds])
    assert head.positive(logits).tolist() == [
        [True, False, False],
        [False, False, True],
        [True, False, False],
    ]
    assert head.predicted(logits).tolist() == [0, 2, 0]  # the highest above its threshold, in log-odds
    assert head.same(logits, logits[[2, 0, 1]], torch.zeros(3)).tolist() == [True, False, False]
    assert head.measured(logits, torch.tensor([1, 1, 0])).tolist() == pytest.approx([0.8, 0.2, 0.6])


def test_thresholds_that_do_not_fit_raise_a_clear_error() -> None:
    for words, options in (
        ("between 0 and 1", {"thresholds": [0.5, 1.5]}),
        ("'softmax' has no thresholds", {"thresholds": 0.5, "head": "softmax"}),
        ("unknown head 'multi'", {"head": "multi"}),
    ):
        with pytest.raises(HeatproofError, match=words):
            hp.load_model(small_cnn(3), **options)
    model = hp.load_model(small_cnn(3).eval(), thresholds=[0.5, 0.5])
    with pytest.raises(HeatproofError, match="2 thresholds for 3 labels"):
        model.logits(images())


def test_an_explicit_head_is_used_and_stored() -> None:
    model = hp.load_model(small_cnn(3).eval(), head="multilabel")
    assert model.head_name == "multilabel"
    logits = model.logits(images())
    assert torch.equal(model.probabilities(logits), logits.sigmoid())
    assert replace(model, name="other").head_name == "multilabel"
    wrapped = as_model(small_cnn(3).eval())
    wrapped.logits(images())
    assert wrapped.head_name == "softmax" and replace(wrapped, name="other").head_name is None


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_logits_that_happen_to_lie_between_0_and_1_stay_logits(classes: int) -> None:
    net = nn.Sequential(nn.Sigmoid(), small_cnn(classes)).eval()  # a sigmoid somewhere else
    with torch.no_grad():
        net[1][-1].weight.mul_(1e-3)
        net[1][-1].bias.fill_(0.5)
    model = as_model(net)
    torch.testing.assert_close(model.logits(images()), torch.full((3, classes), 0.5), atol=0.05, rtol=0)
    assert model.head_name == ("one logit" if classes == 1 else "softmax")


def test_a_linear_layer_whose_rows_sum_to_one_is_no_softmax() -> None:
    net = small_cnn(2).eval()
    with torch.no_grad():
        net[-1].weight.zero_()
        net[-1].bias.copy_(torch.tensor([0.25, 0.75]))
    model = as_model(net)
    model.logits(images())
    assert model.head_name == "softmax"


def test_finding_the_head_costs_no_pass() -> None:
    net = Through(torch.sigmoid, 1).eval()
    with counting(net) as passes:
        hp.explain(net, images(), ["gradcam", "eigencam"])
    assert passes.batches == [3]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda z: (z, 2 * z), r"several tables \(3, 5\) and \(3, 5\).*wrap it to return the logits"),
        (lambda z: [z, z[:, :2]], "several tables"),
        (lambda z: {"organ": z, "side": z}, "returned dict, not logits"),
        (lambda z: z[:2], r"shape \(2, 5\) for 3 images; wrap it to return one row"),
        (lambda z: z[0], r"shape \(5,\) for 3 images"),
        (lambda z: z[:, :0], "0 classes"),
        (lambda z: z[:, :, None], "'b k' logits"),
    ],
)
def test_what_is_no_single_table_is_refused(end: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        hp.explain(Through(end).eval(), images(), "gradcam")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "end",
    [
        lambda z: (z, z[:, :, None, None]),  # logits and a picture
        lambda z: (z, z.mean()),
        lambda z: (z,),
        lambda z: {"logits": z, "features": 2 * z},
    ],
)
def test_logits_beside_something_else_are_found(end: Any) -> None:
    net = Through(end).eval()
    assert torch.equal(as_model(net).logits(images()), as_model(net.net).logits(images()))


def test_a_hugging_face_multi_label_classifier_is_known(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3,
        problem_type="multi_label_classification",
    )  # fmt: skip
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    model = hp.load_model(f"hf:{tmp_path}")
    hp.explain(model, images(), "gradcam")
    assert model.head_name == "multilabel"


def test_half_precision_probabilities_are_known() -> None:
    model = as_model(nn.Sequential(small_cnn(7), nn.Softmax(1)).eval().to(torch.bfloat16))
    assert probabilities(model.logits(images())).sum(1).tolist() == pytest.approx([1, 1, 1])
    assert model.head_name == "probabilities"


# --- what a network may do that others do not ---------------------------------------------------------------


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_cnn()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(0.5).sub_(0.1))


@pytest.mark.parametrize(
    "method",
    [
        "gradcam",
        "gradient",
        "integrated-gradients(steps=4)",
        "ablationcam",
        "rise(masks=4)",
        "lime(samples=8)",
    ],
)
def test_a_network_that_writes_to_its_input_leaves_the_images_alone(method: str) -> None:
    class Kind(WritesToItsInput):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.mul(0.5).sub(0.1))

    given = images().contiguous(memory_format=torch.channels_last)
    before = given.clone()
    result, expected = (
        hp.explain(net.eval(), given, method, batch_size=2) for net in (WritesToItsInput(), Kind())
    )
    assert torch.equal(given, before)
    torch.testing.assert_close(result[method].values, expected[method].values)
    assert torch.equal(
        as_model(WritesToItsInput().eval()).logits(given), as_model(Kind().eval()).logits(given)
    )
    assert torch.equal(given, before)


def test_torchscript_and_meta_raise_a_clear_error() -> None:
    with pytest.warns(FutureWarning), torch.no_grad():
        traced = torch.jit.trace(small_cnn().eval(), images())
    for net, words in ((traced, "TorchScript.*give the nn.Module"), (small_cnn().to("meta"), "meta device")):
        with pytest.raises(ModelError, match=words) as caught:
            hp.explain(net, images(), "gradient")
        assert "\n" not in str(caught.value)


class Asserts(nn.Module):
    def __init__(self, wrong: Callable[[Tensor], bool], text: str = "") -> None:
        super().__init__()
        self.net, self.wrong, self.text = small_cnn(), wrong, text

    def forward(self, x: Tensor) -> Tensor:
        assert not self.wrong(x), self.text
        return self.net(x)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (
            Asserts(lambda x: True, "the tokeniser is missing"),
            "failed on images.*AssertionError: the tokeniser",
        ),
        (Asserts(lambda x: True), "failed on images of shape"),
        (Asserts(lambda x: x.shape[-1] == 32), r"cannot take images of shape \(3, 3, 32, 32\)"),
    ],
)
def test_an_assertion_is_a_wrong_size_only_where_it_is(net: nn.Module, words: str) -> None:
    with pytest.raises(HeatproofError, match=words) as caught:
        hp.explain(net.eval(), images(), "gradcam")
    assert "\n" not in str(caught.value) and ("preprocessing" in str(caught.value)) == (
        "cannot take" in words
    )


# --- pictures in place of tensors --------------------------------------------------------------------------


def test_explain_takes_picture_files_and_pillow_pictures(tmp_path: Path) -> None:
    from PIL import Image

    model = hp.load_model(small_cnn().eval(), preprocess=hp.images.Preprocess(size=(32, 32), resize=32))
    picture = Image.effect_mandelbrot((48, 40), (-3, -2.5, 2, 2.5), 20)
    picture.save(tmp_path / "cat.png")
    expected = hp.explain(model, model.preprocess(picture)[None])["gradcam"].values
    path = tmp_path / "cat.png"
    for given in (path, str(path), picture, [path], [str(path), picture]):
        for row in hp.explain(model, given)["gradcam"].values:  # type: ignore[arg-type]
            torch.testing.assert_close(row, expected[0])
    with pytest.raises(HeatproofError, match="no such image"):
        hp.explain(model, str(tmp_path / "dog.png"))
    with pytest.raises(HeatproofError, match="takes 4 channels, images have 1 or 3"):
        hp.explain(small_cnn(channels=4).eval(), path)


# --- backbones without a head ---------------------------------------------------------------------------


def headless() -> dict[str, nn.Module]:
    torchvision, timm = pytest.importorskip("torchvision"), pytest.importorskip("timm")
    resnet, vgg = torchvision.models.resnet18(), torchvision.models.vgg11()
    resnet.fc, vgg.classifier = nn.Identity(), nn.Identity()
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    dino = nn.Sequential(nn.Conv2d(3, 96, 8, 8), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    dino.append(nn.LayerNorm(96))  # the class token of DINO is normalised and returned
    return {
        "ResNet returns 512": resnet,
        "VGG returns 25088": vgg,
        "VisionTransformer returns 192": vit,
        "Sequential returns 96": dino,
    }


def test_features_are_not_explained_as_classes() -> None:
    for words, module in headless().items():
        with pytest.raises(InputError, match=f"{words} features, not class scores.*head='embedding'"):
            hp.explain(module, images(), "gradient")
        with torch.no_grad():
            features = module.eval()(images())
        similar = hp.load_model(module, references=features[:2])
        assert similar.logits(images()).shape == (3, 2)
        assert hp.load_model(module, head="softmax").logits(images()).shape == features.shape


def test_encoders_of_transformers_are_named_as_such() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**small, image_size=32, patch_size=8, projection_dim=16)
    both = transformers.CLIPConfig(text_config=small, vision_config=vision.to_dict(), projection_dim=16)
    dino = transformers.Dinov2Config(**small, image_size=32, patch_size=8)
    records = {
        "last_hidden_state, pooler_output": transformers.CLIPVisionModel(vision),
        "last_hidden_state, image_embeds": transformers.CLIPVisionModelWithProjection(vision),
        "Dinov2Model returns last_hidden_state": transformers.Dinov2Model(dino),
    }
    for words, module in records.items():
        with pytest.raises(InputError, match=f"{words}.*no classification head.*head='embedding'"):
            hp.load_model(module).logits(images())
    with pytest.raises(InputError, match=r"CLIPModel takes images and texts together.*get_image_features"):
        hp.load_model(transformers.CLIPModel(both)).logits(images())
    classifier = transformers.Dinov2ForImageClassification(dino)
    assert hp.load_model(classifier).logits(images()).shape == (3, 2)


def test_classifiers_without_a_linear_layer_at_their_end_are_classifiers() -> None:
    models = pytest.importorskip("torchvision").models
    for name in ("squeezenet1_0", "resnet18", "densenet121"):
        assert hp.load_model(models.get_model(name)).logits(images()).shape == (3, 1000)
    normed = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10))
    assert hp.load_model(normed).logits(images()).shape == (3, 10)
