"""What holds for every registered method and metric, whoever wrote it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import heatproof as hp
from conftest import same, small_cnn, small_vit, state_of
from heatproof.errors import ModelError
from heatproof.registry import Card, explainers, metrics

BIBLIOGRAPHY = Path(hp.__file__).with_name("references.bib").read_text()
KEYS = re.findall(r"^@\w+\{([^,]+),", BIBLIOGRAPHY, re.MULTILINE)
# Options that only say how much work is done; a contract must hold for little work too.
CHEAP = {"samples": 6, "masks": 6, "steps": 4, "channels": 4, "segment_count": 9}


def cheap_call(name: str) -> str:
    options = {k: v for k, v in CHEAP.items() if k in explainers.get(name).options}
    return f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})" if options else name


def network_for(name: str, classes: int = 5) -> nn.Module:
    """One that the method explains."""
    if name == "cam":  # the only one that needs global average pooling and one linear layer
        return nn.Sequential(*small_cnn()[:9], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))
    return small_vit(classes) if explainers.get(name).architecture == "transformer" else small_cnn(classes)


def test_the_bibliography_has_every_key_in_the_source_once() -> None:
    files = (path for path in Path(hp.__file__).parent.rglob("*") if path.suffix in (".py", ".toml"))
    sources = "".join(path.read_text() for path in files)
    used = {match[0] for match in re.finditer(r"\b[a-z]+(?:19|20)\d\d[a-z]+\b", sources)}
    assert len(KEYS) == len(set(KEYS)) and set(KEYS) == used


@pytest.mark.parametrize("name", explainers.names())
def test_every_method_is_documented(name: str) -> None:
    entry = explainers.get(name)
    assert entry.cite in KEYS
    assert entry.summary.endswith(".") and 10 < len(entry.summary) < 110
    assert isinstance(entry.card, Card) and all(vars(entry.card).values())
    assert entry.architecture in ("", "cnn", "transformer")


@pytest.mark.parametrize("name", metrics.names())
def test_every_metric_is_documented(name: str) -> None:
    entry = metrics.get(name)
    assert not entry.cite or entry.cite in KEYS
    assert entry.summary
    assert entry.level in ("image", "class", "checkpoint")
    assert entry.bounds[0] < entry.bounds[1]
    assert entry.question in ("", "map", "network") and set(entry.floors) <= set(explainers.names())
    assert not entry.votes or (entry.question and (entry.title or entry.parts))


@pytest.mark.parametrize("name", explainers.names())
@pytest.mark.parametrize("classes", [1, 3])
def test_every_method_returns_finite_maps_and_leaves_the_model_alone(name: str, classes: int) -> None:
    module = network_for(name, classes).train()  # the mode a model has in the middle of training
    next(module.parameters()).requires_grad_(False)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    before = state_of(module)
    call = cheap_call(name)
    maps = hp.explain(module, images, [call], seed=3)[call]
    assert same(before, state_of(module))
    assert maps.values.dtype == torch.float32 and maps.values.shape[0] == 2 and maps.values.ndim == 3
    assert torch.isfinite(maps.values).all() and not maps.values.requires_grad
    assert maps.upsample().shape == (2, 16, 16)
    assert maps.explained.tolist() == hp.explain(module, images, "gradcam")["gradcam"].explained.tolist()


@pytest.mark.parametrize("name", [entry.name for entry in explainers if entry.architecture])
def test_a_method_for_one_kind_of_network_refuses_the_other_with_a_clear_error(name: str) -> None:
    module = small_cnn() if explainers.get(name).architecture == "transformer" else small_vit()
    images = torch.randn(1, 3, 16, 16)
    before = state_of(module)
    with pytest.raises(ModelError, match=r"; use .* instead") as error:
        hp.explain(module, images, name)
    assert "\n" not in str(error.value) and same(before, state_of(module))


@pytest.mark.parametrize("name", explainers.names())
def test_every_method_explains_the_class_of_each_image(name: str) -> None:
    module, call = network_for(name).eval(), cheap_call(name)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    both = hp.explain(module, images, [call], [1, 3])[call]
    for row, target in enumerate((1, 3)):
        alone = hp.explain(module, images[row : row + 1], [call], target)[call].values[0]
        torch.testing.assert_close(alone, both.values[row], rtol=1e-3, atol=1e-4 * float(alone.abs().max()))
    assert both.explained.tolist() == [1, 3]


@pytest.mark.parametrize("name", explainers.names())
def test_every_method_repeats_and_does_not_depend_on_the_batch(name: str) -> None:
    module, call = network_for(name).eval(), cheap_call(name)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    whole = hp.explain(module, images, [call], seed=5)[call].values
    again = hp.explain(module, images, [call], seed=5)[call].values
    alone = [hp.explain(module, image[None], [call], seed=5, batch_size=1)[call].values for image in images]
    assert torch.equal(whole, again)
    torch.testing.assert_close(torch.cat(alone), whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))
