"""Where pictures come from: every kind of source, filters, boxes and masks on their way to the crop."""

from __future__ import annotations

import json
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from heatproof.errors import InputError, MissingExtraError, UnknownNameError
from heatproof.images import Preprocess, Source, batches, open_source, source_options
from heatproof.images.source import covered, draw, in_turn

SMALL = Preprocess((16, 16), (16, 16), (0.0,) * 3, (1.0,) * 3)


def picture(path: Path, colour: Any = (10, 20, 30), size: tuple[int, int] = (20, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(colour, tuple) else "L", size, colour).save(path)
    return path


def ids(source: Source) -> list[str]:
    return [sample.id for sample in source.samples]


# folder


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    for name in ("dog/b.png", "dog/deep/a.jpg", "cat/1.bmp", "ant/x.webp"):
        picture(tmp_path / "zoo" / name)
    (tmp_path / "zoo" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "zoo" / ".cache").mkdir()
    picture(tmp_path / "zoo" / ".cache" / "hidden.png")
    return tmp_path / "zoo"


def test_a_folder_per_class_gives_sorted_classes_and_paths(zoo: Path) -> None:
    source = open_source("folder", zoo)
    assert source.classes == ("ant", "cat", "dog")
    assert ids(source) == ["ant/x.webp", "cat/1.bmp", "dog/b.png", "dog/deep/a.jpg"]
    assert [s.label for s in source.samples] == [0, 1, 2, 2]
    assert source.open(2).size == (20, 16)


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    picture(tmp_path / "b.png"), picture(tmp_path / "a.png")
    source = open_source("folder", tmp_path)
    assert ids(source) == ["a.png", "b.png"]
    assert not source.labelled
    assert source.sample(0).label is None


def test_the_models_class_order_can_be_given(zoo: Path) -> None:
    source = open_source("folder", zoo, class_names=["dog", "cow", "cat", "ant"])
    assert [s.label for s in source.samples] == [3, 2, 0, 0]
    with pytest.raises(InputError, match="folder 'ant' that class_names does not list"):
        open_source("folder", zoo, class_names=["dog", "cat"])


def test_splits_can_be_taken_together_by_the_parent_folder(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "test/a/3.png"):
        picture(tmp_path / name)
    source = open_source("folder", tmp_path, level="parent")
    assert source.classes == ("a", "b")
    assert [s.label for s in source.samples] == [0, 0, 1]


def test_a_link_back_to_the_folder_does_not_loop(zoo: Path) -> None:
    (zoo / "dog" / "again").symlink_to(zoo, target_is_directory=True)
    assert len(open_source("folder", zoo)) == 4


def test_folders_that_cannot_be_used_are_refused(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        open_source("folder", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="there is no image in"):
        open_source("folder", tmp_path / "empty")
    picture(zoo / "stray.png")
    with pytest.raises(InputError, match=r"also images outside them, such as stray\.png"):
        open_source("folder", zoo)
    with pytest.raises(InputError, match="a folder source has no option 'clases'; did you mean 'classes'"):
        open_source("folder", zoo, clases=["dog"])
    with pytest.raises(UnknownNameError, match="unknown kind of source 'foldr'"):
        open_source("foldr", zoo)
    assert "box_share" in source_options("folder") and "window" not in source_options("folder")


# csv


def manifest(folder: Path, text: str) -> Path:
    (folder / "list.csv").write_text(text)
    return folder / "list.csv"


def test_a_manifest_gathers_rows_of_one_picture(tmp_path: Path) -> None:
    picture(tmp_path / "p/1.png"), picture(tmp_path / "p/2.png")
    picture(tmp_path / "m/2.png", 255)
    rows = (
        "\ufeffpath, label,x0,y0,x1,y1,mask_part,extra",
        "p/1.png,dog,1,2,5,6,,?",
        "p/2.png,cat,,,,,m/2.png,?",
        "p/1.png,dog,7,2,9,9,,?",
    )
    source = open_source("csv", manifest(tmp_path, "\n".join(rows)))
    assert ids(source) == ["p/1.png", "p/2.png"]
    assert source.classes == ("cat", "dog")
    assert [s.label for s in source.samples] == [1, 0]
    assert source.sample(0).boxes == ((1, 2, 5, 6), (7, 2, 9, 9))
    assert source.parts == ("part",) and source.boxed
    boxes, masks = source.truth(1, SMALL, (20, 16))
    assert boxes.boxes == () and masks["part"].all()


def test_labels_may_be_numbers_or_names_of_given_classes(tmp_path: Path) -> None:
    numbered = manifest(tmp_path, "path,label\na.png,2\nb.png,0.0\n")
    assert [s.label for s in open_source("csv", numbered).samples] == [2, 0]
    assert open_source("csv", numbered).classes == ("0", "1", "2")
    assert open_source("csv", numbered, class_names=["x", "y", "z"]).classes == ("x", "y", "z")
    named = manifest(tmp_path, "path,label\na.png,z\nb.png,1\n")
    assert [s.label for s in open_source("csv", named, class_names=["x", "y", "z"]).samples] == [2, 1]
    unlabelled = open_source("csv", manifest(tmp_path, "path\na.png\n"), class_names=["x"])
    assert unlabelled.sample(0).label is None and not unlabelled.labelled


def test_pascal_boxes_count_from_one(tmp_path: Path) -> None:
    path = manifest(tmp_path, "path,x0,y0,x1,y1\na.png,1,1,20,16\n")
    assert open_source("csv", path, first_pixel=1).sample(0).boxes == ((0, 0, 19, 15),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pth,label\na,b\n", "no column 'path'; did you mean 'pth'"),
        ("path,label\na,b\na,c\n", "line 3: a has the label 'c' here and 'b' before"),
        ("path,label\na,b\nc,\n", "some have none"),
        ("path,label\na,0\nc,\n", "some have none"),
        ("path,label\na,1.0\nc,nan\n", "some have none"),
        ("path,label\na,cat\nc,NaN\n", "some have none"),
        ("path,label\na,0\nb,1\nc,-1\n", "the label '-1' is negative, but class numbers start at 0"),
        ("path,label\na,2.0\nb,-1.0\n", "the label '-1.0' is negative"),
        ("path,label\na,2\nb,cat\nc,3\n", "some labels are numbers, but 'cat' is none"),
        ("path,label\na,cat|dog\nb,dog\n", "'cat|dog' seems to name several classes, but an image has one"),
        ("path,label\na,cat;dog\nb,dog\n", "'cat;dog' seems to name several classes"),
        ("path,x0,y0,x1\na,1,2,3\n", "a box needs x0, y0, x1, y1"),
        ("path,x0,y0,x1,y1\na,1,2,3,\n", r"line 2: a box is four numbers; got 1, 2, 3,"),
        ("path,x0,y0,x1,y1\na,1,2,nan,4\n", "line 2: a box is four finite numbers"),
        ("path,x0,y0,x1,y1\na,10,2,3,4\n", "line 2: the box .* runs backwards"),
        ("path,width,height\na,10,?\n", "line 2: width and height are whole numbers"),
        ("path\na,b\n", "line 2: more cells than columns"),
        ("path,mask_p\na,1.png\na,2.png\n", "two masks of 'p'"),
        ("path\n", "lists no image"),
        ("path,label\n,b\n", "line 2: the column 'path' is empty"),
    ],
)
def test_bad_manifests_raise_a_clear_error(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason.replace("|", "[|]")) as error:
        open_source("csv", manifest(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_listed_class_may_be_called_anything(tmp_path: Path) -> None:
    path = manifest(tmp_path, "path,label\na,cat|dog\nb,-1\nc,0\n")
    source = open_source("csv", path, class_names=["dog", "cat|dog", "-1"])
    assert [s.label for s in source.samples] == [1, 2, 0]
    with pytest.raises(
        InputError, match=r"'cat[|]dog' seems to name several classes.*list the name in class_names"
    ):
        open_source("csv", path, class_names=["dog", "cat", "-1"])


def test_a_label_outside_the_given_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'dgo' is none of the 2 classes; did you mean 'dog'"):
        open_source("csv", manifest(tmp_path, "path,label\na,dgo\n"), class_names=["dog", "cat"])
    with pytest.raises(InputError, match=r"cannot read .* as a CSV file: No such file"):
        open_source("csv", tmp_path / "absent.csv")


# imagenet

XML = """<annotation><filename>{name}</filename>
<size><width>20</width><height>16</height></size>{objects}</annotation>"""
OBJECT = """<object><name>{wnid}</name>
<bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"""


def test_imagenet_boxes_from_xml_and_from_csv_are_the_same(tmp_path: Path) -> None:
    picture(tmp_path / "images/n02/v_1.JPEG"), picture(tmp_path / "images/n01/v_2.JPEG")
    (tmp_path / "class_index.json").write_text(json.dumps({"3": ["n02", "dog"], "1": ["n01", "cat"]}))
    (tmp_path / "xml").mkdir()
    for name, wnid, boxes in (("v_1", "n02", [(0, 0, 19, 15), (2, 3, 9, 9)]), ("v_2", "n01", [(1, 1, 8, 9)])):
        objects = "".join(OBJECT.format(*box, wnid=wnid) for box in boxes)
        (tmp_path / "xml" / f"{name}.xml").write_text(XML.format(name=name, objects=objects))
    (tmp_path / "table.csv").write_text(
        "file,class_index,wnid,class_name,width,height,x0,y0,x1,y1\n"
        "v_1.JPEG,3,n02,dog,20,16,0,0,19,15\nv_1.JPEG,3,n02,dog,20,16,2,3,9,9\nv_2.JPEG,1,n01,cat,20,16,1,1,8,9\n"
    )
    xml = open_source("imagenet", tmp_path)
    table = open_source("imagenet", tmp_path, boxes=tmp_path / "table.csv")
    assert xml.classes == table.classes == ("0", "cat", "2", "dog")
    assert ids(xml) == ["n02/v_1.JPEG", "n01/v_2.JPEG"]
    for a, b in zip(xml.samples, table.samples, strict=True):
        assert (a.label, a.boxes, a.frame, a.content) == (b.label, b.boxes, b.frame, b.content)
    assert xml.open(0).size == (20, 16)
    assert ids(open_source("imagenet", tmp_path, single_object=True)) == ["n01/v_2.JPEG"]


def test_a_box_file_with_several_classes_needs_a_class_folder(tmp_path: Path) -> None:
    objects = OBJECT.format(0, 0, 9, 9, wnid="a") + OBJECT.format(1, 1, 8, 8, wnid="b")
    (tmp_path / "v.xml").write_text(XML.format(name="v", objects=objects))
    picture(tmp_path / "v.JPEG")
    with pytest.raises(InputError, match=r"v\.xml: an image has one class, but its objects have these: a, b"):
        open_source("imagenet", tmp_path)
    (tmp_path / "v.JPEG").unlink()
    picture(tmp_path / "b" / "v.JPEG")
    assert open_source("imagenet", tmp_path).sample(0).boxes == ((1, 1, 8, 8),)


def test_one_object_means_one_box_of_all_classes(tmp_path: Path) -> None:
    for stem, classes in (("alone", "b"), ("two", "bb"), ("beside", "ba"), ("other", "aab")):
        objects = "".join(OBJECT.format(i, i, 9, 9, wnid=name) for i, name in enumerate(classes))
        (tmp_path / f"{stem}.xml").write_text(XML.format(name=stem, objects=objects))
        picture(tmp_path / "b" / f"{stem}.JPEG")
    assert len(open_source("imagenet", tmp_path)) == 4
    assert ids(open_source("imagenet", tmp_path, single_object=True)) == ["b/alone.JPEG"]


def test_a_broken_box_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "v.xml").write_text("<annotation><object>")
    with pytest.raises(InputError, match=r"cannot read .*v\.xml as a box file"):
        open_source("imagenet", tmp_path)


def test_boxes_drawn_on_a_larger_copy_are_scaled_and_on_another_shape_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", size=(20, 16))
    row = "path,width,height,x0,y0,x1,y1\na.png,{},{},10,8,19,15\n"
    double = open_source("csv", manifest(tmp_path, row.format(40, 32)))
    plain = Preprocess((16, 20), (16, 20), (0.0,), (1.0,))
    assert double.truth(0, plain, (20, 16))[0].boxes == ((5, 4, 9, 7),)
    turned = open_source("csv", manifest(tmp_path, row.format(16, 20)))
    with pytest.raises(InputError, match="drawn on a 16x20 image, but the file has 20x16 pixels"):
        turned.truth(0, plain, (20, 16))


# npz and memory


def test_npz_in_the_medmnist_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "train_images": rng.integers(0, 256, (5, 28, 28, 3), np.uint8),
        "train_labels": np.array([[0], [1], [2], [1], [0]], np.uint8),
        "test_images": rng.integers(0, 256, (3, 28, 28), np.uint8),
        "test_labels": np.array([[1], [0], [1]], np.uint8),
    }
    np.savez_compressed(tmp_path / "m.npz", **arrays)
    test = open_source("npz", tmp_path / "m.npz")
    assert [s.label for s in test.samples] == [1, 0, 1] and test.classes == ("0", "1")
    assert np.array_equal(np.asarray(test.open(1)), arrays["test_images"][1])
    train = open_source("npz", tmp_path / "m.npz", split="train", class_names=["a", "b", "c"])
    assert np.array_equal(np.asarray(train.open(4)), arrays["train_images"][4])
    assert ids(train)[0] == "train_000000"
    with pytest.raises(InputError, match=r"no array val_images; set split to one it has .*train, test"):
        open_source("npz", tmp_path / "m.npz", split="val")
    (tmp_path / "bad.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:200])
    with pytest.raises(InputError, match=r"cannot read .*bad\.npz as an \.npz file"):
        open_source("npz", tmp_path / "bad.npz")


def test_an_npz_hash_follows_its_pixels(tmp_path: Path) -> None:
    hashes = []
    for value in (0, 0, 1):
        images = np.full((2, 8, 8), value, np.uint8)
        np.savez(tmp_path / "m.npz", test_images=images, test_labels=np.array([0, 1]))
        hashes.append(open_source("npz", tmp_path / "m.npz").hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_volume_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", test_images=np.zeros((2, 8, 8, 8), np.uint8))
    with pytest.raises(InputError, match="'n h w' or 'n h w c' with 1 or 3 channels"):
        open_source("npz", tmp_path / "b.npz")


def test_shallow_arrays_are_scaled_alike(tmp_path: Path) -> None:
    images = np.array([[[0, 4095]], [[0, 100]]], np.uint16)
    np.savez(tmp_path / "deep.npz", test_images=images)
    for source in (open_source("memory", images), open_source("npz", tmp_path / "deep.npz")):
        assert [np.asarray(source.open(i)).tolist() for i in (0, 1)] == [[[0, 255]], [[0, 6]]]
    stated = open_source("memory", images, bits=16)
    assert [np.asarray(stated.open(i)).tolist() for i in (0, 1)] == [[[0, 16]], [[0, 0]]]
    with pytest.raises(InputError, match="image 0: its values run from 0 to 4095; 10 bits hold 0 to 1023"):
        open_source("npz", tmp_path / "deep.npz", bits=10)


def test_pictures_in_memory_come_back_as_they_are() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 9, 7, 3), np.uint8)
    for images in (
        pixels,
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
        torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255,
        list(pixels),
        [Image.fromarray(p) for p in pixels],
        pixels.astype(np.uint16) * 257,
    ):
        source = open_source("memory", images, labels=[0, 1, 1, 0])
        assert all(np.array_equal(np.asarray(source.open(i)), pixels[i]) for i in range(4))
    assert open_source("memory", torch.zeros(2, 1, 5, 6)).open(0).mode == "L"


@pytest.mark.parametrize(
    ("images", "options", "reason"),
    [
        (np.zeros((2, 4, 4, 5), np.uint8), {}, "image 0: it must be"),
        (np.zeros((2, 4, 4)) - 1, {}, "image 0: its values run from -1 to -1"),
        (np.full((2, 4, 4), np.nan), {}, "its values run from nan"),
        (np.zeros((2, 4, 4), np.int64), {}, "int64 values"),
        (np.zeros((2, 4, 4), np.uint8), {"labels": [0]}, "labels has 1 entries, but there are 2 images"),
        (np.zeros((2, 4, 4), np.uint8), {"labels": [0, -1]}, "the label -1; class numbers start at 0"),
        (np.zeros((2, 4, 4), np.uint8), {"labels": [0, 2], "class_names": ["a", "b"]}, "only 2 class names"),
        (np.zeros((0, 4, 4), np.uint8), {}, "no image in memory"),
    ],
)
def test_bad_pictures_in_memory_are_refused(images: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        open_source("memory", images, **options)


# optional kinds


def test_a_missing_package_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind, package, extra in (("hf", "datasets", "datasets"), ("dicom", "pydicom", "dicom")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"pip install .*'heatproof\[{extra}\]'"):
            open_source(kind, tmp_path)


def test_hugging_face_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    import io

    def encoded(value: int, kind: str = "PNG") -> dict[str, Any]:
        buffer = io.BytesIO()
        Image.new("L", (10, 8), value).save(buffer, kind)
        return {"bytes": buffer.getvalue(), "path": None}

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["1", "0"])})
    broken = {"bytes": b"no picture", "path": None}
    rows = {"image": [encoded(5), broken, encoded(9)], "label": [0, 1, 1]}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    source = open_source("hf", tmp_path / "saved", split="test")
    assert source.classes == ("1", "0") and [s.label for s in source.samples] == [0, 1, 1]
    loaded = next(batches(source, SMALL, 3, workers=2))
    assert loaded.batch.ids == ("000000", "000002")
    assert [f.id for f in loaded.failures] == ["000001"] and "not a readable image" in loaded.failures[
        0
    ].reason
    assert torch.allclose(loaded.batch.images[1], torch.tensor(9 / 255))
    with pytest.raises(InputError, match="has the splits train, test; set split to one"):
        open_source("hf", tmp_path / "saved")
    with pytest.raises(InputError, match="no column 'picture'; "):
        open_source("hf", tmp_path / "saved", split="test", image_column="picture")
    with pytest.raises(InputError, match="cannot load the dataset"):
        open_source("hf", tmp_path / "nothing", split="test")


