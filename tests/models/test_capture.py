"""The one pass: how much it costs, that it leaves the model alone, where it works, what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torchvision
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, randomise, small_cnn
from heatproof.errors import InputError, LayerError, TargetError, UnknownNameError
from heatproof.models.capture import Tail
from heatproof.models.layers import find_module, known_scales, picture_layers
from heatproof.models.model import as_model
from heatproof.models.running import frozen_eval
from heatproof.registry import explainers, parse_call, split_calls

CAMS = ["gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam"]


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def larger() -> Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


# --- cost ---------------------------------------------------------------------------------------------


def test_seven_cams_cost_one_forward_and_one_backward(cnn: nn.Module, images: Tensor) -> None:
    with counting(cnn) as passes:
        hp.explain(cnn, images, CAMS)
    assert (passes.batches, passes.backward) == ([4], 1)


def test_the_backward_pass_stops_at_the_layer(larger: Tensor) -> None:
    module = randomise(torchvision.models.resnet18(num_classes=4))
    reached: list[str] = []
    for name in ("layer3", "layer4"):
        part = getattr(module, name)
        part.register_forward_hook(
            lambda _m, _i, output, name=name: (
                output.register_hook(lambda _g: reached.append(name)) if output.requires_grad else None
            )
        )
    hp.explain(module, larger, ["gradcam"], layer="layer4")
    assert reached == []  # layer4's output is a new leaf behind the user's hook, layer3's has no graph at all


def test_multi_scale_shares_the_same_pass(larger: Tensor) -> None:
    module = randomise(torchvision.models.resnet18(num_classes=4))
    with counting(module) as passes:
        maps = hp.explain(module, larger, [*CAMS, "ms-gradcam++"])
    assert (passes.forward, passes.backward) == (1, 1)
    assert maps["ms-gradcam++"].values.shape == (4, 64, 64)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "squeezenet1_1", "convnext_tiny"])
def test_multi_scale_reads_three_grids(name: str) -> None:
    model = hp.load_model(torchvision.models.get_model(name, num_classes=4))
    images = torch.randn(1, 3, 96, 96)
    scales = known_scales(model) or ()
    grids = {layer: layout.grid for layer, layout, _ in picture_layers(model, images)}
    assert len({grids[layer] for layer in scales}) == 3


@pytest.mark.parametrize(("batch", "passes_needed"), [(4, 16 + 1), (32, 2 + 1), (64, 1 + 1)])
def test_scorecam_costs_channels_by_batch_plus_one(
    cnn: nn.Module, images: Tensor, batch: int, passes_needed: int
):
    with counting(cnn) as passes:
        hp.explain(cnn, images[:4], "scorecam(channels=16)", batch_size=batch)
    assert passes.forward == passes_needed


def test_ablationcam_reruns_only_the_tail(larger: Tensor) -> None:
    module = randomise(torchvision.models.resnet18(num_classes=4))
    stem, tail = 0, 0

    def count_stem(*_: object) -> None:
        nonlocal stem
        stem += 1

    def count_tail(*_: object) -> None:
        nonlocal tail
        tail += 1

    module.conv1.weight.requires_grad_(False)
    original = module.conv1._conv_forward
    module.conv1._conv_forward = lambda *a: (count_stem(), original(*a))[1]
    module.fc.register_forward_hook(count_tail)
    hp.explain(module, larger[:1], "ablationcam", batch_size=128)
    # The shared pass and one recording pass run the stem; the check and 512 / 128 batches only the tail.
    assert stem == 2
    assert tail == 2 + 1 + 4


def torchvision_vit(size: int) -> nn.Module:
    return torchvision.models.VisionTransformer(size, 16, 4, 4, 96, 192, num_classes=4)


@pytest.mark.parametrize(
    "name", ["resnet18", "densenet121", "convnext_tiny", "swin_t", "vit", "mobilenet_v2"]
)
def test_the_tail_gives_the_whole_network_s_answer(name: str) -> None:
    module = torchvision_vit(64) if name == "vit" else getattr(torchvision.models, name)(num_classes=4)
    module = randomise(module)
    image = torch.randn(1, 3, 64, 64)
    maps = hp.explain(module, image, "ablationcam", targets=1)["ablationcam"]
    layer, width = hp.models.default_layer(as_model(module)), 3
    part = find_module(module, layer)  # type: ignore[arg-type]  # setting a channel to 0 in front of a ReLU does so behind it
    layout = {n: lay for n, lay, _ in picture_layers(as_model(module), image)}[layer.partition("+")[0]]

    def logit(channel: int | None) -> Tensor:
        def ablate(_m: nn.Module, _i: object, output: Tensor) -> Tensor:
            output = output.clone()
            if channel is not None:
                output.select(layout.channel_axis, channel).zero_()
            return output

        handle = part.register_forward_hook(ablate)
        with torch.no_grad():
            result = module(image)[0, 1]
        handle.remove()
        return result

    with frozen_eval(module):
        tail = Tail(as_model(module), image[0], layer)  # type: ignore[arg-type]
        assert tail.short, f"{name} fell back to whole passes"
        for channel in range(width):
            changed = tail.activation.clone()
            changed.select(layout.channel_axis, channel).zero_()
            torch.testing.assert_close(tail(changed)[0, 1], logit(channel), atol=1e-4, rtol=1e-4)
    assert maps.values.shape[1:] == layout.grid


# --- manners ------------------------------------------------------------------------------------------


def everything(module: nn.Module) -> dict[str, object]:
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "modes": [m.training for m in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in module.modules()
        ],
        "own": [sorted(k for k in m.__dict__ if k == "forward") for m in module.modules()],
        "strides": [p.stride() for p in module.parameters()],
        "random": torch.get_rng_state(),
    }


def assert_untouched(before: dict[str, object], after: dict[str, object]) -> None:
    for key in before:
        torch.testing.assert_close(
            after[key], before[key], atol=0, rtol=0, msg=f"{key} changed", equal_nan=True
        )


CHEAP = {
    "lime": "lime(samples=20)", "rise": "rise(masks=20)", "smoothgrad": "smoothgrad(samples=3)",
    "integrated-gradients": "integrated-gradients(steps=3)", "blur-ig": "blur-ig(steps=3)",
    "guided-ig": "guided-ig(steps=3)", "gradient-shap": "gradient-shap(samples=3)",
    "kernel-shap": "kernel-shap(samples=20, segment_count=9)", "occlusion": "occlusion(window=8, stride=8)",
}  # fmt: skip


# cam needs another head: tests/explain/test_cam_vectors.py
FOR_A_CNN = [e.name for e in explainers if e.architecture != "transformer" and e.name != "cam"]


def mixed_up(module: nn.Module) -> nn.Module:
    """A model in the middle of somebody's training."""
    module.train()
    module[1].eval()
    module[0].weight.requires_grad_(False)
    module[4].weight.grad = torch.ones_like(module[4].weight)
    module[7].to(memory_format=torch.channels_last)
    return module


