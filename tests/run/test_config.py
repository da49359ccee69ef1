"""Studies in TOML: what is refused, with which sentence, before any work starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heatproof.errors import HeatproofError, InputError
from heatproof.rows import epoch_of
from heatproof.run.config import as_config, read_metrics, read_study, study_from
from heatproof.run.engine import prepare
from heatproof.run.plan import read_shard
from heatproof.run.study import find_checkpoints
from tiny_study import make_study, write_study

GOOD = {"methods": ["gradcam"], "model": {"spec": "x.py:f"}, "images": {"kind": "folder", "path": "p"}}


def test_defaults_are_filled_in() -> None:
    config = as_config(study_from(GOOD))
    assert config["run"]["seed"] == 0 and config["run"]["batch_size"] == 32 and config["metrics"] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"run": {"sed": 1}}, "unknown key run.sed; did you mean 'seed'"),
        ({"run": {"limit": 3}}, "unknown key run.limit; did you mean images.limit?"),
        ({"run": {"methods": []}}, "unknown key run.methods; did you mean methods (before the first table)?"),
        ({"metrcs": []}, "unknown key metrcs; did you mean 'metrics' or"),
        ({"run": {"seed": "one"}}, "run.seed: expected int, got str"),
        ({"run": {"batch_size": 0}}, "run.batch_size: expected int >= 1"),
        ({"run": {"targets": "labels"}}, "run.targets cannot be 'labels'; did you mean 'label'?"),
        ({"run": 3}, "run must be a table: write [run] and its keys below"),
        ({"methods": []}, "methods: expected array of length >= 1"),
        ({"methods": "gradcam"}, "methods: expected array, got str"),
        ({"images": {"kind": "folder"}}, "the key images.path is missing"),
        ({"images": {"kind": "folder", "path": "p", "box_share": [0, 2]}}, "images.box_share[1]: expected"),
        ({"preprocess": {"interpolation": "cubic"}}, "preprocess.interpolation cannot be 'cubic'"),
    ],
)
def test_a_wrong_key_or_type_is_named_by_its_path(change: dict, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        study_from(GOOD | change)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("content", ["methods = [", "methods = ['a']\nmethods = ['b']"])
def test_what_is_not_toml_raises_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    with pytest.raises(InputError, match="is not TOML"):
        read_study(tmp_path / "bad.toml")
    with pytest.raises(InputError, match="there is no file"):
        read_study(tmp_path / "absent.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    make_study(folder, images=4)
    (folder / "loose").mkdir()
    for picture in (folder / "pictures" / "cat").glob("*.png"):
        (folder / "loose" / picture.name).write_bytes(picture.read_bytes())
    np.savez(folder / "x.npz", nothing=np.zeros(3))
    return folder


def refused(folder: Path, **change: object) -> str:
    """The sentence with which a study is refused; `replace` are pairs of texts of the TOML file."""
    pairs = change.pop("replace", ())
    study = write_study(folder, **change)  # type: ignore[arg-type]
    text = study.read_text()
    for old, new in pairs:  # type: ignore[attr-defined]
        assert old in text
        text = text.replace(old, new)
    study.write_text(text)
    with pytest.raises(HeatproofError) as error:
        prepare(study)
    assert "\n" not in str(error.value)
    assert not (folder / "runs").exists()
    return str(error.value)


def test_impossible_combinations_are_refused_before_work_starts(folder: Path) -> None:
    unlabelled = [('path = "pictures"', 'path = "loose"')]
    assert "methods: unknown method 'gradcan'; did you mean 'gradcam'" in refused(folder, methods=["gradcan"])
    assert "rise has no option 'sample'" in refused(folder, methods=["rise(sample=3)"])
    assert "are the same method" in refused(folder, methods=["gradcam", "GradCAM"])
    assert "metrics: unknown metric 'insertio'" in refused(folder, metrics=["insertio"])
    assert "twice" in refused(folder, metrics=["insertion_deletion", "insertion"])
    assert "needs ssim" in refused(folder, metrics=["consistency"])
    assert "needs scores" in refused(folder, metrics=["metric_agreement"])
    assert "seed is set by the run" in refused(folder, metrics=["insertion(seed=3)"])
    assert "needs boxes or masks, but the images have none" in refused(folder, metrics=["localise"])
    assert "needs masks of finder, timing and box" in refused(folder, metrics=["structure"])
    assert "cscore needs labels" in refused(folder, metrics=["cscore"], replace=unlabelled)
    assert "run.targets is 'label', but" in refused(
        folder, metrics=[], replace=[*unlabelled, ("threads = 1", 'threads = 1\ntargets = "label"')]
    )
    assert "maps of the true class" in refused(
        folder, metrics=["cscore(tau=0.3)"], replace=[("threads", 'targets = "predicted"\nthreads')]
    )


def test_what_is_not_there_is_refused_before_work_starts(folder: Path) -> None:
    assert "there is no file 'epochs/none*.pt'" in refused(folder, checkpoints="epochs/none*.pt")
    assert "there is no file 'epoch9.pt'" in refused(folder, checkpoints=["epochs/epoch01.pt", "epoch9.pt"])
    assert "there is no folder" in refused(folder, replace=[('"pictures"', '"picturs"')])
    assert "unknown kind of source 'folders'" in refused(folder, replace=[('"folder"', '"folders"')])
    assert "options.lvl: a folder source takes class_names, level" in refused(folder, extra="options.lvl = 1")
    assert "belongs under [images]" in refused(folder, extra="options.limit = 1")
    layer = [("[images]", 'layer = "layer9"\n[images]')]
    assert "model.layer: unknown layer 'layer9'" in refused(folder, replace=layer)
    assert "no such file" in refused(folder, replace=[("net.py", "nett.py")])
    assert "cannot use run.device" in refused(folder, replace=[('"cpu"', '"cuda:99"')])
    library = [("net.py:tiny", "torchvision:resnet18")]
    assert "the model has no weights" in refused(folder, checkpoints=[], replace=library)


def test_a_checkpoint_that_does_not_fit_or_is_broken_is_refused(folder: Path) -> None:
    (folder / "epochs" / "broken.pt").write_bytes(b"half a file")
    try:
        assert "broken.pt" in refused(folder, checkpoints="epochs/*.pt")
    finally:
        (folder / "epochs" / "broken.pt").unlink()


def test_a_network_of_another_size_is_refused_with_what_would_help(folder: Path) -> None:
    (folder / "flat.py").write_text(
        "from torch import nn\ndef net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 2))\n"
    )
    message = refused(folder, checkpoints=[], replace=[("net.py:tiny", "flat.py:net")])
    assert "flat.py:net cannot take images of shape" in message and "preprocess.size in a study" in message


def test_a_label_the_model_does_not_have_is_refused(folder: Path) -> None:
    names = 'options.class_names = ["fish", "owl", "cat", "dog"]'
    assert "cat/000.png has label 2 (cat), but net.py:tiny has the classes 0 to 1" in refused(
        folder, extra=names
    )


def test_checkpoints_are_ordered_by_epoch_and_named_by_their_file(folder: Path) -> None:
    for epoch in (10, 9):
        (folder / "epochs" / f"other-{epoch}.pt").write_bytes(b"")
    try:
        content = GOOD | {
            "model": {"spec": "x.py:f", "checkpoints": "epochs/other-*.pt", "random_init": True}
        }
        names = [c.name for c in find_checkpoints(study_from(content), folder)]
        assert names == ["random", "other-9", "other-10"]
    finally:
        for epoch in (10, 9):
            (folder / "epochs" / f"other-{epoch}.pt").unlink()
    assert [epoch_of(n) for n in ("e07", "resnet50_epoch-12", "best")] == [7, 12, None]


def test_metrics_are_read_with_families_aliases_and_options() -> None:
    texts = [r.text for r in read_metrics(["localise(budget=0.1)", "insertion_auc", "agreement"])]
    assert texts[0] == "mask_iou(budget=0.1)" and len(texts) == 8
    assert texts[-2:] == ["insertion", "method_agreement"]
    assert read_metrics(["fragility(draws=2)"])[0].named("ssim") == "fragility_ssim(draws=2)"


@pytest.mark.parametrize("text", ["2/2", "a/b", "1", "-1/2", "0/0"])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a shard is i/n"):
        read_shard(text)