def dicom_file(path: Path, values: np.ndarray, **tags: Any) -> Path:
    pydicom = pytest.importorskip("pydicom", reason="the package pydicom is not installed")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3.4"
    file = pydicom.dataset.Dataset()
    file.file_meta = meta
    file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3.4"
    file.Rows, file.Columns = values.shape[-2:]
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated = file.BitsStored = values.dtype.itemsize * 8
    file.HighBit, file.PixelRepresentation = file.BitsStored - 1, int(values.dtype.kind == "i")
    if values.ndim == 3:
        file.NumberOfFrames = len(values)
    for name, value in tags.items():
        setattr(file, name, value)
    file.PixelData = values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_dicom_windows_agree_with_pydicom(tmp_path: Path, function: str) -> None:
    pydicom = pytest.importorskip("pydicom", reason="the package pydicom is not installed")
    values = np.random.default_rng(0).integers(-1000, 2000, (12, 14)).astype(np.int16)
    window = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": [40, 9], "WindowWidth": [400, 9]}
    dicom_file(tmp_path / "ct" / "a.dcm", values, **window, VOILUTFunction=function)
    seen = np.asarray(open_source("dicom", tmp_path).open(0)).astype(float)
    file = pydicom.dcmread(tmp_path / "ct" / "a.dcm")
    reference = pydicom.pixels.apply_windowing(pydicom.pixels.apply_modality_lut(values, file), file)
    # pydicom's result spans the range that all 16-bit values have after rescaling.
    low, high = -(2**15) * 2 - 100, (2**15 - 1) * 2 - 100
    assert np.abs(seen - 255 * (reference - low) / (high - low)).max() <= 0.5 + 1e-6
    assert 0 < (seen > 0).mean() < 1


