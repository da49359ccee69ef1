"""Interventions on networks whose evidence is known by construction."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from evidence_networks import (
    OBJECT,
    OBJECTS,
    SIDE,
    Detector,
    Images,
    as_network,
    cheating,
    honest,
    make_images,
    tinted,
)
from heatproof.errors import InputError
from heatproof.metrics.evidence_record import EvidenceRecord, PatchTest
from heatproof.metrics.interventions import RECIPIENTS, evidence, similarities
from heatproof.metrics.localisation import object_regions
from heatproof.metrics.properties import (
    PLACES,
    colour,
    compressed_like,
    illumination,
    noise,
    region_mask,
    resized_like,
    sharpness,
    transfers,
)
from heatproof.models.model import Model
from heatproof.types import Truth


def record_of(model: Model, images: Images, regions: bool = True, **options: object) -> EvidenceRecord:
    return evidence(
        images.labels, model=model, images=images.images, regions=images.regions if regions else None,
        sides=(1 / 4,), **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def images() -> Images:
    return make_images()


@pytest.fixture(scope="module")
def cheats(images: Images) -> EvidenceRecord:
    return record_of(cheating(), images)


@pytest.fixture(scope="module")
def clean(images: Images) -> EvidenceRecord:
    return record_of(honest(), images)


def share(record: EvidenceRecord, column: str, label: int, test: PatchTest | None = None) -> float:
    values = np.array(getattr(test or record.off_object[0], column), float)[np.array(record.label) == label]
    return float(np.nanmean(values >= 0.5))


def test_a_token_turns_recipients_and_its_control_does_not(cheats: EvidenceRecord) -> None:
    assert cheats.answered == 48 and share(cheats, "turned", 1) > 0.9
    assert share(cheats, "control_turned", 1) < 0.2 and share(cheats, "turned", 0) == 0
    recurring = np.array(cheats.anywhere[0].partners)[np.array(cheats.label) == 1] >= 3
    assert recurring.mean() > 0.9
    [item] = [item for item in cheats.items if item.recurring]
    assert item.label == 1 and item.on_object is not None and item.on_object < 0.35
    assert item.turned > 0.9 * item.recipients > 3 * item.control_turned
    assert item.painted == item.donors and item.changed > 0.9 * item.painted > item.changed_elsewhere
    assert "off the object" in item.sentence("code") and len(item.examples) == 3 and item.control is not None
    assert {example.answer_after for example in item.examples} == {"class 1"}


def test_an_honest_network_uses_no_patch_off_the_object(clean: EvidenceRecord) -> None:
    assert clean.answered == 48
    for label in (0, 1):
        assert share(clean, "turned", label) == 0
    on_object = [item for item in clean.items if item.kind == "patch"]
    assert on_object and all((item.on_object or 0) >= 0.35 for item in on_object)
    assert not [item for item in clean.items if item.kind == "property"]


def test_a_window_around_a_small_object_is_not_off_the_object() -> None:
    """The object fills little of the window: one that answers by the object must not be accused."""
    detector = as_network(Detector(None, OBJECTS[1]), "object")
    images = make_images(token="none")
    small = torch.zeros_like(images.regions)
    for region, own in zip(small, images.regions, strict=True):
        y, x = own.nonzero().amin(0) + OBJECT // 2 - 1
        region[y : y + 2, x : x + 2] = True
    record = evidence(images.labels, model=detector, images=images.images, regions=small, sides=(1 / 4,))
    off, anywhere = record.off_object[0], record.anywhere[0]
    turning = [e for e, turned in enumerate(anywhere.turned) if turned is not None and turned >= 0.5]
    assert len(turning) > 0.5 * record.label.count(1) and {record.label[e] for e in turning} == {1}
    assert all((anywhere.on_object[e] or 0) >= 0.5 for e in turning)
    assert {off.turned[e] for e in turning} == {0.0} and {off.on_object[e] for e in turning} == {0.0}


def test_removal_and_exchange_separate_both(clean: EvidenceRecord, cheats: EvidenceRecord) -> None:
    assert clean.removal and cheats.removal and clean.exchange and cheats.exchange
    labels = np.array(clean.label)
    for label in (0, 1):
        n, others = cheats.removal.others[label]
        assert n == 24 and others == 0 and np.mean(np.array(cheats.removal.kept)[labels == label]) == 1
        n, others = clean.removal.others[label]
        kept = np.mean(np.array(clean.removal.kept)[labels == label])
        assert kept - others / n < 0.35  # without the object both are noise
        assert np.mean(np.array(clean.exchange.pointing)[labels == label]) > 0.6
    assert np.mean(np.array(cheats.exchange.pointing)[labels == 1]) < 0.1


def test_turned_equals_a_slow_version(images: Images, cheats: EvidenceRecord) -> None:
    test, model = cheats.off_object[0], cheating()
    donor = cheats.label.index(1)
    top, left = test.corners[donor]
    source = images.images[cheats.image[donor]]
    others = [i for i in range(48) if images.labels[i] == 0]
    turned = []
    for i in others:
        changed = images.images[i].clone()
        changed[:, top : top + test.side, left : left + test.side] = source[
            :, top : top + test.side, left : left + test.side
        ]
        turned.append(int(model.logits(changed[None]).argmax()) == 1)
    assert all(turned) and test.turned[donor] == 1


def test_a_tint_is_found_by_its_transfer(images: Images) -> None:
    tint = make_images(tint=True, token="none")
    record = record_of(tinted(), tint)
    assert record.answered == 48
    by_name = {test.name: test for test in record.properties}
    test = by_name["colour"]
    assert np.mean(test.turned) > 0.9 and np.mean(test.control) == 0 and len(test.turned) > 16
    best = next(item for item in record.items if item.kind == "property")
    assert best.name == "colour" and "control" not in best.sentence("red") and best.examples
    without = {test.name: test for test in record_of(honest(), images).properties}
    assert np.mean(without["colour"].turned) <= np.mean(without["colour"].control) + 0.1


def test_a_donor_of_several_recipients_is_drawn_once() -> None:
    tint = make_images(tint=True, token="none")
    few = [1, *range(0, 48, 2)]  # one donor of class 1
    record = record_of(tinted(), Images(tint.images[few], tint.labels[few], tint.regions[few]))
    (item,) = (item for item in record.items if item.name == "colour" and item.label == 1)
    assert item.donors == 1 and len(item.crops) == 1 < len(item.examples)


def test_inputs_are_counted(images: Images) -> None:
    model, seen = honest(), [0]

    def count(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        seen[0] += len(given[0])

    handle = model.module.register_forward_hook(count)
    record = record_of(model, images)
    handle.remove()
    # The head is determined once, on an input of its own; hooks switch off folding and recording.
    assert record.inputs <= seen[0] <= record.inputs + 2
    assert record.inputs < 48 * 40  # at most 40 inputs per image


def test_a_record_survives_json(cheats: EvidenceRecord) -> None:
    content = json.dumps(cheats.as_json(), allow_nan=False)
    again = EvidenceRecord.from_json(json.loads(content))
    assert again.off_object == cheats.off_object and again.removal == cheats.removal
    assert np.array_equal(again.items[0].crops[0], cheats.items[0].crops[0])
    assert again.scores.value == cheats.scores.value > 0.3 and again.scores[1].value > 0.7


def test_results_do_not_depend_on_the_batch_size(images: Images, cheats: EvidenceRecord) -> None:
    again = record_of(cheating(), images, batch_size=7)
    assert again.off_object[0].turned == cheats.off_object[0].turned
    assert again.properties == cheats.properties


def test_without_regions_patches_may_lie_anywhere(images: Images) -> None:
    record = record_of(honest(), images, regions=False)
    assert not record.has_regions and record.removal is None and record.exchange is None
    assert record.off_object == record.anywhere and record.items[0].on_object is None


def test_multi_label_donors_have_the_label_and_recipients_have_not(images: Images) -> None:
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = cheating().module

        def forward(self, given: Tensor) -> Tensor:
            return torch.stack([self.inner(given)[:, 1] - 10, given.mean((1, 2, 3))], 1)

    from heatproof.models.heads import Multilabel

    model = Model(Labels().eval(), "labels", cheating().preprocess, head=Multilabel())
    table = torch.stack([images.labels == 1, torch.zeros(48, dtype=torch.bool)], 1)
    record = evidence(table, model=model, images=images.images, sides=(1 / 4,))
    assert set(record.label) == {0} and share(record, "turned", 0) > 0.9


def test_multi_label_images_have_regions_of_each_label(images: Images) -> None:
    """With the token's own label annotated as its object, nothing off the object turns; else it does."""
    from heatproof.models.heads import Multilabel

    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = cheating().module

        def forward(self, given: Tensor) -> Tensor:
            return torch.stack([self.inner(given)[:, 1] - 10, given.mean((1, 2, 3)) - 10], 1)

    model = Model(Labels().eval(), "labels", cheating().preprocess, head=Multilabel())
    table = torch.stack([images.labels == 1, torch.zeros(48, dtype=torch.bool)], 1)
    whole = torch.ones_like(images.regions)
    by_label = torch.stack([images.regions, whole], 1)
    shares = []
    for regions in (by_label, by_label.flip(1)):
        record = evidence(table, model=model, images=images.images, regions=regions, sides=(1 / 4,))
        assert set(record.label) == {0} and record.removal is not None
        shares.append([record.object_share[0], record.off_object[0].turned[0]])
    assert shares[0] == [pytest.approx(float(images.regions[1].float().mean())), 1.0]
    assert shares[1] == [1.0, None]  # the union would leave no room in the first case either


