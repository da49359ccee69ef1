"""Methods of other packages: bit for bit what they are when called directly, and no trace of them is left."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import same, small_cnn, state_of
from heatproof.errors import (
    HeatproofError,
    InputError,
    LayerError,
    MissingExtraError,
    ModelError,
    UnknownNameError,
)
from heatproof.explain import providers
from heatproof.explain.api import read_methods
from heatproof.explain.providers import offered
from heatproof.registry import explainers
from heatproof.types import Signed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    captum = pytest.importorskip("captum.attr")
    grad_cam = pytest.importorskip("pytorch_grad_cam")
    zennit_attribution = pytest.importorskip("zennit.attribution")
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    from zennit import canonizers, composites

TARGETS = torch.tensor([1, 3])
LAYER = "body.8"  # behind its activation
SEED = 5


class Net(nn.Module):
    """Without in-place functions, which hooks refuse, and Flatten, which captum's LRP does not know."""

    def __init__(self) -> None:
        super().__init__()
        *body, _flatten, self.head = small_cnn()
        self.body = nn.Sequential(*body)
        for part in self.body:
            if isinstance(part, nn.ReLU):
                part.inplace = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def network() -> Net:
    return Net().eval()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def ours(call: str) -> hp.Maps:
    return hp.explain(network(), images(), [call], TARGETS, layer=LAYER, seed=SEED)[call]


def theirs(make) -> Tensor:
    """What a user would write, with the seed that we are given."""
    net, pictures = network(), images().requires_grad_()
    torch.manual_seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(net, pictures).detach()