def test_dicom_given_window_inversion_frames_and_range(tmp_path: Path) -> None:
    ramp = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    dicom_file(tmp_path / "plain", ramp)
    dicom_file(tmp_path / "inverted.dcm", ramp, PhotometricInterpretation="MONOCHROME1")
    dicom_file(tmp_path / "movie.dcm", np.stack([ramp, ramp * 0]))
    (tmp_path / "text.dcm").write_text("no DICOM here")
    (tmp_path / "cut.dcm").write_bytes((tmp_path / "plain").read_bytes()[:-60])
    source = open_source("dicom", tmp_path)
    assert ids(source) == ["cut.dcm", "inverted.dcm", "movie.dcm", "plain", "text.dcm"]
    own_range = np.rint(ramp / 4095 * 255).astype(np.uint8)
    assert np.array_equal(np.asarray(source.open(3)), own_range)
    assert np.array_equal(np.asarray(source.open(2)), own_range)
    assert np.abs(np.asarray(source.open(1)).astype(int) - (255 - own_range)).max() <= 1
    window = np.asarray(open_source("dicom", tmp_path, window=(1000, 101)).open(3))
    assert window[ramp < 949].max() == 0 and window[ramp > 1050].min() == 255
    with pytest.raises(InputError, match=r"cannot read text\.dcm: its content is not DICOM"):
        source.open(4)
    with pytest.raises(InputError, match=r"cannot read cut\.dcm: the DICOM file cannot be decoded"):
        source.open(0)


