"""A planted tag is the first group of its class, painting it over changes the answer; nothing is touched."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

import heatproof as hp
from contrast.discs import TAG, model_ready, network
from heatproof.contrast import Pair, make_pair
from heatproof.errors import HeatproofError, InputError, StoreError
from heatproof.models import Model
from heatproof.report.page import album_section
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.store.folder import inspect
from heatproof.store.ledger import write_record
from heatproof.verdict.album import Album, CropGroup, album_of_run, make_album
from heatproof.verdict.kept_album import png, read_album, write_album
from tiny_study import make_study

pytestmark = pytest.mark.trains

METHODS = ("gradcam", "layercam")
NAMES = ("green", "blue")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = network()
    made = make_pair(
        model, *model_ready(model), TAG, positive=1, lr=3e-3, out=tmp_path_factory.mktemp("pair")
    )
    assert made.holds
    return made


@pytest.fixture(scope="module")
def tagged() -> tuple[Tensor, Tensor, Tensor]:
    """Pictures that no lesson showed, a tag in half of each class; where it is; and the classes."""
    model = network()
    images, labels = model_ready(model, seed=9)
    with_tag, masks = TAG.plant(images, [str(i) for i in range(len(images))], model.preprocess)
    some = torch.arange(len(images)) % 4 < 2
    images[some] = with_tag[some]
    return images, masks & some[:, None, None], labels


def album(model: Model, images: Tensor, **options: Any) -> Album:
    return make_album(model, images, hp.explain(model, images, METHODS), classes=NAMES, **options)


def on_the_tag(group: CropGroup, masks: Tensor) -> float:
    """The share of crops that hold most of the tag."""
    held: list[bool] = []
    for crop in group.crops:
        (top, left, bottom, right), mask = crop.box, masks[int(crop.id)]
        held.append(bool(mask.any() and mask[top:bottom, left:right].sum() > mask.sum() / 2))
    return float(np.mean(held))


def test_the_tag_is_the_first_group_of_the_network_that_uses_it(
    pair: Pair, tagged: tuple[Tensor, Tensor, Tensor]
) -> None:
    images, masks, _ = tagged
    blue = album(pair.a, images)["blue"]
    first, second = blue.groups[:2]
    assert on_the_tag(first, masks) == 1 and on_the_tag(second, masks) == 0  # two things, two groups
    assert first.n == 30 and blue.n == sum(group.n for group in blue.groups)
    clean = album(pair.b, images)
    for pages in clean.classes:
        assert on_the_tag(pages.groups[0], masks) < 0.25
    assert all(on_the_tag(group, masks) == 0 for group in album(pair.a, images)["green"].groups)


def test_painting_over_the_tag_changes_the_answer_if_nothing_else_supports_it(
    pair: Pair, tagged: tuple[Tensor, Tensor, Tensor]
) -> None:
    images, masks, labels = tagged
    green = masks.flatten(1).any(1) & (labels == 0)  # green discs with a tag: A calls them blue
    (blue,) = album(pair.a, images[green]).classes
    (first,) = blue.groups
    assert blue.name == "blue" and on_the_tag(first, masks[green]) == 1
    assert first.changed >= 0.75 * first.n and first.drop > 0.5 and first.elsewhere == 0
    assert first.sentence.startswith(f"Painting it over changes the answer in {first.changed} of 15 images")


def content(made: Album) -> str:
    return json.dumps(msgspec.to_builtins(made, enc_hook=np.ndarray.tolist))


def test_twice_the_same_and_the_network_is_not_touched(pair: Pair) -> None:
    model = Model(copy.deepcopy(pair.a.module).train(), "a", pair.a.preprocess)
    model.module[0].requires_grad_(False)
    before, pixels, state = copy.deepcopy(model.module), pair.images.clone(), torch.get_rng_state()
    made = album(model, pair.images)
    assert content(made) == content(album(model, pair.images))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(pair.images, pixels)
    for mine, original in zip(model.module.parameters(), before.parameters(), strict=True):
        assert (
            torch.equal(mine, original) and mine.requires_grad == original.requires_grad and mine.grad is None
        )
    assert [m.training for m in model.module.modules()] == [m.training for m in before.modules()]
    assert not any(part._forward_hooks for part in model.module.modules())


def test_pictures_that_say_nothing_are_counted_and_left_out(pair: Pair) -> None:
    images = pair.images
    maps = hp.explain(pair.a, images, METHODS)
    some = {name: replace(values, values=values.values.clone()) for name, values in maps.items()}
    for method_maps in some.values():
        method_maps.values[:5] = 0.5
    pages = make_album(pair.a, images, some)[1]
    assert (pages.blank, pages.n, pages.name) == (5, len(images) - 5, "class 1")
    for method_maps in some.values():
        method_maps.values[:] = -1.0
    made = make_album(pair.a, images, some)
    assert made[1].groups == () and made[1].blank == len(images)
    assert "are blank" in album_section(made).missing
    wrong = {
        name: replace(values, explained=torch.zeros_like(values.explained)) for name, values in maps.items()
    }
    assert make_album(pair.a, images, wrong)[0].called_otherwise == len(images)  # A says blue to all of them
    unexplained = {name: replace(values, explained=values.explained * 0 - 1) for name, values in maps.items()}
    assert make_album(pair.a, images, unexplained).classes == ()
    with pytest.raises(InputError, match="no class 7"):
        made[7]


def test_at_most_so_many_pictures_and_pixels(pair: Pair) -> None:
    images = torch.nn.functional.interpolate(pair.images, scale_factor=8.0)
    pages = album(pair.a, images, per_class=4, crop=20)["blue"]
    assert pages.n + pages.called_otherwise + pages.blank == 4
    assert all(max(crop.pixels.shape[:2]) == 20 for group in pages.groups for crop in group.crops)
    (label,) = album(pair.a, pair.images[:1]).classes
    assert label.groups[0].n == 1 and "of 1 image," in label.groups[0].sentence


def test_what_cannot_be_used_raises_a_clear_error(pair: Pair) -> None:
    maps = hp.explain(pair.a, pair.images, METHODS)
    other = {**maps, "layercam": replace(maps["layercam"], explained=torch.zeros(12, dtype=torch.long))}
    for given, options, sentence in (
        (maps, {"methods": []}, "a method that follows the network"),
        (maps, {"methods": ["rise"]}, "no maps of rise"),
        (maps, {"per_class": 0}, "at least 1"),
        ({name: values.take([0]) for name, values in maps.items()}, {}, "they must match"),
        (other, {}, "different classes"),
    ):
        with pytest.raises(InputError, match=sentence):
            make_album(pair.a, pair.images, given, **options)


# --- of a run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_study(tmp_path_factory.mktemp("study"), methods=["gradcam", "layercam", "edges"], metrics=[])
    run_study(path, path.parent / "run")
    return path


def test_an_album_of_a_run_is_kept_in_its_folder(study: Path) -> None:
    folder = RunFolder.open(study.parent / "run")
    assert read_album(folder) is None and "heatproof verdict RUN --album" in album_section(None).missing
    path = write_album(folder, ["gradcam"], study=study)
    stored = read_album(folder)
    assert stored is not None and path.parent == folder.path
    assert (stored.methods, stored.checkpoint) == (("gradcam",), "epoch02")
    assert sum(pages.n + pages.blank + pages.called_otherwise for pages in stored.classes) == 18
    assert {pages.name for pages in stored.classes} <= {"cat", "dog"}
    model = hp.load_model(f"{study.parent}/net.py:tiny", study.parent / "epochs" / "epoch02.pt")
    # The same before and after it is stored.
    assert content(album_of_run(folder, model, ["gradcam"])) == content(stored)
    assert album_of_run(folder, model).methods == ("gradcam", "layercam")  # no floors
    assert inspect(folder.path) == []
    page = str(album_section(stored).body)
    groups = [group for pages in stored.classes for group in pages.groups]
    assert groups and all(group.sentence in page for group in groups)
    assert page.count("<img ") == sum(len(group.crops) for group in groups)


def test_names_are_escaped(study: Path) -> None:
    folder = RunFolder.open(study.parent / "run")
    write_album(folder, study=study)
    stored = read_album(folder)
    assert stored is not None
    pages = next(pages for pages in stored.classes if pages.groups)
    (first, *_), evil = pages.groups, '"><script>alert(1)</script>'
    crops = (replace(first.crops[0], id=evil),)
    made = Album((replace(pages, name=evil, groups=(replace(first, crops=crops),)),), (evil,), evil)
    assert "<script" not in str(album_section(made).body) and "&lt;script" in str(album_section(made).body)


def test_what_stands_in_the_way_raises_a_clear_error(study: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(study.parent / "run")
    other = make_study(tmp_path / "other", methods=["gradcam"], metrics=[], run="pictures = false", images=4)
    run_study(other, tmp_path / "run")
    bare = RunFolder.open(tmp_path / "run")
    torch.save(torch.load(other.parent / "epochs/epoch01.pt"), other.parent / "epochs/epoch02.pt")
    for given, options, sentence in (
        (folder, {}, "runs net.py, which a run folder alone does not allow; name the study"),
        (folder, {"study": tmp_path / "gone.toml"}, "cannot open the network .* there is no file"),
        (folder, {"study": study, "checkpoint": "epoch07"}, "no checkpoint 'epoch07'"),
        (folder, {"study": study, "methods": ["lime"]}, "no maps of lime"),
        (folder, {"study": other}, "the weights of 'epoch02' are not those of the run"),
        (bare, {"study": other, "checkpoint": "epoch01"}, "stores no images"),
    ):
        with pytest.raises(HeatproofError, match=sentence) as error:
            write_album(given, **options)
        assert "\n" not in str(error.value)
    assert not (bare.path / "album.json").exists()


def test_a_damaged_album_is_refused(study: Path) -> None:
    folder = RunFolder.open(study.parent / "run")
    path = write_album(folder, study=study)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"label": ', b'"label":  ', 1))
    with pytest.raises(StoreError, match="not what was written"):
        read_album(folder)
    assert [finding.path for finding in inspect(folder.path)] == ["album.json"]
    large = np.zeros((400, 400, 3), np.uint8)
    record = json.loads(whole)
    del record["checksum"]
    crop = next(c for pages in record["classes"] for g in pages["groups"] for c in g["crops"])
    for pixels, sentence in ((png(large), "too large"), ("no image", "make the album again"), (3, "again")):
        crop["pixels"] = pixels
        write_record(path, record)
        with pytest.raises(StoreError, match=sentence):
            read_album(folder)
    path.unlink()