OF_PIXELS: dict[str, Any] = {
    "Saliency": {}, "Saliency(abs=false)": {"abs": False}, "InputXGradient": {}, "GuidedBackprop": {},
    "Deconvolution": {}, "DeepLift": {}, "IntegratedGradients(n_steps=7)": {"n_steps": 7},
    "IntegratedGradients(n_steps=4, method='riemann_trapezoid', baselines=0.5)":
        {"n_steps": 4, "method": "riemann_trapezoid", "baselines": 0.5},
    "GradientShap(baselines=0, n_samples=3, stdevs=0.1)":
        {"baselines": torch.zeros(2, 3, 16, 16), "n_samples": 3, "stdevs": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("call", OF_PIXELS)
def test_captum_s_attributions_of_pixels_are_its_own(call: str) -> None:
    kind = getattr(captum, call.partition("(")[0])
    direct = theirs(lambda net, x: kind(net).attribute(x, target=TARGETS, **OF_PIXELS[call]))
    maps = ours(f"captum:{call}")
    assert torch.equal(maps.values, direct.abs().sum(1)) and torch.equal(maps.signed, direct.sum(1))
    assert direct.any() and maps.explained.tolist() == TARGETS.tolist()


SUMMED: dict[str, Any] = {
    "LRP": {}, "Occlusion(sliding_window_shapes=(3, 5, 5), strides=(3, 4, 4))":
        {"sliding_window_shapes": (3, 5, 5), "strides": (3, 4, 4)},
    "FeatureAblation(perturbations_per_eval=16)": {"perturbations_per_eval": 16},
    "KernelShap(n_samples=20)": {"n_samples": 20}, "Lime(n_samples=20)": {"n_samples": 20},
}  # fmt: skip


@pytest.mark.parametrize("call", SUMMED)
def test_captum_s_relevance_and_drops_keep_their_signs(call: str) -> None:
    kind = getattr(captum, call.partition("(")[0])
    direct = theirs(lambda net, x: kind(net).attribute(x, target=TARGETS, **SUMMED[call]))
    assert torch.equal(ours(f"captum:{call}").values, direct.sum(1))
    assert direct.any() or "Lime" in call  # whose lasso finds nothing among so many features


@pytest.mark.parametrize(
    "call",
    ["LayerGradCam", "LayerGradientXActivation", "LayerConductance(n_steps=5)",
     "InternalInfluence(n_steps=5)", "LayerIntegratedGradients(n_steps=5)", "LayerDeepLift",
     "LayerActivation"],
)  # fmt: skip
def test_captum_layer_methods_use_our_layer(call: str) -> None:
    name = call.partition("(")[0]
    options: dict[str, Any] = {"n_steps": 5} if "n_steps" in call else {}
    options |= {} if name == "LayerActivation" else {"target": TARGETS}
    direct = theirs(lambda net, x: getattr(captum, name)(net, net.body[8]).attribute(x, **options))
    maps = ours(f"captum:{call}")
    assert torch.equal(maps.values, direct.sum(1)) and maps.values.shape[1:] == (4, 4)


def test_captum_s_guided_grad_cam_is_of_pixels() -> None:
    direct = theirs(lambda net, x: captum.GuidedGradCam(net, net.body[8]).attribute(x, target=TARGETS))
    assert torch.equal(ours("captum:GuidedGradCam").values, direct.abs().sum(1))


@pytest.mark.parametrize(
    "call",
    ["GradCAM", "GradCAMPlusPlus", "HiResCAM", "XGradCAM", "LayerCAM", "EigenCAM", "EigenGradCAM", "FullGrad",
     "GradCAMElementWise", "ScoreCAM", "AblationCAM", "RandomCAM", "GradCAM(eigen_smooth=true)",
     "LayerCAM(aug_smooth=true)"],
)  # fmt: skip
def test_grad_cam_s_maps_are_its_own(call: str) -> None:
    name = call.partition("(")[0]
    smooth = {option: True for option in ("eigen_smooth", "aug_smooth") if option in call}

    def direct(net: nn.Module, x: Tensor) -> Tensor:
        with getattr(grad_cam, name)(net, [] if name == "FullGrad" else [net.body[8]]) as cam:
            return torch.from_numpy(cam(x, [ClassifierOutputTarget(int(t)) for t in TARGETS], **smooth))

    maps = ours(f"grad-cam:{call}")
    assert torch.equal(maps.values, theirs(direct)) and maps.values.shape[1:] == (16, 16)
    assert not maps.degenerate.all()


COMPOSITES = {
    "EpsilonPlus": lambda: composites.EpsilonPlus(), "EpsilonPlusFlat": lambda: composites.EpsilonPlusFlat(),
    "EpsilonAlpha2Beta1": lambda: composites.EpsilonAlpha2Beta1(),
    "EpsilonPlus(epsilon=0.1)": lambda: composites.EpsilonPlus(epsilon=0.1),
    "EpsilonPlus(canonizers='SequentialMergeBatchNorm')":
        lambda: composites.EpsilonPlus(canonizers=[canonizers.SequentialMergeBatchNorm()]),
    "EpsilonGammaBox(low=-3, high=3)":
        lambda: composites.EpsilonGammaBox(*(k * torch.ones(2, 3, 16, 16) for k in (-3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("call", COMPOSITES)
def test_zennit_s_relevance_is_its_own(call: str) -> None:
    one_hot = torch.eye(5)[TARGETS]
    direct = theirs(lambda net, x: zennit_attribution.Gradient(net, COMPOSITES[call]())(x, one_hot)[1])
    assert torch.equal(ours(f"zennit:{call}").values, direct.sum(1)) and direct.any()


@pytest.mark.parametrize("call", ["Gradient", "SmoothGrad(n_iter=4)", "IntegratedGradients(n_iter=4)"])
def test_zennit_s_attributors_are_its_own(call: str) -> None:
    name, one_hot = call.partition("(")[0], torch.eye(5)[TARGETS]
    options = {"n_iter": 4} if "n_iter" in call else {}
    direct = theirs(lambda net, x: getattr(zennit_attribution, name)(net, **options)(x, one_hot)[1])
    maps = ours(f"zennit:{call}")
    assert torch.equal(maps.values, direct.abs().sum(1)) and torch.equal(maps.signed, direct.sum(1))


def test_lime_s_weights_are_its_own() -> None:
    """The package called as its documentation does, on images in [0, 1]."""
    lime_image = pytest.importorskip("lime.lime_image")
    net, preprocess = network(), hp.load_model(network()).preprocess
    rough = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    pictures = nn.functional.interpolate(rough, 96)

    def predict(batch: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return (
                net(preprocess.normalise(torch.from_numpy(batch).permute(0, 3, 1, 2).float()))
                .softmax(1)
                .numpy()
            )

    call = "lime:LimeImageExplainer(num_samples=30, hide_color=0)"
    maps = hp.explain(net, preprocess.normalise(pictures), [call], TARGETS, seed=SEED)[call]
    for picture, target, heat in zip(pictures, TARGETS.tolist(), maps.values, strict=True):
        explainer = lime_image.LimeImageExplainer(random_state=SEED)
        explained = explainer.explain_instance(
            preprocess.restore(preprocess.normalise(picture[None]))[0].permute(1, 2, 0).double().numpy(),
            predict, labels=(target,), top_labels=None, hide_color=0, num_samples=30, random_seed=SEED,
        )  # fmt: skip
        assert len(np.unique(explained.segments)) > 1
        for segment, weight in explained.local_exp[target]:
            own = heat[torch.from_numpy(explained.segments == segment)]
            assert torch.allclose(own, torch.tensor(weight, dtype=torch.float32), atol=1e-6)
    few = call.replace("num", "num_features=2, num", 1)
    for heat in hp.explain(net, preprocess.normalise(pictures), [few], TARGETS, seed=SEED)[few].values:
        assert len(heat.unique()) <= 3 and (heat == 0).any()  # segments that lime does not select


NEEDED = {
    "Occlusion": "sliding_window_shapes=(3, 4, 4)", "DeepLiftShap": "baselines=0",
    "GradientShap": "baselines=0", "LayerDeepLiftShap": "baselines=0", "LayerGradientShap": "baselines=0",
    "FeatureAblation": "feature_mask='slic'", "ShapleyValueSampling": "feature_mask='slic', n_samples=2",
    "Lime": "feature_mask='slic', n_samples=8", "KernelShap": "feature_mask='slic', n_samples=8",
    "IntegratedGradients": "n_steps=4, baselines='blur'",
}  # fmt: skip
EVERY = [
    *(f"captum:{name}({NEEDED.get(name, '')})" for name in offered("captum") if name != "ShapleyValues"),
    *(f"grad-cam:{name}" for name in offered("grad-cam")),
    *(f"zennit:{name}" for name in offered("zennit")),
    *(f"lime:{name}(num_samples=8)" for name in offered("lime")),
]


@pytest.mark.parametrize("call", [call.replace("()", "") for call in EVERY])
def test_every_method_that_is_offered_runs_and_leaves_the_network_alone(call: str) -> None:
    net = network().train()
    next(net.parameters()).requires_grad_(False)
    net.head.weight.grad = torch.ones_like(net.head.weight)  # type: ignore[arg-type]
    torch.manual_seed(3)
    before, numbers = state_of(net), np.random.get_state()[1].copy()  # noqa: NPY002
    maps = hp.explain(net, images(), [call], TARGETS, seed=SEED)[call]
    assert same(before, state_of(net)) and torch.equal(net.head.weight.grad, torch.ones_like(net.head.weight))  # type: ignore[arg-type]
    assert np.array_equal(numbers, np.random.get_state()[1])  # noqa: NPY002
    assert torch.isfinite(maps.values).all() and maps.values.ndim == 3 and not maps.values.requires_grad
    assert torch.equal(maps.values, hp.explain(net, images(), [call], TARGETS, seed=SEED)[call].values)


def test_one_logit_has_two_classes() -> None:
    net = small_cnn(1).eval()
    signed = [hp.explain(net, images(), "captum:Saliency(abs=false)", k).popitem()[1].signed for k in (0, 1)]
    assert torch.equal(signed[0], -signed[1]) and signed[0].any()


def test_a_transformer_s_tokens_are_a_picture_for_grad_cam() -> None:
    from conftest import small_vit

    maps = hp.explain(small_vit(), images(), ["grad-cam:GradCAM", "gradcam"], TARGETS)
    cam, own = maps["grad-cam:GradCAM"].values, maps["gradcam"].upsample()
    assert torch.corrcoef(torch.stack([cam.flatten(), own.flatten()]))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            "captum:IntegratedGradient",
            UnknownNameError,
            r"unknown method of captum .* did you mean 'IntegratedGrad",
        ),
        ("grad-cam:GradCam3", UnknownNameError, "did you mean 'GradCAM'"),
        ("zennit:Nothing at all", UnknownNameError, "known: EpsilonPlus, "),
        ("captun:Saliency", UnknownNameError, "unknown package of methods 'captun'; did you mean 'captum'"),
        (
            "captum:Occlusion",
            InputError,
            r"needs sliding_window_shapes; write captum:Occlusion\(sliding_window_",
        ),
        ("captum:GradientShap", InputError, "needs baselines"),
        ("captum:IntegratedGradients(steps=3)", InputError, "has no option 'steps'; did you mean 'n_steps'"),
        ("grad-cam:GradCAM(target_layers=1)", InputError, "has no option 'target_layers'"),
        ("zennit:EpsilonPlus(canonizers='Nobody')", InputError, "zennit has no canonizer 'Nobody'"),
        (
            "captum:IntegratedGradients(method='nobody')",
            ModelError,
            r"captum:IntegratedGradients failed on Net",
        ),
        ("captum:IntegratedGradients(baselines='grey')", InputError, "unknown baseline 'grey'"),
    ],
)
def test_what_cannot_be_raises_a_clear_error(call: str, error: type, words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        hp.explain(network(), images(), call)
    assert "\n" not in str(raised.value)


def test_an_absent_package_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"captum, which is not installed; run: pip install captum$"):
        read_methods("captum:DeconvolutioN")  # no other test asks for it in these letters


def test_case_and_hyphens_do_not_matter() -> None:
    assert explainers.get("gradcam:grad-cam-plus-plus").name == "grad-cam:GradCAMPlusPlus"


def test_a_failing_package_leaves_no_hook_behind() -> None:
    net = small_cnn().eval()  # ends in Flatten, for which captum's LRP has no rule; those before it get one
    before, held = state_of(net), [set(vars(part)) for part in net]
    with pytest.raises(ModelError, match=r"captum:LRP failed on Sequential: TypeError: Module of type"):
        hp.explain(net, images(), "captum:LRP")
    assert same(before, state_of(net)) and held == [set(vars(part)) for part in net]


def test_a_function_behind_a_layer_is_no_module() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.conv(x)).mean((2, 3)))

    with pytest.raises(LayerError, match=r"name a module, such as layer='conv'"):
        hp.explain(Functional(), images(), "grad-cam:GradCAM")
    assert hp.explain(Functional(), images(), "grad-cam:GradCAM", layer="conv")


def test_naming_methods_imports_no_package() -> None:
    script = (
        "import sys\nfrom heatproof.registry import explainers\n"
        "for name in ('captum:LRP', 'grad-cam:GradCAM', 'zennit:EpsilonPlus', 'x.py:f', 'files:{id}.npy'):\n"
        "    assert explainers.get(name).summary\n"
        "heavy = {'captum', 'pytorch_grad_cam', 'zennit'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- functions of the user's ------------------------------------------------------------------------------


def brightness(model: nn.Module, images: Tensor, targets: Tensor, *, power: float = 1.0) -> Tensor:
    """The pixels themselves."""
    return images.mean(1).abs() ** power


def test_a_function_is_a_method_by_its_name_or_another() -> None:
    arguments = {}

    def own(model: nn.Module, images: Tensor, targets: Tensor) -> np.ndarray:
        arguments.update(model=model, targets=targets)
        score = model(images.requires_grad_()).gather(1, targets[:, None]).sum()
        return torch.autograd.grad(score, images)[0].sum(1, keepdim=True).numpy()

    net = network()
    maps = hp.explain(net, images(), [brightness, "gradient", own], TARGETS)
    assert list(maps) == ["brightness", "gradient", "own"] and maps["own"].method == "own"
    assert arguments["model"] is net and arguments["targets"].tolist() == TARGETS.tolist()
    assert torch.equal(maps["brightness"].values, images().mean(1).abs())
    torch.testing.assert_close(maps["own"].values, maps["gradient"].signed)
    named = hp.explain(net, images(), {"mine": own, "squared": lambda m, x, t: brightness(m, x, t, power=2)})
    assert list(named) == ["mine", "squared"] and named["squared"].values.min() >= 0
    again = hp.explain(net, images(), ["brightness(power=2)"])["brightness(power=2)"]
    assert torch.equal(again.values, named["squared"].values)


def test_a_metric_runs_a_function_again() -> None:
    inputs: dict[str, Any] = {"model": network(), "images": images()}
    result = hp.metrics.fragility([brightness, "gradcam"], **inputs, draws=1)  # type: ignore[list-item]
    assert set(result) == {"brightness", "gradcam"} and float(result["brightness"]["ssim"].min()) > 0.9


def test_a_function_s_signs_are_kept() -> None:
    def signed(model: nn.Module, images: Tensor, targets: Tensor) -> Signed:
        return Signed(images.abs().sum(1), images.sum(1))

    assert torch.equal(hp.explain(network(), images(), signed)["signed"].signed, images().sum(1))


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"gradcam": brightness}, "the name 'gradcam' is taken"),
        ({"a(b)": brightness}, "is not a valid method name"),
        ({"a": "gradcam"}, "a table of methods holds functions"),
        (
            [brightness, type("B", (), {"__name__": "brightness", "__call__": lambda *a: 0})()],
            "two methods are",
        ),
        (lambda m, x, t: x, r"returned shape \(2, 3, 16, 16\), not 'b h w'; sum over its channels"),
        (lambda m, x, t: x.mean((1, 2)), r"returned shape \(2, 16\), not 'b h w'"),
        (lambda m, x, t: {"a": 1}, "returned dict, not maps"),
    ],
)
def test_a_function_that_cannot_be_a_method_raises_a_clear_error(methods: object, words: str) -> None:
    with pytest.raises(HeatproofError, match=words):
        hp.explain(network(), images(), methods)  # type: ignore[arg-type]