def test_dicom_files_of_a_manifest_bring_labels_and_boxes(tmp_path: Path) -> None:
    dicom_file(tmp_path / "a.dcm", np.arange(64, dtype=np.uint16).reshape(8, 8))
    path = manifest(tmp_path, "path,label,x0,y0,x1,y1\na.dcm,1,2,2,5,5\n")
    source = open_source("dicom", path, box_share=(0.2, 0.3))
    assert source.sample(0).boxes == ((2, 2, 5, 5),) and source.open(0).mode == "L"


NET = """
import torch
def tiny():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5, 4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                               torch.nn.Flatten(), torch.nn.Linear(4, 3))
"""


def test_explain_reads_dicom_with_the_sources_reader(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from heatproof.cli import main
    from heatproof.images import open_image

    ramp = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    dicom_file(tmp_path / "scans" / "a.dcm", ramp, PhotometricInterpretation="MONOCHROME1")
    dicom_file(tmp_path / "nameless", ramp)
    seen = open_source("dicom", tmp_path / "scans").open(0)
    assert np.array_equal(np.asarray(open_image(tmp_path / "scans" / "a.dcm")), np.asarray(seen))
    (tmp_path / "net.py").write_text(NET)
    place = [str(tmp_path / name) for name in ("scans", "nameless")]  # a folder and a file
    out = ["-m", "gradcam", "--alpha", "0", "--out", str(tmp_path / "maps")]
    done = CliRunner().invoke(main, ["explain", f"{tmp_path / 'net.py'}:tiny", *place, *out])
    assert done.exit_code == 0 and "2 of 2 images explained" in done.output, done.output
    drawn = np.asarray(Image.open(tmp_path / "maps" / "a.gradcam.png"))
    assert np.array_equal(drawn, np.asarray(Preprocess().crop(seen)))  # type: ignore[arg-type]
    (tmp_path / "cut.dcm").write_bytes((tmp_path / "nameless").read_bytes()[:-60])
    with pytest.raises(
        InputError, match=r"cannot read .*cut\.dcm as an image: the DICOM file cannot be decoded"
    ):
        open_image(tmp_path / "cut.dcm")


def test_explain_takes_the_bit_depth(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from heatproof.cli import main

    Image.fromarray(np.full((300, 300), 1000, np.uint16)).save(tmp_path / "a.png")
    (tmp_path / "net.py").write_text(NET)
    for bits, level in (([], 249), (["--bits", "12"], 62), (["--bits", "16"], 4)):
        out = ["-m", "gradcam", "--alpha", "0", "--out", str(tmp_path / "maps"), *bits]
        done = CliRunner().invoke(
            main, ["explain", f"{tmp_path / 'net.py'}:tiny", str(tmp_path / "a.png"), *out]
        )
        assert done.exit_code == 0, done.output
        assert np.unique(np.asarray(Image.open(tmp_path / "maps" / "a.gradcam.png"))).tolist() == [level]


# filters and subsets


def test_single_object_and_box_share_filter() -> None:
    whole, tiny, quarter = (0, 0, 9, 9), (0, 0, 1, 1), (0, 0, 4, 4)
    boxes = [[whole], [tiny], [quarter], [quarter, tiny], []]
    images = np.zeros((5, 10, 10), np.uint8)
    source = open_source("memory", images, boxes=boxes, single_object=True)
    assert ids(source) == ["000000", "000001", "000002"]
    thesis = open_source("memory", images, boxes=boxes, single_object=True, box_share=(0.1, 0.8))
    assert ids(thesis) == ["000002"]
    share = open_source("memory", images, boxes=boxes, box_share=(0.1, 0.8))
    assert ids(share) == ["000002", "000003"]
    with pytest.raises(
        InputError, match=r"no image is left: 5 in the source, 0 whose boxes cover 0\.5 to 0\.6"
    ):
        open_source("memory", images, boxes=boxes, box_share=(0.5, 0.6))
    with pytest.raises(InputError, match="box_share is a low and a high share"):
        open_source("memory", images, boxes=boxes, box_share=(10, 80))


@given(st.lists(st.tuples(*[st.integers(-3, 14)] * 4), min_size=1, max_size=4))
def test_covered_counts_pixels(corners: list[tuple[int, int, int, int]]) -> None:
    boxes = [(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in corners]
    area = np.zeros((9, 12), bool)
    for x0, y0, x1, y1 in boxes:
        area[max(y0, 0) : max(y1 + 1, 0), max(x0, 0) : max(x1 + 1, 0)] = True
    assert covered(boxes, (12, 9)) == pytest.approx(area.mean())


def test_classes_are_chosen_by_name_or_number(zoo: Path) -> None:
    source = open_source("folder", zoo, classes=["dog", 0])
    assert [s.label for s in source.samples] == [0, 2, 2]
    assert source.classes == ("ant", "cat", "dog")
    with pytest.raises(UnknownNameError, match="unknown class 'dgo'; did you mean 'dog'"):
        open_source("folder", zoo, classes=["dgo"])


def test_a_stratified_subset_keeps_proportions_and_grows() -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    small, large = draw(labels, 20, seed=3), draw(labels, 50, seed=3)
    assert Counter(labels[i] for i in small) == {0: 12, 1: 6, 2: 2}
    assert small == sorted(small) and set(small) < set(large)
    assert small == draw(labels, 20, seed=3) != draw(labels, 20, seed=4)
    assert draw(labels, 1000) == list(range(100))


def test_in_turn_every_beginning_has_the_labels_in_proportion() -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    order = in_turn(labels, seed=3)
    assert sorted(order) == list(range(100)) and order == in_turn(labels, seed=3) != in_turn(labels, seed=4)
    for n in (10, 32, 50):
        counts = Counter(labels[i] for i in order[:n])
        assert all(abs(counts[k] - n * labels.count(k) / 100) <= 1 for k in (0, 1, 2)), n
    alone = in_turn(list(range(100)))  # one picture of each class: no class is before others
    assert sorted(alone) == list(range(100)) and max(alone[:20]) > 60


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 60), st.integers(0, 5))
def test_draw_takes_exactly_the_count(labels: list[int], count: int, seed: int) -> None:
    chosen = draw(labels, count, seed)
    assert len(chosen) == len(set(chosen)) == min(count, len(labels))
    for label in set(labels):
        share = min(count, len(labels)) * labels.count(label) / len(labels)
        assert abs(sum(labels[i] == label for i in chosen) - share) < 1


def test_limit_is_seeded_and_may_ignore_classes() -> None:
    images, labels = np.zeros((40, 8, 8), np.uint8), [0] * 20 + [1] * 20
    source = open_source("memory", images, labels=labels)
    choices: list[dict[str, Any]] = [{}, {"stratified": False}, {"seed": 1}]
    subsets = [open_source("memory", images, labels=labels, limit=10, **choice) for choice in choices]
    assert len({tuple(ids(s)) for s in subsets}) == 3 and all(len(s) == 10 for s in subsets)
    assert Counter(s.label for s in subsets[0].samples) == {0: 5, 1: 5}
    assert len({s.hash for s in (source, *subsets)}) == 4


def test_the_hash_follows_what_matters_and_nothing_else(tmp_path: Path) -> None:
    def build(folder: str, colour: tuple[int, int, int] = (1, 2, 3), label: str = "a", box: str = "1") -> str:
        (tmp_path / folder).mkdir()
        picture(tmp_path / folder / "p.bmp", colour, (12, 12))
        text = f"path,label,x0,y0,x1,y1\np.bmp,{label},{box},1,8,8\n"
        return open_source("csv", manifest(tmp_path / folder, text)).hash

    same = build("one")
    assert build("copy") == same
    assert build("label", label="b") != same
    assert build("box", box="2") != same
    (tmp_path / "one" / "p.bmp").write_bytes(b"shorter")
    assert open_source("csv", tmp_path / "one" / "list.csv").hash != same


# boxes and masks through resize and crop


def pillow_warp(mask: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """The mask as a picture through Pillow, the way the picture itself goes."""
    grey = Preprocess(preprocess.size, preprocess.resize, (0.0,), (1.0,), "nearest")
    return np.asarray(grey.crop(Image.fromarray(mask.astype(np.uint8) * 255))) > 127


def slow_warp(mask: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Pixel by pixel: what lies under the centre of each pixel of the crop, in exact fractions."""
    (width, scaled_width, left, _), (height, scaled_height, top, _) = preprocess.axes(mask.shape[::-1])
    out = np.zeros(preprocess.size, bool)
    for j, i in np.ndindex(out.shape):
        x = (Fraction(i + left) + Fraction(1, 2)) * Fraction(width, scaled_width)
        y = (Fraction(j + top) + Fraction(1, 2)) * Fraction(height, scaled_height)
        if 0 <= x < width and 0 <= y < height:
            out[j, i] = mask[int(y), int(x)]
    return out


def tight(mask: np.ndarray) -> tuple[float, ...]:
    ys, xs = np.nonzero(mask)
    return float(xs.min()), float(ys.min()), float(xs.max()), float(ys.max())


shapes = st.tuples(st.integers(20, 90), st.integers(20, 90))
steps = st.builds(
    Preprocess,
    st.tuples(st.integers(12, 48), st.integers(12, 48)),
    st.one_of(st.integers(12, 64), st.tuples(st.integers(12, 64), st.integers(12, 64))),
)


@settings(deadline=None, max_examples=60)
@given(shapes, steps, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_a_carried_box_is_the_box_of_the_warped_mask(
    size: tuple[int, int], preprocess: Preprocess, corners: list[float]
) -> None:
    width, height = size
    x0, x1 = sorted(int(c * (width - 1)) for c in corners[:2])
    y0, y1 = sorted(int(c * (height - 1)) for c in corners[2:])
    mask = np.zeros((height, width), bool)
    mask[y0 : y1 + 1, x0 : x1 + 1] = True
    carried = preprocess.carry_boxes([(x0, y0, x1, y1)], size)
    ours, theirs = preprocess.carry_mask(mask, size).numpy(), pillow_warp(mask, preprocess)
    assert ours.shape == preprocess.size
    assert np.array_equal(ours, slow_warp(mask, preprocess))
    if carried.boxes:
        assert carried.boxes[0] == tight(ours)
        # Pillow sums rounded steps, so where a pixel's centre falls on an edge it may take the one before.
        assert np.abs(np.subtract(carried.boxes[0], tight(theirs))).max() <= 1
    else:
        assert "was cropped or shrunk away" in carried.lost[0]
        assert not ours.any()


def test_a_box_lines_up_with_the_picture_it_is_drawn_on() -> None:
    """The picture itself, bilinear, is bright where the carried box says so."""
    pixels = np.zeros((375, 500, 3), np.uint8)
    pixels[71:247, 130:477] = 255
    preprocess = Preprocess()
    (box,) = preprocess.carry_boxes([(130, 71, 476, 246)], (500, 375)).boxes
    bright = np.asarray(preprocess.crop(Image.fromarray(pixels)))[..., 0] > 127
    assert np.abs(np.subtract(box, tight(bright))).max() <= 1
    assert box == tight(pillow_warp(pixels[..., 0] > 0, preprocess))


def test_boxes_are_clipped_to_the_crop_and_lost_outside_it() -> None:
    preprocess = Preprocess((10, 10), (10, 30))
    carried = preprocess.carry_boxes([(0, 0, 14, 9), (0, 0, 8, 9), (29, 0, 40, 9)], (30, 10))
    assert carried.boxes == ((0, 0, 4, 9),)
    assert len(carried.lost) == 2 and carried.lost[0] == (
        "the box (0, 0, 8, 9) was cropped or shrunk away: "
        "it holds no pixel of the 10x10 crop that the model sees"
    )
    thin = preprocess.carry_boxes([(0, 0, 10, 0), (12, 3, 12, 3)], (30, 10))
    assert thin.boxes == ((0, 0, 0, 0), (2, 3, 2, 3)) and not thin.lost  # one pixel is a box
    padded = Preprocess((10, 50), (10, 30)).carry_boxes([(0, 0, 30, 10)], (30, 10))
    assert padded.boxes == ((10, 0, 39, 9),)  # edges counted as corners end at the picture's last pixel
    assert not Preprocess((10, 50), (10, 30)).carry_mask(np.ones((10, 30)), (30, 10))[:, :10].any()


def test_a_mask_of_another_size_is_stretched_over_the_picture() -> None:
    mask = np.zeros((5, 5), bool)
    mask[1, 3] = True
    carried = Preprocess((100, 100), (100, 100)).carry_mask(torch.from_numpy(mask), (50, 50))
    assert tight(carried.numpy()) == (60, 20, 79, 39)
    with pytest.raises(InputError, match="a mask has rows and columns"):
        Preprocess().carry_mask(np.zeros((3, 4, 4)), (4, 4))


def test_mask_files_count_from_half_their_brightest_pixel(tmp_path: Path) -> None:
    values = np.array([[0, 60, 127], [128, 200, 255]], np.uint8)
    Image.fromarray(values).save(tmp_path / "soft.png")
    Image.fromarray(values // 128).save(tmp_path / "ones.png")
    picture(tmp_path / "a.png", size=(3, 2))
    source = open_source("csv", manifest(tmp_path, "path,mask_soft,mask_ones\na.png,soft.png,ones.png\n"))
    masks = source.truth(0, Preprocess((2, 3), (2, 3)), (3, 2))[1]
    assert masks["soft"].tolist() == masks["ones"].tolist() == [[False] * 3, [True] * 3]


# real data


def test_imagenet_photographs_and_their_boxes(real_data: Path) -> None:
    source = open_source("imagenet", real_data / "imagenet")
    assert len(source) == 215 and len({s.label for s in source.samples}) == 43
    assert len(source.classes) == 1000 and source.classes[source.sample(0).label or 0] == "goldfish"
    assert len(open_source("imagenet", real_data / "imagenet", single_object=True)) == 172
    share = open_source("imagenet", real_data / "imagenet", single_object=True, box_share=(0.1, 0.8))
    assert 0 < len(share) < 172
    corners = np.array([box for s in source.samples for box in s.boxes])
    sizes = np.array([s.frame for s in source.samples for _ in s.boxes])
    # Corners count from 0 and are inside: they reach 0 and the last pixel, and never the width itself.
    assert corners.min() == 0 and (corners[:, 2:] == sizes - 1).any() and (corners[:, 2:] < sizes).all()
    loaded = next(batches(share, Preprocess(), 8))
    assert not loaded.failures and loaded.batch.images.shape == (8, 3, 224, 224)
    assert loaded.batch.truth is not None and all(len(b) == 1 for b in loaded.batch.truth.boxes or ())


def test_chest_x_rays(real_data: Path) -> None:
    counts = {
        part: Counter(s.label for s in open_source("folder", real_data / "chestxray" / part).samples)
        for part in ("train", "test")
    }
    assert counts == {"train": {0: 1341, 1: 3875}, "test": {0: 234, 1: 390}}
    pooled = open_source("folder", real_data / "chestxray", level="parent")
    assert len(pooled) == 5840 and pooled.classes == ("NORMAL", "PNEUMONIA")