@pytest.mark.parametrize("method", FOR_A_CNN)
def test_every_method_leaves_the_model_as_it_was(method: str, images: Tensor) -> None:
    module = mixed_up(small_cnn())
    before = everything(module)
    hp.explain(module, images, CHEAP.get(method, method))
    assert_untouched(before, everything(module))


def test_the_model_is_untouched_when_a_method_raises(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mixed_up(small_cnn())
    before = everything(module)
    with pytest.raises(InputError):
        hp.explain(module, images, ["gradcam", "scorecam(channels=-1)"])
    with pytest.raises(TargetError):
        hp.explain(module, images, "gradcam", targets=99)

    def explode(_: Tensor) -> Tensor:
        raise RuntimeError("boom")

    monkeypatch.setattr(module[9], "forward", explode)
    with pytest.raises(RuntimeError, match="boom"):
        hp.explain(module, images, ["gradcam", "ablationcam"])
    monkeypatch.undo()
    assert_untouched(before, everything(module))


def test_training_goes_on_as_if_nothing_happened(images: Tensor) -> None:
    def train(explaining: bool) -> nn.Module:
        module = small_cnn().train()
        module.insert(9, nn.Dropout(0.5))
        optimiser = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(3)
        for _ in range(3):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(images), torch.arange(4))
            if explaining:
                hp.explain(module, images, [*CAMS, "scorecam(channels=4)"])
            loss.backward()
            optimiser.step()
        return module

    for plain, watched in zip(
        train(False).state_dict().values(), train(True).state_dict().values(), strict=True
    ):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("method", FOR_A_CNN)