def test_a_function_in_a_file_is_run_when_the_method_is(tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    (tmp_path / "mine.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "def pixels(model, images, targets, power=1, *, scale=2.0):\n"
        "    return scale * images.mean(1) ** power\n"
    )
    name = f"{tmp_path}/mine.py:pixels"
    calls = read_methods([f"{name}(power=2)"])
    assert calls[0].entry.options == {"power": 1, "scale": 2.0} and not mark.exists()
    maps = hp.explain(network(), images(), [f"{name}(power=2)"])[f"{name}(power=2)"]
    assert torch.equal(maps.values, 2 * images().mean(1) ** 2) and mark.exists()
    with pytest.raises(InputError, match="has no option 'pow'; did you mean 'power'"):
        read_methods([f"{name}(pow=2)"])
    with pytest.raises(UnknownNameError, match=r"unknown function in mine.py 'pixel'; did you mean 'pixels'"):
        hp.explain(network(), images(), f"{tmp_path}/mine.py:pixel")
    with pytest.raises(InputError, match=r"cannot read .*nothing.py"):
        hp.explain(network(), images(), f"{tmp_path}/nothing.py:f")


def test_a_module_that_runs_twice_is_refused_with_one_that_runs_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 6, 3, 2)
            self.relu, self.head = nn.ReLU(), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.relu(self.second(self.relu(self.first(x)))).mean((2, 3)))

    net = Twice().eval()
    assert hp.explain(net, images(), "gradcam")["gradcam"].values.shape[1:] == (3, 3)  # behind its last run
    with pytest.raises(
        LayerError, match=r"'relu' runs 2 times in Twice; name another, such as layer='second'"
    ):
        hp.explain(net, images(), "grad-cam:GradCAM")
    assert hp.explain(net, images(), "grad-cam:GradCAM", layer="second")
