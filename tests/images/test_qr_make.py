"""heatproof qr make: files that heatproof's own csv source reads back."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from heatproof.cli.qr import parse_versions, qr_command
from heatproof.errors import HeatproofError
from heatproof.images import make_qr, open_source
from heatproof.images.codes import write_codes
from heatproof.images.distort import distort
from heatproof.images.preprocess import Preprocess

pytest.importorskip("segno")
SIDE = 64


def make(out: Path, *options: str) -> Result:
    few = ("--positives", "3", "--negatives", "6", "--size", str(SIDE), "--seed", "2")
    return CliRunner().invoke(qr_command, ["make", str(out), *few, *options], catch_exceptions=False)


def test_the_csv_source_reads_what_was_written(tmp_path: Path) -> None:
    result = make(tmp_path / "codes", "--distortion", "rotation", "--severity", "0.5")
    assert result.exit_code == 0 and 'kind = "csv"' in result.output
    drawn = make_qr(3, 6, SIDE, seed=2)
    pictures, masks = distort(drawn.pictures, "rotation", 0.5, seed=2, masks=drawn.masks)
    source = open_source("csv", tmp_path / "codes" / "manifest.csv")
    assert len(source) == 9 and [s.label for s in source.samples] == [1] * 3 + [0] * 6
    assert source.parts == ("box", "finder", "timing") and masks is not None
    whole = Preprocess((SIDE, SIDE), (SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)
    for i in range(9):
        assert np.array_equal(np.asarray(source.open(i)), pictures[i])
        boxes, parts = source.truth(i, whole, (SIDE, SIDE))
        assert set(parts) == (set(masks) if i < 3 else set())
        for part, mask in parts.items():
            assert np.array_equal(mask.numpy(), masks[part][i])
        assert len(boxes.boxes) == (i < 3)
    with Image.open(tmp_path / "codes" / "preview.png") as sheet:
        assert sheet.width > 600 and sheet.height > 400


def test_the_manifest_tells_what_was_drawn(tmp_path: Path) -> None:
    data = make_qr(3, 6, SIDE, seed=2)
    with write_codes(data, tmp_path / "codes").open() as file:
        rows = list(csv.DictReader(file))
    for row, spot, kind in zip(rows, data.spots, data.kinds, strict=True):
        assert row["kind"] == kind and int(row["scale"]) == spot.scale and int(row["left"]) == spot.left
        assert row["text"] == (spot.code.text if spot.code else "")
    box = [int(rows[0][corner]) for corner in ("x0", "y0", "x1", "y1")]
    wide = data.spots[0].scale * data.spots[0].shape[1]
    left, top = data.spots[0].left, data.spots[0].top
    assert box == [left, top, left + wide - 1, top + wide - 1]


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name, "--symbol", "datamatrix", "--versions", "2-4")
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*.*")) for n in ("a", "b")]
    assert files[0] == files[1] and len(files[0]) == 9 + 9 + 2
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files[0])


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    assert make(tmp_path / "codes").exit_code == 0
    with pytest.raises(HeatproofError, match="or overwrite its set"):
        make(tmp_path / "codes")
    assert make(tmp_path / "codes", "--overwrite", "--negatives", "1").exit_code == 0
    assert len(list((tmp_path / "codes" / "pictures").iterdir())) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(HeatproofError, match="holds other files"):
        make(tmp_path / "mine", "--overwrite")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_what_cannot_be_made_raises_a_clear_error_before_anything_is_written(tmp_path: Path) -> None:
    for options, message in (
        (("--symbol", "kr"), "unknown symbol"),
        (("--distortion", "rotate"), "unknown distortion 'rotate'; did you mean 'rotation'"),
        (("--distortion", "blur", "--severity", "2"), "from 0 .none. to 1; got 2"),
        (("--severity", "0.5"), "name it with --distortion"),
        (("--versions", "six"), "cannot read the versions 'six'"),
        (("--versions", "50"), "there is no version 50"),
        (("--versions", "20"), "version 20 of the QR code does not fit into 64x64 pixels"),
        (("--positives", "0", "--negatives", "0"), "nothing to generate"),
        (("--photos", str(tmp_path / "none")), "there is no folder"),
    ):
        with pytest.raises(HeatproofError, match=message):
            make(tmp_path / "codes", *options)
    assert not (tmp_path / "codes").exists()


def test_versions_are_read_as_people_write_them() -> None:
    assert parse_versions(None) is None and parse_versions("1-3, 7") == [1, 2, 3, 7]