def test_results_do_not_depend_on_the_batch(method: str, cnn: nn.Module, images: Tensor) -> None:
    method = CHEAP.get(method, method)
    together = hp.explain(cnn, images, method, targets=2)[method]
    one_by_one = hp.explain(cnn, images, method, targets=2, batch_size=1)[method]
    backwards = hp.explain(cnn, images.flip(0), method, targets=2, batch_size=3)[method]
    # guided-ig chooses pixels by comparing gradients, so a rounding error can swap two of them.
    tolerance = 2e-2 if "guided" in method else 1e-4
    torch.testing.assert_close(one_by_one.normalised(), together.normalised(), atol=tolerance, rtol=0)
    torch.testing.assert_close(backwards.normalised().flip(0), together.normalised(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("method", ["random", "smoothgrad(samples=4)", "lime(samples=30)", "rise(masks=30)"])
def test_seeded_methods_repeat(method: str, cnn: nn.Module, images: Tensor) -> None:
    first, again, other = (hp.explain(cnn, images, method, seed=s)[method].values for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# --- where it works -----------------------------------------------------------------------------------


def test_works_without_gradients_in_inference_mode_and_under_autocast(cnn: nn.Module, images: Tensor) -> None:
    expected = hp.explain(cnn, images, CAMS, targets=1)
    with torch.no_grad():
        quiet = hp.explain(cnn, images, CAMS, targets=1)
    with torch.inference_mode():
        inferred = hp.explain(cnn, images.clone(), CAMS, targets=1)
    with torch.autocast("cpu", torch.bfloat16):
        half = hp.explain(cnn, images, CAMS, targets=1)
    for method in CAMS:
        torch.testing.assert_close(quiet[method].values, expected[method].values)
        torch.testing.assert_close(inferred[method].values, expected[method].values)
        assert half[method].values.dtype == torch.float32
        turned = replace(half[method], values=-half[method].values)  # of image 1 both sides are almost alike
        signs = (half[method], turned) if method == "eigengradcam" else (half[method],)
        gaps = [(h.normalised() - expected[method].normalised()).abs().mean((1, 2)) for h in signs]
        assert torch.stack(gaps).amin(0).mean() < 0.05, method


def test_frozen_parameters_change_nothing(cnn: nn.Module, images: Tensor) -> None:
    frozen = copy.deepcopy(cnn).requires_grad_(False)
    for method, maps in hp.explain(cnn, images, CAMS).items():
        torch.testing.assert_close(hp.explain(frozen, images, CAMS)[method].values, maps.values)


def test_a_bfloat16_model_gives_float32_maps(cnn: nn.Module, images: Tensor) -> None:
    maps = hp.explain(copy.deepcopy(cnn).bfloat16(), images, "gradcam")["gradcam"]
    assert maps.values.dtype == torch.float32
    assert torch.isfinite(maps.values).all()


def test_class_zero_of_a_one_logit_model_is_explained_through_minus_z(images: Tensor) -> None:
    first = small_cnn(classes=1).eval()
    two = copy.deepcopy(first)
    two[-1] = nn.Linear(64, 2)
    two[-1].weight.data = torch.cat([-first[-1].weight.data, first[-1].weight.data])  # type: ignore[list-item]
    two[-1].bias.data = torch.cat([-first[-1].bias.data, first[-1].bias.data])  # type: ignore[list-item]
    for target in (0, 1):
        ours = hp.explain(first, images, CAMS, targets=target)
        theirs = hp.explain(two, images, CAMS, targets=target)
        for method in CAMS:
            torch.testing.assert_close(ours[method].values, theirs[method].values)
    predicted = hp.explain(first, images, "gradcam")["gradcam"].explained
    assert torch.equal(predicted, (first(images)[:, 0] > 0).long())


class Unlisted(nn.Module):
    """Registers its parts in another order than it runs them, so names do not tell the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Conv2d(8, 8, 3, padding=1)
        self.early = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.late(self.early(x).relu()).relu())).flatten(1)


def test_an_unknown_network_is_searched_once(images: Tensor) -> None:
    model = hp.Model(Unlisted().eval())
    maps = hp.explain(model, images, "gradcam")["gradcam"]
    assert (model.layer, maps.values.shape) == ("late", (4, 32, 32))
    with counting(model.module) as passes:
        hp.explain(model, images, "gradcam")
    assert passes.forward == 1


def test_memory_running_out_shrinks_the_batch(cnn: nn.Module, images: Tensor) -> None:
    seen: list[int] = []

    def short_of_memory(_m: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(len(args[0]))
        if len(args[0]) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    expected = hp.explain(cnn, images, "scorecam(channels=8)")["scorecam(channels=8)"]
    handle = cnn.register_forward_pre_hook(short_of_memory)
    maps = hp.explain(cnn, images[:2], "scorecam(channels=8)")["scorecam(channels=8)"]
    handle.remove()
    torch.testing.assert_close(maps.values, expected.values[:2])
    assert max(seen) == 16 and all(n <= 3 for n in seen[5:])


# --- what it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"methods": "gradcan"}, UnknownNameError, "unknown method 'gradcan'; did you mean 'gradcam'"),
        ({"methods": []}, InputError, "no method is named"),
        ({"methods": "lime(sample=3)"}, InputError, "lime has no option 'sample'; did you mean 'samples'"),
        ({"methods": "lime(3"}, InputError, "cannot read"),
        ({"layer": "7x"}, UnknownNameError, "unknown layer '7x'"),
        ({"layer": "11"}, LayerError, r"layer '11' .* layers that would do"),
        ({"images": torch.zeros(2, 1, 32, 32)}, InputError, r"cannot take images .* makes 3x224x224"),
        ({"images": torch.zeros(3, 32, 32)}, InputError, r"add a batch axis with images\[None\]"),
        ({"images": torch.zeros(0, 3, 32, 32)}, InputError, "the batch is empty"),
        ({"images": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}, InputError, "normalised floats"),
        ({"images": torch.full((2, 3, 32, 32), torch.nan)}, InputError, r"infinite pixels \(image 0, 1\)"),
        ({"targets": 5}, TargetError, "target 5 is out of range; the model has classes 0 to 4"),
        ({"targets": [0, 1, 2]}, TargetError, "need one target or 4"),
        ({"targets": 0.5}, TargetError, "class numbers"),
        ({"ids": ["a"]}, InputError, "ids has 1 entries"),
        ({"seed": -1}, InputError, "seed must be 0 or more"),
        ({"batch_size": 0}, InputError, "batch_size must be at least 1"),
    ],
)  # fmt: skip
def test_bad_input_raises_a_clear_error(
    change: dict, error: type, sentence: str, cnn: nn.Module, images: Tensor
):
    arguments = {"images": images, "methods": "gradcam"} | change
    with pytest.raises(error, match=sentence) as caught:
        hp.explain(cnn, **arguments)
    assert "\n" not in str(caught.value)


def test_a_wrong_image_size_raises_a_clear_error() -> None:
    vit = torchvision_vit(32).eval()
    with pytest.raises(InputError, match=r"cannot take images of shape \(1, 3, 48, 48\)"):
        hp.explain(vit, torch.zeros(1, 3, 48, 48), "gradcam")


def test_a_token_grid_that_cannot_be_found_names_layers(images: Tensor) -> None:
    class Sevens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3 * 32 * 32, 7 * 4)
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.embed(x.flatten(1)).unflatten(1, (7, 4))).mean(1))

    # Seven tokens are 6 behind a prefix, 5 behind two ...: none but 4 (and a prefix of 3) is a square grid.
    with pytest.raises(LayerError, match=r"layer 'embed' .* no grid of a 32x32 image"):
        hp.explain(Sevens(), images, "gradcam", layer="embed")


def test_options_are_read_from_the_name() -> None:
    assert parse_call("eigencam(centred=true)") == ("eigencam", {"centred": True})
    nested = "f(a=1, b=(2,3))"
    assert split_calls(nested) == [nested]
    assert split_calls(f"{nested}, g(c=[1, (2, 3)], d='x),y') , h") == [
        nested,
        "g(c=[1, (2, 3)], d='x),y')",
        "h",
    ]
    assert explainers.get("Grad-CAM++").name == explainers.get("gradcampp").name == "gradcam++"