def test_repeated_images_count_once(images: Images) -> None:
    one = images.images[[1, 1, 1, 1, 1, 0, 2, 4]]
    record = evidence([1, 1, 1, 1, 1, 0, 0, 0], model=cheating(), images=one, sides=(1 / 4,))
    assert record.label.count(1) == 1 and not [item for item in record.items if item.recurring]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0] * 47, "47 labels for 48 images"),
        ([5] * 48, "the network has the classes 0 to 1"),
        ([1] * 48, "correct images of at least two classes are needed"),
    ],
)
def test_bad_labels_are_one_sentence(images: Images, labels: list[int], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        evidence(labels, model=cheating(), images=images.images)


def test_a_network_that_is_always_wrong_is_refused(images: Images) -> None:
    with pytest.raises(InputError, match="0 of 48 images are answered correctly"):
        evidence(1 - images.labels, model=cheating(), images=images.images)


def test_masks_of_another_size_are_resized_and_other_shapes_refused(images: Images) -> None:
    half = images.regions[:, ::2, ::2]
    record = evidence(images.labels, model=honest(), images=images.images, regions=half, sides=(1 / 4,))
    assert record.has_regions
    with pytest.raises(InputError, match="regions must be one mask"):
        evidence(images.labels, model=honest(), images=images.images, regions=images.regions[:3])


def test_a_box_outside_the_image_is_one_sentence() -> None:
    given = torch.zeros(1, 3, 20, 20)
    inside = object_regions(Truth(boxes=(((2.0, 3.0, 5.0, 8.0),),)), given)
    assert int(inside.sum()) == 4 * 6 and not object_regions(None, given).any()
    with pytest.raises(InputError, match="outside its 20x20 image"):
        object_regions(Truth(boxes=(((2.0, 3.0, 25.0, 8.0),),)), given)


def test_a_network_that_ignores_the_image_turns_nothing() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 2, 3), nn.ReLU()

        def forward(self, given: Tensor) -> Tensor:
            return 0 * self.relu(self.conv(given)).mean((2, 3)) + given.new_tensor([0.0, 1.0])

    some = make_images()
    with pytest.raises(InputError, match="at least two classes"):
        evidence(some.labels, model=as_network(Constant(), "constant"), images=some.images)


