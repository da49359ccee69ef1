"""Sources whose pictures may have several findings: how they are listed, what belongs to which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.errors import InputError
from heatproof.images import Preprocess, Source, batches, open_source
from heatproof.images.loader import entries
from heatproof.images.source import Hashes, identify

PLAIN = Preprocess((16, 16), (16, 16), (0.0,) * 3, (1.0,) * 3)
NAMES = ("mass", "nodule", "scar")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for i in range(4):
        Image.new("RGB", (16, 16), (40 * i, 0, 0)).save(tmp_path / f"{i}.png")
    marked = np.zeros((16, 16), np.uint8)
    marked[2:5, 2:5] = 255
    Image.fromarray(marked).save(tmp_path / "mask.png")
    return tmp_path


def listed(folder: Path, text: str, **options: Any) -> Source:
    (folder / "list.csv").write_text(text)
    return open_source("csv", folder / "list.csv", **options)


def findings(source: Source) -> list[tuple[int, ...] | None]:
    return [sample.findings for sample in source.samples]


def test_a_cell_may_list_several_findings_and_none(pictures: Path) -> None:
    text = "path,label\n0.png,nodule|mass\n1.png,scar; mass\n2.png,\n3.png,No Finding\n"
    source = listed(pictures, text, multilabel=True)
    assert source.classes == NAMES and source.is_multilabel and source.labelled
    assert findings(source) == [(0, 1), (0, 2), (), ()]
    assert all(sample.label is None for sample in source.samples)


def test_a_column_of_0_and_1_for_each_finding(pictures: Path) -> None:
    text = "path,scar,mass,nodule\n0.png,0,1,1\n1.png,1.0,True,\n2.png,0,0,nan\n"
    source = listed(pictures, text, label_columns=list(NAMES))
    assert source.classes == NAMES and findings(source) == [(0, 1), (0, 2), ()]


def test_boxes_and_masks_belong_to_findings(pictures: Path) -> None:
    text = (
        "path,label,x0,y0,x1,y1,mask_mass\n"
        "0.png,mass,1,1,3,3,mask.png\n0.png,nodule,8,8,10,12,\n0.png,nodule,5,5,6,6,\n1.png,scar,0,0,4,4,\n"
        "2.png,,,,,,\n"
    )
    source = listed(pictures, text, multilabel=True)
    assert findings(source) == [(0, 1), (2,), ()]
    (loaded,) = batches(source, PLAIN, 8, workers=0)
    assert loaded.batch.findings is not None and loaded.batch.labels is None
    assert loaded.batch.findings.tolist() == [[True, True, False], [False, False, True], [False] * 3]
    batch, about = entries(loaded.batch, loaded.batch.findings, source.classes)
    assert batch.ids == ("0.png#mass", "0.png#nodule", "1.png#scar")
    assert about.tolist() == [0, 1, 2] and batch.labels is not None and batch.labels.tolist() == [0, 1, 2]
    assert torch.equal(batch.images, loaded.batch.images[[0, 0, 1]])
    assert batch.truth is not None and batch.truth.boxes is not None
    assert [len(boxes) for boxes in batch.truth.boxes] == [1, 2, 1]
    assert batch.truth.boxes[1][0] == (8.0, 8.0, 10.0, 12.0)
    assert batch.truth.masks["mass"].flatten(1).sum(1).tolist() == [9, 0, 0]


def test_an_entry_of_a_finding_that_is_not_there_has_no_label_and_no_truth(pictures: Path) -> None:
    source = listed(
        pictures, "path,label,x0,y0,x1,y1\n0.png,mass,1,1,3,3\n1.png,nodule,1,1,3,3\n", multilabel=True
    )
    (loaded,) = batches(source, PLAIN, 8, workers=0)
    batch, about = entries(loaded.batch, torch.tensor([[False, True], [False, True]]), source.classes)
    assert batch.ids == ("0.png#nodule", "1.png#nodule") and about.tolist() == [1, 1]
    assert batch.labels is not None and batch.labels.tolist() == [-1, 1]
    assert batch.truth is not None and batch.truth.boxes == ((), ((1.0, 1.0, 3.0, 3.0),))
    none, _ = entries(loaded.batch, torch.zeros(2, 2, dtype=torch.bool), source.classes)
    assert none.ids == () and len(none.images) == 0


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("path,a,b\n0.png,-1,0\n", {"label_columns": ["a", "b"]}, "'a' holds 0 or 1, not '-1'; uncertain"),
        ("path,a,b\n0.png,1,0\n", {"label_columns": ["a", "c"]}, "no column 'c'"),
        ("path,label\n0.png,a\n1.png,\n", {"multilabel": True}, "at least two labels, but there is a"),
        ("path,label\n0.png,a|b\n", {"multilabel": True, "class_names": ["a", "c"]}, "'b' is none of the 2"),
        ("path,label,x0,y0,x1,y1\n0.png,,1,1,3,3\n", {"multilabel": True}, "a box in a row with no label"),
        ("path,a,b,x0,y0,x1,y1\n0.png,1,1,1,1,3,3\n", {"label_columns": ["a", "b"]}, "with 2 labels; name"),
        ("path,a,b,label\n0.png,1,0,b\n", {"label_columns": ["a", "b"]}, "names 'b', but its column"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_raises_a_clear_error(
    pictures: Path, text: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        listed(pictures, text, **options)


def test_findings_of_pictures_in_memory() -> None:
    images = np.zeros((3, 16, 16), np.uint8)
    table = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    variants = (table, torch.tensor(table), [["mass", "scar"], [], ["nodule"]], [[0, 2], [], [1]])
    for labels in variants:
        source = open_source("memory", images, labels=labels, class_names=NAMES)
        assert findings(source) == [(0, 2), (), (1,)] and source.classes == NAMES
    boxes = [[(1, 1, 2, 2), (3, 3, 4, 4)], [], [(5, 5, 6, 6)]]
    named = {"boxes": boxes, "box_labels": [["scar", "mass"], [], ["nodule"]]}
    source = open_source("memory", images, labels=table, class_names=NAMES, **named)
    assert [s.box_findings for s in source.samples] == [((2,), (0,)), (), ((1,),)]
    with pytest.raises(InputError, match="image 0 has boxes and 2 labels; give box_labels too"):
        open_source("memory", images, labels=table, boxes=boxes)
    with pytest.raises(InputError, match="a table of 0 and 1"):
        open_source("memory", images, labels=table * 2)


def test_hugging_face_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    column = datasets.Sequence(datasets.ClassLabel(names=list(NAMES)))
    features = datasets.Features({"image": datasets.Image(), "label": column})
    images = [Image.new("L", (8, 8), 9)] * 3
    table = datasets.Dataset.from_dict({"image": images, "label": [[2, 0], [], [1]]}, features=features)
    table.save_to_disk(tmp_path / "set")
    source = open_source("hf", tmp_path / "set")
    assert source.classes == NAMES and findings(source) == [(0, 2), (), (1,)]


def test_hashes_follow_findings_and_filters_know_them(pictures: Path) -> None:
    first = listed(pictures, "path,label\n0.png,mass|scar\n1.png,nodule\n", multilabel=True)
    other = listed(pictures, "path,label\n0.png,mass\n1.png,nodule|scar\n", multilabel=True)
    assert first.hash != other.hash and identify(first, Hashes()) != identify(other, Hashes())
    chosen = open_source("csv", pictures / "list.csv", multilabel=True, classes=["scar"])
    assert [sample.id for sample in chosen.samples] == ["1.png"]
