"""Where the network is wrong, a run may keep maps of its answer beside those of the label."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heatproof as hp
from heatproof.report.gallery import gallery, unpack
from heatproof.rows import of_prediction
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.types import normalise
from heatproof.verdict.data import read_run
from tiny_study import make_study

METHODS = ["gradcam", "gradient", "random"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("both")
    for name, run in (("plain", ""), ("both", "both_classes = true")):
        study = make_study(root / name, methods=METHODS, metrics=["accuracy", "insertion(steps=4)"], run=run)
        run_study(study, root / name / "out")
    return root


def test_wrong_answers_have_maps_of_the_predicted_class(folder: Path) -> None:
    data = read_run(RunFolder.open(folder / "both" / "out"))
    wrong = [name for name, right in zip(data.images.ids, data.images.right, strict=True) if right is False]
    assert 0 < len(wrong) < len(data.images.ids)
    store, answers = data.folder.maps(), dict(zip(data.images.ids, data.images.predicted, strict=True))
    for method in ("gradcam", "gradient"):
        maps = store.read(data.checkpoint, of_prediction(method))
        assert list(maps.ids) == wrong
        assert maps.explained.tolist() == [answers[name] for name in wrong]
        labels = store.read(data.checkpoint, method, wrong)
        assert labels.explained.tolist() == [1 - answers[name] for name in wrong]
    assert (data.checkpoint, of_prediction("random")) not in store.contents(), "a floor explains no class"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "both")
        model = hp.load_model("net.py:tiny", checkpoint=sorted(Path("epochs").glob("*.pt"))[-1])
        picture = model.preprocess(hp.open_image(Path("pictures") / wrong[0]))[None]
        expected = hp.explain(model, picture, "gradcam", targets=answers[wrong[0]])["gradcam"]
    result = store.read(data.checkpoint, of_prediction("gradcam"), wrong[:1])
    torch.testing.assert_close(normalise(result.values), normalise(expected.values), atol=2e-3, rtol=0)


def test_no_number_changes_and_the_report_shows_them(folder: Path) -> None:
    plain, both = (read_run(RunFolder.open(folder / name / "out")) for name in ("plain", "both"))
    assert plain.methods == both.methods
    for key, column in plain.images.scores.items():
        assert (column == both.images.scores[key]).all(), key
    for image in gallery(both)["images"]:
        there = [packed is not None for packed in image["instead"]]
        assert there == ([True, True, False] if image["right"] is False else [False] * 3)
        if any(there):
            assert image["instead"][0]["explains"] == image["predicted"] != image["explains"]
            assert unpack(image["instead"][0]).max() <= 1
    assert not any(any(image["instead"]) for image in gallery(plain)["images"])