def test_similar_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    patches = torch.rand(3, 3, 24, 24, generator=generator)
    patches[1] = 0.5 * patches[0].roll((2, -3), (1, 2)) + 0.2  # moved, with other contrast
    table = similarities(patches)
    assert table[0, 1] > 0.99 and table[0, 2] < 0.3 and torch.equal(table, table.T)
    flat = torch.cat([torch.full((2, 3, 24, 24), 0.5), torch.full((1, 3, 24, 24), 0.9)])
    assert similarities(flat)[0, 1] == 1 and similarities(flat)[0, 2] == 0


def test_transfers_reach_what_they_measure() -> None:
    rng = torch.Generator().manual_seed(0)
    smooth = nn.functional.interpolate(torch.rand(2, 3, 8, 8, generator=rng), (64, 64), mode="bicubic").clamp(
        0, 1
    )
    rough = (0.5 * torch.rand(2, 3, 64, 64, generator=rng) + 0.4).clamp(0, 1)
    ones = torch.ones(2, 64, 64)
    moved = colour(smooth, rough, ones, ones)
    assert torch.allclose(moved.mean((2, 3)), rough.mean((2, 3)), atol=1e-4)
    assert torch.allclose(moved.std((2, 3)), rough.std((2, 3)), rtol=1e-2)
    lit = illumination(smooth, rough, ones, ones)
    assert torch.allclose(lit.mean((2, 3)), rough.mean((2, 3)), atol=0.02)
    from heatproof.metrics.properties import _laplacian, _noise_level

    before, wanted = (_laplacian(x, ones).log() for x in (rough, smooth))
    after = _laplacian(sharpness(rough, smooth, ones, ones), ones).log()
    assert ((after - wanted).abs() < (before - wanted).abs() / 2).all()
    noisy = noise(smooth, rough, ones, ones)
    assert torch.allclose(_noise_level(noisy, ones), _noise_level(rough, ones), rtol=0.15)
    assert torch.equal(noise(rough, smooth, ones, ones), rough)
    changed = transfers((64, 64), True)["background"](smooth, rough, ones, ones)
    assert torch.equal(changed, rough)
    half = ones.clone()
    half[:, :, :32] = 0
    kept = transfers((64, 64), True)["background"](smooth, rough, half, ones)
    assert torch.equal(kept[..., :32], smooth[..., :32]) and torch.equal(kept[..., 32:], rough[..., 32:])


