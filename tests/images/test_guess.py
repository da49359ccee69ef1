"""A path tells what kind of source it is, or in one sentence why not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from heatproof.errors import InputError
from heatproof.images import open_source
from heatproof.images.kinds import guess_source


def draw(*files: Path) -> None:
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 9, 3), i, np.uint8)).save(file)


def test_folders_with_and_without_classes(tmp_path: Path) -> None:
    draw(tmp_path / "a/cat/1.png", tmp_path / "a/dog/2.png", tmp_path / "b/1.png")
    guess = guess_source(tmp_path / "a")
    assert (guess.kind, guess.path, guess.seen) == ("folder", tmp_path / "a", "a folder for each class")
    assert open_source(guess.kind, guess.path).classes == ("cat", "dog")
    assert guess_source(tmp_path / "b").seen == "images without class folders"


def test_of_folders_for_training_and_testing_those_for_testing(tmp_path: Path) -> None:
    draw(
        *(tmp_path / split / kind / "1.png" for split in ("train", "val", "Test") for kind in ("cat", "dog"))
    )
    guess = guess_source(tmp_path)
    assert guess.path == tmp_path / "Test" and "beside those for training" in guess.seen
    draw(tmp_path / "owl" / "1.png")  # then these are classes
    assert guess_source(tmp_path).path == tmp_path


def test_lists_boxes_and_arrays(tmp_path: Path) -> None:
    draw(tmp_path / "csv/1.png", tmp_path / "xml/1.png")
    (tmp_path / "csv/list.csv").write_text("path,label\n1.png,cat\n")
    (tmp_path / "csv/notes.csv").write_text("who,when\n")
    (tmp_path / "xml/1.xml").write_text("<annotation/>")
    np.savez(tmp_path / "set.npz", test_images=np.zeros((2, 8, 8), np.uint8))
    assert guess_source(tmp_path / "csv")[:2] == ("csv", tmp_path / "csv/list.csv")
    assert guess_source(tmp_path / "csv/list.csv").kind == "csv"
    assert guess_source(tmp_path / "xml").kind == "imagenet"
    assert guess_source(tmp_path / "set.npz").kind == "npz"


def test_columns_of_nought_and_one_and_cells_of_several_names_are_findings(tmp_path: Path) -> None:
    draw(tmp_path / "1.png", tmp_path / "2.png")
    (tmp_path / "columns.csv").write_text("path,mass,nodule,age\n1.png,1,0,40\n2.png,0,1,50\n")
    (tmp_path / "cells.csv").write_text("path,label\n1.png,mass|nodule\n2.png,\n")
    guess = guess_source(tmp_path / "columns.csv")
    assert guess.options == {"label_columns": ["mass", "nodule"]} and "2 findings each" in guess.seen
    assert open_source(guess.kind, guess.path, **guess.options).samples[1].findings == (1,)
    assert guess_source(tmp_path / "cells.csv").options == {"multilabel": True}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", "there is no folder or file"),
        ("empty", "there is no image in"),
        ("a.txt", "is one file"),
    ],
)
def test_what_is_no_source_raises_a_clear_error(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match=expected) as error:
        guess_source(tmp_path / name)
    assert "\n" not in str(error.value) and ";" in str(error.value)
