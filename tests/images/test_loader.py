"""Batches: in order, the same however they are made, a bounded number ahead, and never stuck."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.errors import InputError, MissingExtraError
from heatproof.images import Preprocess, Sample, Source, batches, open_image, open_source
from heatproof.images.loader import batches_ahead
from heatproof.metrics import localise
from heatproof.metrics.localisation import name_losses

STEPS = Preprocess((20, 24), 28)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(23):
        path = tmp_path / f"class{i % 3}" / f"{i:02d}.{'jpg' if i % 2 else 'png'}"
        path.parent.mkdir(exist_ok=True)
        size = rng.integers(18, 60, 2)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    return tmp_path


def counted(source: Source, read: Any) -> Source:
    return replace(source, read=read)


def test_a_batch_holds_what_preprocess_gives_bit_for_bit(folder: Path) -> None:
    source = open_source("folder", folder)
    for steps in (STEPS, Preprocess((20, 24), (20, 24), (0.4,), (0.3,), "bicubic")):
        (loaded,) = batches(source, steps, 100)
        expected = torch.stack([steps(open_image(folder / name)) for name in loaded.batch.ids])
        assert torch.equal(loaded.batch.images, expected)
        assert loaded.batch.images.is_contiguous() and not loaded.failures


@pytest.mark.parametrize("workers", [0, 1, 2, 7])
def test_order_and_numbers_do_not_depend_on_workers_or_batch_size(folder: Path, workers: int) -> None:
    source = open_source("folder", folder)
    (whole,) = batches(source, STEPS, 23, workers=0)
    for batch_size in (1, 4, 23, 50):
        parts = [batch for batch, _ in batches(source, STEPS, batch_size, workers=workers)]
        assert [len(p.ids) for p in parts] == [min(batch_size, 23 - s) for s in range(0, 23, batch_size)]
        assert sum((p.ids for p in parts), ()) == whole.batch.ids
        assert torch.equal(torch.cat([p.images for p in parts]), whole.batch.images)
        assert torch.equal(torch.cat([p.labels for p in parts if p.labels is not None]), whole.batch.labels)  # type: ignore[arg-type]


def test_indices_choose_and_order(folder: Path) -> None:
    source = open_source("folder", folder)
    loaded = list(batches(source, STEPS, 2, indices=[7, 3, 20]))
    assert [batch.ids for batch, _ in loaded] == [
        (source.sample(7).id, source.sample(3).id),
        (source.sample(20).id,),
    ]
    assert list(batches(source, STEPS, 2, indices=[])) == []
    with pytest.raises(InputError, match="there is no image 23; the source has 23, counted from 0"):
        batches(source, STEPS, 2, indices=[0, 23])
    with pytest.raises(InputError, match="a batch holds at least 1 image"):
        batches(source, STEPS, 0)
    with pytest.raises(InputError, match="the preprocessing has 4"):
        batches(source, Preprocess(mean=(0.0,) * 4, std=(1.0,) * 4))


def test_unlabelled_pictures_give_no_labels_and_no_truth() -> None:
    (loaded,) = batches(open_source("memory", np.zeros((3, 20, 24), np.uint8)), STEPS)
    assert loaded.batch.labels is None and loaded.batch.truth is None


def test_pictures_are_decoded_at_the_same_time() -> None:
    meet = threading.Barrier(3)

    def read(sample: Sample) -> Image.Image:
        meet.wait(timeout=30)  # passes only when three pictures are being read at once
        return Image.new("RGB", (24, 20))

    source = open_source("memory", np.zeros((12, 20, 24), np.uint8))
    assert sum(len(b.ids) for b, _ in batches(counted(source, read), STEPS, 4, workers=3)) == 12


def test_the_next_batches_fill_while_the_caller_works_and_no_more() -> None:
    started: list[str] = []

    def read(sample: Sample) -> Image.Image:
        started.append(sample.id)
        return Image.new("RGB", (24, 20))

    source = counted(open_source("memory", np.zeros((400, 20, 24), np.uint8)), read)
    batch_size, workers = 8, 2
    ahead = batches_ahead(batch_size, workers) * batch_size
    stream = batches(source, STEPS, batch_size, workers=workers)
    for taken in range(1, 11):
        next(stream)
        wanted = min(taken * batch_size + ahead, 400)
        deadline = time.monotonic() + 30
        while len(started) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.02)
        assert len(started) == wanted
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("heatproof-decode")]


def test_memory_stays_flat_over_many_batches() -> None:
    source = open_source("memory", np.zeros((600, 20, 24), np.uint8))
    steps = Preprocess((64, 64), (64, 64))
    alive = []
    for i, _ in enumerate(batches(source, steps, 4, workers=2)):
        if i % 50 == 10:
            tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape[1:] == (3, 64, 64)]
            alive.append(len({tensor.data_ptr() for tensor in tensors}))
            del tensors
    # Those in the making, the caller's, and what each worker holds for a moment; there are 150 in all.
    assert len(alive) == 3 and max(alive) <= batches_ahead(4, 2) + 1 + 2


def test_a_bug_in_a_worker_surfaces_and_nothing_hangs(folder: Path) -> None:
    def read(sample: Sample) -> Image.Image:
        if sample.id.endswith("05.jpg"):
            raise ZeroDivisionError("a bug")
        return open_image(folder / sample.id)

    source = counted(open_source("folder", folder), read)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        list(batches(source, STEPS, 4, workers=3))
    assert not [t for t in threading.enumerate() if t.name.startswith("heatproof-decode")]

    def lacking(sample: Sample) -> Image.Image:
        raise MissingExtraError("pydicom is not installed")  # not a fault of the picture

    with pytest.raises(MissingExtraError):
        list(batches(counted(source, lacking), STEPS, 4))


def test_a_worker_that_is_told_to_exit_does_not_hang() -> None:
    def read(sample: Sample) -> Image.Image:
        raise SystemExit(1)

    source = counted(open_source("memory", np.zeros((9, 20, 24), np.uint8)), read)
    with pytest.raises(SystemExit):
        list(batches(source, STEPS, 2, workers=2))


def test_a_batch_of_failures_is_empty_and_the_rest_goes_on() -> None:
    def read(sample: Sample) -> Image.Image:
        if int(sample.id) < 4:
            raise InputError("spoilt")
        return Image.new("L", (24, 20))

    source = open_source("memory", np.zeros((6, 20, 24), np.uint8), labels=[0, 1, 0, 1, 0, 1])
    loaded = list(batches(counted(source, read), STEPS, 3))
    assert [len(batch.ids) for batch, _ in loaded] == [0, 2]
    assert loaded[0].batch.images.shape == (0, 3, 20, 24)
    assert loaded[1].batch.labels is not None and loaded[1].batch.labels.tolist() == [0, 1]
    assert [f[:2] for _, failures in loaded for f in failures] == [(f"{i:06d}", "spoilt") for i in range(4)]


def test_boxes_and_masks_travel_with_their_pictures_into_the_metrics() -> None:
    """A map that is bright exactly on the carried truth is inside it and points at it."""
    images = np.zeros((3, 40, 60, 3), np.uint8)
    boxes = [[(20, 10, 39, 29)], [], [(16, 6, 29, 35), (36, 6, 49, 35)]]
    masks = np.zeros((3, 40, 60), bool)
    masks[0, 10:30, 20:40] = masks[2, 6:36, 36:50] = True
    source = open_source("memory", images, boxes=boxes, masks={"object": masks}, labels=[0, 0, 0])
    (loaded,) = batches(source, Preprocess((20, 20), 20), 3)
    truth = loaded.batch.truth
    assert truth is not None and truth.boxes is not None
    assert truth.boxes == (((5, 5, 14, 14),), (), ((3, 3, 9, 17), (13, 3, 19, 17)))
    assert truth.masks["object"].flatten(1).sum(1).tolist() == [100, 0, 7 * 15]
    scores = localise(truth.masks["object"].float(), boxes=truth.boxes, budget=0.05)
    assert scores["pointing"][[0, 2]].tolist() == [1, 1] and scores["inside"][0] == 1
    assert scores["pointing"][1].isnan()


def test_a_box_that_the_crop_took_away_says_so() -> None:
    """The edge of a wide picture is cropped away; a box that was never there is something else."""
    boxes = [[(0, 0, 5, 39)], [], [(0, 0, 5, 39), (30, 20, 30, 20)]]
    source = open_source("memory", np.zeros((3, 40, 80), np.uint8), boxes=boxes)
    (loaded,) = batches(source, Preprocess((40, 40), 40), 3)
    truth = loaded.batch.truth
    assert truth is not None and truth.boxes == ((), (), ((10, 20, 10, 20),))
    maps = torch.zeros(3, 40, 40)
    maps[2, 20, 10] = 1
    scores = name_losses(localise(maps, boxes=truth.boxes), truth.lost)
    gone = "the box (0, 0, 5, 39) was cropped or shrunk away: "
    gone += "it holds no pixel of the 40x40 crop that the model sees"
    assert scores.reasons("pointing") == [gone, "the image has no box and no mask pixel", ""]
    assert scores["pointing"][2] == 1 and scores["pointing"].isnan().tolist() == [True, True, False]


def test_an_unreadable_mask_is_the_pictures_failure(tmp_path: Path) -> None:
    Image.new("RGB", (24, 20)).save(tmp_path / "a.png")
    (tmp_path / "m.png").write_bytes(b"")
    (tmp_path / "list.csv").write_text("path,mask_lung\na.png,m.png\n")
    ((_, failures),) = batches(open_source("csv", tmp_path / "list.csv"), STEPS)
    assert [f[:2] for f in failures] == [("a.png", "its mask of 'lung' cannot be read: the file is empty")]