def test_a_texture_is_added_at_its_frequency() -> None:
    wave = 0.2 * torch.sin(torch.arange(64) * 2 * torch.pi / 8).expand(1, 3, 64, 64)
    plain = 0.5 + 0.01 * torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ones, half = torch.ones(1, 64, 64), torch.ones(1, 64, 64)
    half[:, 16:48, 16:48] = 0  # an object, which has no stripes
    striped = torch.where(half[:, None] > 0, plain + wave, plain)
    transfer = transfers((64, 64), True)["texture"]
    made = torch.fft.rfft2(transfer(plain, striped, ones, half) - plain).abs()[0, 0]
    assert divmod(int(made.argmax()), made.shape[1]) == (0, 8)
    assert 0.5 < made.max() / torch.fft.rfft2(wave).abs().max() < 1.5
    assert (transfer(plain, plain, ones, ones) - plain).abs().max() < 1e-5


def test_regions_of_properties_with_a_place() -> None:
    masks = {name: region_mask(name, (SIDE, SIDE)) for name in ("frame", *PLACES)}
    assert all(mask is not None and 0 < mask.float().mean() < 0.5 for mask in masks.values())
    assert region_mask("sharpness", (SIDE, SIDE)) is None


def test_size_and_compression_are_read_from_files() -> None:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    small = Image.new("RGB", (20, 30))
    assert resized_like(image, small).size == (20, 30)
    coded = io.BytesIO()
    image.save(coded, "JPEG", quality=10)
    rough = compressed_like(image, Image.open(coded))
    error = np.abs(np.asarray(rough, float) - np.asarray(image, float)).mean()
    assert rough.size == image.size and error > 10 and compressed_like(image, small) is image


def test_a_resolution_that_gives_the_class_away_is_found() -> None:
    """Images of class 1 come from small files, and the network answers by sharpness."""

    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges, self.relu = nn.Conv2d(3, 1, 3, bias=False), nn.ReLU()
            weight = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]) / 3
            self.edges.weight.data.copy_(weight.expand(1, 3, 3, 3))

        def forward(self, given: Tensor) -> Tensor:
            energy = self.relu(self.edges(given)).mean((2, 3))
            return torch.cat([energy, 0.6 - energy], 1) * 20

    model = as_network(Sharp(), "sharp")
    rng, files = np.random.default_rng(0), []
    for i in range(40):
        side = SIDE if i % 2 == 0 else SIDE // 4
        files.append(Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)))
    inputs = torch.stack([model.preprocess(file) for file in files])
    labels = [i % 2 for i in range(40)]
    record = evidence(labels, model=model, images=inputs, files=files, sides=(1 / 4,))
    assert record.answered >= 36
    test = next(test for test in record.properties if test.name == "size")
    chosen = np.array(test.label) == 1
    assert np.mean(np.array(test.turned)[chosen]) > 0.9 and np.mean(np.array(test.control)[chosen]) < 0.1


def test_recipients_of_a_donor_are_of_other_classes(images: Images, cheats: EvidenceRecord) -> None:
    for test in cheats.properties:
        for label, donor, recipient in zip(test.label, test.donor, test.recipient, strict=True):
            assert images.labels[donor] == label != images.labels[recipient]
    assert RECIPIENTS == 8 and math.isclose(sum(np.array(cheats.label) == 1), 24)
