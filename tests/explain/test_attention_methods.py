"""Rollout, Chefer's relevance, LeGrad and AttnLRP on timm, torchvision and Hugging Face, against slow twins.

LXT (the AttnLRP authors' package) asks for packages that are larger than this project, so it is no
development dependency: `pip install --no-deps lxt` beside zennit, and its test runs.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit import modeling_vit

from conftest import counting, randomise, same, small_cnn, state_of
from heatproof.errors import ModelError
from heatproof.explain.api import explain
from heatproof.explain.rules import attend

METHODS = ("rollout", "chefer", "legrad", "attnlrp")
BLOCKS, HEADS, SIDE = 3, 2, 4


def pictures(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).double()


def of_timm(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 32,
        "depth": BLOCKS,
        "num_heads": HEADS,
    }
    return randomise(timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes, **options)).double()


def unfused() -> nn.Module:
    module = of_timm()
    for block in module.blocks:
        block.attn.fused_attn = False
    return module


def of_torchvision() -> nn.Module:
    torch.manual_seed(2)
    return randomise(
        torchvision.models.VisionTransformer(32, 8, BLOCKS, HEADS, 32, 64, num_classes=5)
    ).double()


def of_hugging_face(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(3)
    config = ViTConfig(  # type: ignore[call-arg]
        hidden_size=32, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, intermediate_size=64,
        image_size=32, patch_size=8, num_labels=5, attn_implementation=attention, initializer_range=0.2,
    )  # fmt: skip
    return randomise(ViTForImageClassification(config)).double()


NETWORKS = {
    "timm": of_timm, "unfused": unfused, "pooled": lambda: of_timm(class_token=False, global_pool="avg"),
    "torchvision": of_torchvision, "hf": of_hugging_face, "eager": lambda: of_hugging_face("eager"),
}  # fmt: skip


class Twin:
    """A pre-norm ViT of timm, step by step, from its weights: attention and tokens of every block."""

    def __init__(self, module: Any, images: Tensor, connected: bool = False) -> None:
        self.module, self.connected = module, connected  # connected: blocks share one graph
        self.weights: list[Tensor] = []
        self.tokens: list[Tensor] = []
        tokens = module.patch_embed(images)
        if module.cls_token is not None:
            tokens = torch.cat([module.cls_token.expand(len(images), -1, -1), tokens], 1)
        tokens = tokens + module.pos_embed
        for block in module.blocks:
            tokens = self.block(block, tokens)

    def block(self, block: Any, tokens: Tensor) -> Tensor:
        count, length, width = tokens.shape
        parts = block.attn.qkv(block.norm1(tokens)).reshape(count, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = torch.zeros(count, HEADS, length, length, dtype=tokens.dtype)
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head].transpose(1, 2) / math.sqrt(width // HEADS)
            weights[:, head] = scores.exp() / scores.exp().sum(-1, keepdim=True)
        weights = weights if self.connected else weights.detach().requires_grad_()
        mixed = torch.cat([weights[:, head] @ v[:, head] for head in range(HEADS)], -1)
        tokens = tokens + block.attn.proj(mixed)
        tokens = tokens + block.mlp(block.norm2(tokens))
        self.weights.append(weights)
        self.tokens.append(tokens)
        return tokens if self.connected else tokens.detach()

    def logits(self, tokens: Tensor) -> Tensor:
        normed = self.module.norm(tokens)
        pooled = normed[:, 0] if self.module.cls_token is not None else normed.mean(1)
        return self.module.head(self.module.fc_norm(pooled))


@pytest.mark.parametrize("network", ["timm", "unfused", "pooled"])
def test_rollout_is_the_product_written_out(network: str) -> None:
    module, images = NETWORKS[network](), pictures()
    twin = Twin(module, images)
    flow = torch.eye(twin.weights[0].shape[-1], dtype=torch.float64).expand(2, -1, -1)
    for weights in twin.weights:
        mean = weights.detach().sum(1) / HEADS
        flow = (0.5 * mean + 0.5 * torch.eye(mean.shape[-1])) @ flow
    expected = flow.mean(1) if network == "pooled" else flow[:, 0, 1:]
    result = explain(module, images, "rollout")["rollout"].values
    torch.testing.assert_close(result, expected.view(2, SIDE, SIDE).float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("network", ["timm", "unfused", "pooled"])
def test_chefers_relevance_is_the_authors_update_written_out(network: str) -> None:
    """R = I; for every block R += (mean over heads of the positive part of A * dA) R, token by token."""
    module, images, targets = NETWORKS[network](), pictures(), torch.tensor([1, 4])
    twin = Twin(module, images, connected=True)
    score = twin.logits(twin.tokens[-1])[torch.arange(2), targets].sum()
    gradients = torch.autograd.grad(score, twin.weights)
    for i in range(2):
        length = twin.weights[0].shape[-1]
        relevance = torch.eye(length, dtype=torch.float64)
        for weights, gradient in zip(twin.weights, gradients, strict=True):
            update = torch.zeros(length, length, dtype=torch.float64)
            for head in range(HEADS):
                update += (weights[i, head].detach() * gradient[i, head]).clamp(min=0) / HEADS
            relevance = relevance + update @ relevance
        expected = relevance.mean(0) if network == "pooled" else relevance[0, 1:]
        result = explain(module, images[i : i + 1], "chefer", [int(targets[i])])["chefer"].values[0]
        torch.testing.assert_close(result, expected.view(SIDE, SIDE).float(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("network", ["timm", "unfused", "pooled"])
def test_legrad_reads_every_block_by_itself(network: str) -> None:
    """The classifier on the tokens of one block, differentiated by that block's attention, block by block."""
    module, images, targets = NETWORKS[network](), pictures(), torch.tensor([1, 4])
    twin = Twin(module, images)
    layers = []
    for weights, tokens in zip(twin.weights, twin.tokens, strict=True):
        score = twin.logits(tokens)[torch.arange(2), targets].sum()
        (gradient,) = torch.autograd.grad(score, weights)
        layers.append(gradient.clamp(min=0).mean((1, 2)))
    expected = torch.stack(layers).mean(0)[:, 0 if network == "pooled" else 1 :]
    result = explain(module, images, "legrad", targets)["legrad"].values
    torch.testing.assert_close(result, expected.view(2, SIDE, SIDE).float(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", [*METHODS, "gradient-x-input", "attnlrp(gamma=0, conv_gamma=0)"])
def test_ways_to_write_attention_give_one_map(method: str) -> None:
    images, targets = pictures(), torch.tensor([0, 2])
    for first, other in (("timm", "unfused"), ("hf", "eager")):
        maps = [
            explain(NETWORKS[name](), images, [method], targets)[method].values for name in (first, other)
        ]
        torch.testing.assert_close(maps[0], maps[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("network", list(NETWORKS))
@pytest.mark.parametrize("method", METHODS)
def test_every_library_is_explained_and_left_alone(method: str, network: str) -> None:
    module, images = NETWORKS[network]().train(), pictures()
    before = state_of(module)
    result = explain(module, images, method)[method].values
    assert same(before, state_of(module)) and torch.isfinite(result).all() and float(result.std()) > 0
    alone = torch.cat([explain(module, image[None], method)[method].values for image in images])
    torch.testing.assert_close(alone, result, rtol=1e-4, atol=1e-7)


def test_hooks_are_gone_after_an_error() -> None:
    module = of_timm()
    module.head = nn.Linear(32, 32).double()  # class 40 is none of them
    before = state_of(module)
    with pytest.raises(Exception, match="out of range"):
        explain(module, pictures(1), "legrad", 40)
    assert same(before, state_of(module))


def test_relevance_through_attention_is_what_the_rules_say() -> None:
    """Relevances themselves, rule by rule, for softmax(q k') v with the token's own value as the output."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    wq, wk, wv = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    q, k, v = tokens @ wq, tokens @ wk, tokens @ wv
    scores = q @ k.transpose(-2, -1) / 2
    weights = scores.softmax(-1)
    output = weights @ v
    start = torch.zeros_like(output)
    start[..., 0, 0] = output[..., 0, 0]  # the relevance of one number is that number
    # A product of matrices: half of what each pair contributed, to each of the two (epsilon rule on each).
    shares = weights[..., None] * v[..., None, :, :] * (start / output)[..., :, None, :]
    to_weights, to_values = shares.sum(-1) / 2, shares.sum(-3) / 2
    # Softmax: R_j = x_j (R_j - s_j sum R), the first-order share.
    to_scores = scores * (to_weights - weights * to_weights.sum(-1, keepdim=True))
    pairs = q[..., :, None, :] * k[..., None, :, :] / 2 * (to_scores / scores)[..., None]
    to_queries, to_keys = pairs.sum(-2) / 2, pairs.sum(-3) / 2
    expected = torch.zeros_like(tokens)
    for relevance, projected, matrix in ((to_queries, q, wq), (to_keys, k, wk), (to_values, v, wv)):
        expected += tokens * ((relevance / projected) @ matrix.T)

    leaf = tokens.clone().requires_grad_()
    from heatproof.explain.rules import _halved

    result = attend(leaf @ wq, leaf @ wk, leaf @ wv, product=lambda a, b: _halved(a @ b))
    (gradient,) = torch.autograd.grad(result[0, 0, 0, 0], leaf)
    torch.testing.assert_close(leaf.detach() * gradient, expected)


def part_of_lxt(name: str) -> Any:
    """One file of it: the package itself also imports models that newer transformers do not have."""
    spec = importlib.util.find_spec("lxt")
    if spec is None or spec.origin is None:
        pytest.skip("lxt is not installed")
    package = types.ModuleType("lxt.efficient")
    package.__path__ = [str(Path(spec.origin).parent / "efficient")]
    sys.modules.setdefault("lxt.efficient", package)
    return importlib.import_module(f"lxt.efficient.{name}")


@pytest.mark.parametrize(("gamma", "conv_gamma"), [(0, 0), (0.05, 0.25)])
def test_attnlrp_as_lxt_has_it(monkeypatch: pytest.MonkeyPatch, gamma: float, conv_gamma: float) -> None:
    patches, zennit_patches = part_of_lxt("patches"), part_of_lxt("zennit_patches")
    from transformers.activations import GELUActivation
    from zennit import composites, core, rules

    module, images = of_hugging_face(), pictures()
    method = f"attnlrp(gamma={gamma}, conv_gamma={conv_gamma})"
    result = explain(module, images, method, 3)[method].values
    monkeypatch.setattr(core.BasicHook, "forward", zennit_patches.forward)
    monkeypatch.setattr(core.BasicHook, "backward", zennit_patches.backward)
    monkeypatch.setattr(GELUActivation, "original_forward", GELUActivation.forward, raising=False)
    monkeypatch.setattr(GELUActivation, "forward", patches.non_linear_forward)
    monkeypatch.setattr(nn.LayerNorm, "forward", patches.layer_norm_forward)
    attention = modeling_vit.ALL_ATTENTION_FUNCTIONS["sdpa"]
    wrapped = patches.wrap_attention_forward(attention)
    monkeypatch.setattr(modeling_vit.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: wrapped)
    layers = [(nn.Conv2d, rules.Gamma(conv_gamma)), (nn.Linear, rules.Gamma(gamma))] if gamma else []
    composite = composites.LayerMapComposite(layers)
    inputs = images.clone().requires_grad_()
    with composite.context(module) as changed:
        (gradient,) = torch.autograd.grad(changed(pixel_values=inputs).logits[:, 3].sum(), inputs)
    expected = (inputs * gradient).sum(1).float().detach()
    scale = float(expected.abs().max())
    torch.testing.assert_close(result / scale, expected / scale, rtol=0, atol=5e-4)


def test_passes() -> None:
    module, images = of_timm(), pictures()
    for method, backward in (("rollout", 0), ("legrad", 1), ("attnlrp", 1)):
        with counting(module) as passes:
            explain(module, images, method)
        assert passes.batches == [2, 2] and passes.backward == backward, method


@pytest.mark.parametrize(
    ("method", "network", "sentence"),
    [
        ("rollout", "cnn", "has no attention; use gradcam instead"),
        ("legrad", "cnn", "has no attention"),
        ("legrad", "stages", "has no attention; use gradcam instead"),
        ("attnlrp", "cnn", "use lrp instead"),
        ("rollout", "swin", "within windows or stages only; use attnlrp instead"),
        ("legrad", "swin", "use attnlrp instead"),
        ("attnlrp(gamma=-1)", "timm", "must not be negative"),
    ],
)
def test_what_cannot_be_explained_raises_a_clear_error(method: str, network: str, sentence: str) -> None:
    if network == "swin":
        module = timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(1, 1, 1, 1),
            num_heads=(1, 1, 2, 2), num_classes=3,
        ).double()  # fmt: skip
        images = torch.randn(1, 3, 56, 56).double()
    else:
        module, images = small_cnn().double() if network == "cnn" else of_timm(), pictures(1)
    if network == "stages":  # a row of parts of one kind, as a transformer's blocks are
        parts = [nn.Sequential(nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ReLU()) for c in (3, 6)]
        module = nn.Sequential(*parts, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())).double()
    before = state_of(module)
    with pytest.raises((ModelError, ValueError), match=sentence) as error:
        explain(module, images, method)
    assert "\n" not in str(error.value) and same(before, state_of(module))
