"""Which parameters a depth means, for the families people use, and new heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import small_cnn
from heatproof import explain
from heatproof.errors import InputError, LayerError
from heatproof.models import Model, as_model, default_layer, load_model
from heatproof.train import DEPTHS, new_head, small_net, trained_parts

# The first module with a weight that is trained at L4 and at L3-L4, and the head.
FAMILIES = {
    "torchvision:resnet18": "layer4.0.conv1 layer3.0.conv1 fc",
    "torchvision:densenet121": "features.transition3.norm features.transition2.norm classifier",
    "torchvision:convnext_tiny": "features.6.0 features.4.0 classifier.2",
    "timm:convnext_atto": "stages.3.downsample.0 stages.2.downsample.0 head.fc",
    "torchvision:efficientnet_b0": "features.6.0.block.0.0 features.4.0.block.0.0 classifier.1",
    "torchvision:squeezenet1_1": "features.9.squeeze features.6.squeeze classifier.1",
    "timm:vit_tiny_patch16_224": "blocks.9.norm1 blocks.6.norm1 head",
    "torchvision:swin_t": "features.6.reduction features.4.reduction head",
    "lite0": "_blocks.11._expand_conv _blocks.5._expand_conv _fc",
}  # fmt: skip


FIXED_SIZE = ("timm:vit_tiny_patch16_224", "torchvision:swin_t")


def picture(model: Model) -> torch.Tensor:
    return torch.zeros(1, model.preprocess.channels, *model.preprocess.size)


@pytest.mark.parametrize("spec", FAMILIES)
def test_stages_and_heads_of_known_and_unknown_families(spec: str) -> None:
    model = load_model(spec)
    if spec not in FIXED_SIZE:  # small pictures, to be quick
        model.preprocess = replace(model.preprocess, size=(64, 64))
    image = picture(model)
    names = [name for name, _ in model.module.named_parameters()]
    parts = {depth: trained_parts(model, image, depth) for depth in DEPTHS}
    first = {depth: next(n for n in names if n in parts[depth].parameters) for depth in DEPTHS}
    assert [first[depth] for depth in ("L4", "L3-L4", "head")] == [
        f"{n}.weight" for n in FAMILIES[spec].split()
    ]
    sets = [parts[depth].parameters for depth in DEPTHS]
    assert sets[0] < sets[1] < sets[2] < sets[3] == set(names)
    for depth in ("head", "L4", "L3-L4"):  # no gap: from the first on, in order of execution, all are trained
        behind = names[names.index(first[depth]) :]
        assert parts[depth].parameters <= set(behind) | {"norm.weight", "norm.bias"}
    norms = {n for n, m in model.module.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for depth in ("head", "L4"):
        for norm in norms:
            assert (norm in parts[depth].modules) == (f"{norm}.weight" in parts[depth].parameters), norm
    with_new = new_head(model, 3)
    assert with_new.logits(image).shape == (1, 3)
    assert trained_parts(with_new, image, "head").parameters == parts["head"].parameters


def test_stages_do_not_depend_on_an_earlier_search_for_layers() -> None:
    model = as_model(small_cnn().eval())
    image = torch.rand(1, 3, 32, 32)
    before = trained_parts(model, image, "L4")
    explain(model, image, "ms-gradcam++")
    assert model.scales is not None and trained_parts(model, image, "L4") == before
    assert before.parameters == {"7.weight", "7.bias", "11.weight", "11.bias"}


def test_attention_projections_go_with_their_block() -> None:
    """torch's attention never calls its output projection; it is trained with the block around it."""
    vision_transformer = pytest.importorskip("torchvision").models.VisionTransformer
    model = as_model(vision_transformer(32, 8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32).eval())
    trained = trained_parts(model, picture(model), "L4").parameters
    assert "encoder.layers.encoder_layer_3.self_attention.out_proj.weight" in trained
    assert "encoder.layers.encoder_layer_2.self_attention.out_proj.weight" not in trained
    assert "class_token" not in trained


def test_modules_named_by_hand() -> None:
    model = small_net(size=32)
    parts = trained_parts(model, picture(model), ("layer2.3", "fc"))
    assert parts.parameters == {"layer2.3.weight", "fc.weight", "fc.bias"}
    assert "layer2.1" not in parts.modules
    with pytest.raises(InputError, match="nothing under pool has parameters"):
        trained_parts(model, picture(model), ("pool",))


def test_a_network_without_stages_is_told_what_to_do() -> None:
    flat = as_model(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    )
    with pytest.raises(LayerError, match="use depth 'all' or name the modules"):
        trained_parts(flat, torch.zeros(1, 3, 16, 16), "L4")
    odd = as_model(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4))
    )
    with pytest.raises(LayerError, match="not a linear layer"):
        trained_parts(odd, torch.zeros(1, 3, 16, 16), "head")


def test_a_new_head_follows_its_seed_and_leaves_the_rest() -> None:
    models = [small_net(5, 32, seed=0) for _ in range(3)]
    body = models[0].module.layer4[0].weight.clone()
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    heads = [new_head(m, 2, ("no", "yes"), seed) for m, seed in zip(models, (0, 0, 1), strict=True)]
    assert torch.equal(torch.rand(1), wanted)  # the caller's random numbers are left alone
    a, b, c = (h.module.fc.weight for h in heads)
    assert torch.equal(a, b) and not torch.equal(a, c)  # type: ignore[arg-type]
    assert heads[0].classes == ("no", "yes") and default_layer(heads[0]) == "layer4"
    assert torch.equal(heads[0].module.layer4[0].weight, body)
    with pytest.raises(InputError, match="2 class names for 3"):
        new_head(models[0], 3, ("no", "yes"))
