"""What a network is given and how it answers: printed, kept, warned of, and checked against expectations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from torch import nn

from heatproof.cli import main
from heatproof.errors import InputError
from heatproof.images import Preprocess
from heatproof.images.kinds import Guess, guess_source
from heatproof.metrics.classifier import class_order
from heatproof.models import load_model
from heatproof.models.capture import refusal_in_a_sentence
from heatproof.models.model import Model
from heatproof.run.checks import input_warnings
from heatproof.studies.audit.planner import inspect
from heatproof.studies.audit.protocol import plan_score
from heatproof.studies.audit.settings import AuditSettings, ScoreSettings, study_tables
from heatproof.studies.settings import PreprocessSettings

SIDE = 32
NETWORK = """
import torch
from torch import nn

def make(swapped=False):
    '''Finds stripes two pixels wide, which are gone where an image is enlarged.'''
    net = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1, padding_mode="replicate"), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.zero_(), net[0].bias.zero_(), net[4].weight.zero_()
        net[0].weight[0, :, 1], net[0].weight[1, :, 1] = torch.tensor([[-1.0, 2, -1], [1.0, -2, 1]])
        stripes, plain = (0, 1) if swapped else (1, 0)
        net[4].weight[stripes], net[4].bias[plain], net[4].bias[stripes] = 1.0, 6.0, 0.0
    return net

def swapped():
    return make(True)

def findings():
    '''Two sigmoids: red, then blue.'''
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Sigmoid())
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].weight[0, 0], net[0].weight[1, 2] = 4.0, 4.0
        net[0].bias.fill_(2.0)
    return net
"""
STUDY = """
methods = ["gradcam"]
metrics = ["accuracy"]
[run]
threads = 1
device = "cpu"
batch_size = 20
out = "out"
{run}
[model]
spec = "net.py:{network}"
[images]
kind = "folder"
path = "images"
{images}
[preprocess]
{preprocess}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """net.py, and 20 images each of plain and stripes, 32x32 px."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    random = np.random.default_rng(0)
    for name in ("plain", "stripes"):
        Path("images", name).mkdir(parents=True)
        for i in range(20):
            image = np.full((SIDE, SIDE, 3), 100) + random.integers(0, 20, (SIDE, SIDE, 1))
            if name == "stripes":
                image[:, ::2] += 100
            Image.fromarray(image.astype(np.uint8)).save(f"images/{name}/{i:02d}.png")
    return tmp_path


def heatproof(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def study(network: str = "make", run: str = "", preprocess: str = "", images: str = "") -> str:
    Path("study.toml").write_text(
        STUDY.format(network=network, run=run, preprocess=preprocess, images=images)
    )
    return "study.toml"


def one_line(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_run_prints_input_and_classes_and_the_report_keeps_them(place: Path) -> None:
    result = heatproof("run", study(preprocess="size = [32, 32]\nresize = 32\nmean = [0.5, 0.4, 0.3]"))
    assert result.exit_code == 0, result.output
    line = "shorter side resized to 32 px (bilinear), centre crop 32x32 px, mean 0.5, 0.4, 0.3, std 0.229"
    assert f"the network's input: {line}" in one_line(result)
    assert "classes, in the order of its outputs: plain, stripes" in result.output
    assert "warning" not in result.output
    assert heatproof("report", "out").exit_code == 0
    page = Path("out/report.html").read_text()
    assert line in page and "outputs: plain, stripes" in page


def test_images_of_another_native_size_than_the_default_are_a_warning(place: Path) -> None:
    result = heatproof("run", study())
    sentence = "all images are 32x32 px, but the network gets 224x224 px, the default"
    assert result.exit_code == 0 and f"warning: {sentence}" in one_line(result)
    assert heatproof("report", "out").exit_code == 0
    assert sentence in json.loads(Path("out/verdict.json").read_text())["warnings"][0]
    assert sentence in Path("out/report.html").read_text()


def test_explain_takes_and_prints_the_preprocessing(place: Path) -> None:
    files = [f"images/plain/{i:02d}.png" for i in range(2)]
    plain = heatproof("explain", "net.py:make", *files, "-m", "gradcam", "--out", "a")
    assert "centre crop 224x224 px" in one_line(plain) and "all images are 32x32 px" in one_line(plain)
    given = ["--size", "32", "--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]
    result = heatproof("explain", "net.py:make", *files, "-m", "gradcam", "--out", "b", *given)
    assert result.exit_code == 0, result.output
    assert "resized to 32 px (bilinear), centre crop 32x32 px, mean 0.5, 0.5, 0.5, std 0.25" in one_line(
        result
    )
    assert "warning" not in result.output
    with Image.open("b/00.gradcam.png") as drawn:
        assert drawn.size == (32, 32)
    wrong = heatproof("explain", "net.py:make", *files, "--size", "big")
    assert wrong.exit_code == 2 and "sizes are whole numbers of pixels" in wrong.output


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ({"size": (96,)}, {"size": [96, 96], "resize": 96}),
        ({"size": (96, 128)}, {"size": [96, 128], "resize": [96, 128]}),
        ({"size": (96,), "resize": (110,), "std": (1.0,)}, {"size": [96, 96], "resize": 110, "std": [1.0]}),
        ({}, {}),
    ],
)
def test_options_become_the_table_of_a_study(given: dict[str, tuple[int, ...]], table: object) -> None:
    chosen = AuditSettings(model="lite0", images=Path("x"), preprocess=PreprocessSettings(**given))
    tables = study_tables(chosen, Guess("folder", Path("x"), ""), Path.cwd(), {})
    assert tables.get("preprocess", {}) == table and chosen.recorded()["preprocess"] == table


def test_score_takes_the_preprocessing(place: Path) -> None:
    small = PreprocessSettings(size=(32,))
    settings = ScoreSettings(model="net.py:make", images=Path("images"), maps="maps", preprocess=small)
    study = plan_score(settings).study.read_text()
    assert "size = [32, 32]" in study and "resize = 32" in study


def test_an_audit_prints_the_input_before_it_times_anything(place: Path) -> None:
    result = heatproof("audit", "net.py:make", "images", "--size", "32", "--minutes", "0.0001", "--no-open")
    text = one_line(result)
    assert (
        text.index("centre crop 32x32 px") < text.index("order of its outputs") < text.index("timing passes")
    )
    assert "warning" not in text


@pytest.mark.parametrize("command", ["audit", "run"])
def test_an_accuracy_that_is_far_off_stops_it_before_the_work(place: Path, command: str) -> None:
    what = ["net.py:make", "images", "--no-open"] if command == "audit" else [study()]
    result = heatproof(command, *what, "--expect-accuracy", "0.95")
    text = one_line(result)
    assert (
        result.exit_code == 2
        and "right on 20 of 40 images (50%" in text
        and "expected accuracy is 95%" in text
    )
    assert "centre crop 224x224 px" in text and "plain, stripes" in text and "timing" not in text
    assert not Path("out").exists()


def test_an_accuracy_as_expected_goes_on(place: Path) -> None:
    right = "size = [32, 32]\nresize = 32"
    result = heatproof("run", study(run="expect_accuracy = 0.97", preprocess=right))
    assert result.exit_code == 0, result.output
    result = heatproof("run", study(preprocess=right), "--expect-accuracy", "0.9")  # no change of the run
    assert result.exit_code == 0, result.output
    result = heatproof("run", study(run="expect_accuracy = 0.2", preprocess=right))
    assert result.exit_code == 2 and "expected accuracy is 20%" in one_line(result)


def test_classes_in_another_order_are_reported(place: Path) -> None:
    right = "size = [32, 32]\nresize = 32"
    result = heatproof("run", study("swapped", preprocess=right))
    sentence = "the classes seem to be in another order: stripes, plain; the network is then right on 100%"
    assert sentence in one_line(result), result.output
    assert heatproof("report", "out").exit_code == 0
    assert sentence in Path("out/report.html").read_text()
    assert any(sentence in note for note in json.loads(Path("out/verdict.json").read_text())["notes"])
    named = study("swapped", preprocess=right, images='options.class_names = ["stripes", "plain"]')
    result = heatproof("run", named, "--out", "named")
    assert result.exit_code == 0 and "another order" not in result.output
    assert "order of its outputs: stripes, plain" in result.output
    stopped = heatproof(
        "run", study("swapped", preprocess=right), "--expect-accuracy", "0.95", "--out", "new"
    )
    assert stopped.exit_code == 2 and "another order: stripes, plain" in one_line(stopped)


def test_an_audit_notes_another_order_before_it_starts(place: Path) -> None:
    source, small = guess_source(Path("images")), PreprocessSettings(size=(SIDE,))
    for network, notes in (("make", 0), ("swapped", 2)):  # another order, and no better than guessing
        settings = AuditSettings(model=f"net.py:{network}", images=Path("images"), preprocess=small)
        looked = inspect(settings, study_tables(settings, source, Path.cwd(), {}), Path.cwd(), None)
        assert len(looked.notes) == notes, looked.notes
    assert "another order: stripes, plain; the network is then right on 100% of 32 images" in looked.notes[0]


def test_labels_in_another_order_are_reported_where_an_image_has_several(place: Path) -> None:
    random = np.random.default_rng(1)
    lines = ["path,label"]
    for i in range(60):
        blue, red = (random.random(2) < 0.5).tolist()
        image = random.integers(0, 60, (SIDE, SIDE, 3)) + np.array([120 * red, 0, 120 * blue])
        Image.fromarray(image.astype(np.uint8)).save(f"{i:02d}.png")
        lines.append(f"{i:02d}.png,{'|'.join(['blue'] * blue + ['red'] * red)}")
    Path("list.csv").write_text("\n".join(lines))
    text = STUDY.replace('metrics = ["accuracy"]', 'metrics = ["auc"]').replace("folder", "csv")
    text = text.replace('"images"', '"list.csv"').format(
        network="findings", run="", images="options.multilabel = true\n{names}", preprocess=""
    )
    Path("study.toml").write_text(text.format(names=""))
    result = heatproof("run", "study.toml")
    assert "classes, in the order of its outputs: blue, red" in result.output, result.output
    assert "seem to be in another order: red, blue; the network is then at a mean AUC of" in one_line(result)
    Path("study.toml").write_text(text.format(names='options.class_names = ["red", "blue"]'))
    result = heatproof("run", "study.toml", "--out", "named")
    assert result.exit_code == 0 and "another order" not in result.output, result.output


def test_another_order_needs_more_than_chance() -> None:
    random = np.random.default_rng(0)
    for classes, count in ((2, 32), (2, 100), (5, 100), (10, 200)):
        columns = np.eye(classes, dtype=bool)
        for _ in range(100):
            labels, guesses = random.integers(0, classes, (2, count))
            assert class_order(columns[labels], columns[guesses].astype(float)) is None
    labels = random.integers(0, 5, 100)
    weak = np.where(random.random(100) < 0.4, labels, random.integers(0, 5, 100))  # right more often than not
    assert class_order(np.eye(5, dtype=bool)[labels], np.eye(5)[weak]) is None
    moved = np.where(random.random(100) < 0.7, (labels + 1) % 5, random.integers(0, 5, 100))
    order = class_order(np.eye(5, dtype=bool)[labels], np.eye(5)[moved])
    assert order is not None and order.outputs == {0: 1, 1: 2, 2: 3, 3: 4, 4: 0} and order.after > 0.6


class Patches(nn.Module):
    """A small ViT for 128 px that adapts its position embeddings to any size."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 16, 16)
        self.pos_embed = nn.Parameter(torch.zeros(1, 8 * 8 + 1, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        scores: torch.Tensor = self.out((tokens + self.pos_embed.mean(1, keepdim=True)).mean(1))
        return scores


def test_what_the_network_declares_is_compared_with_the_default() -> None:
    timm = pytest.importorskip("timm")
    warnings = list(input_warnings(load_model(Patches()), [], (), False))
    assert len(warnings) == 1 and "its 65 position embeddings fit 128x128 px" in warnings[0]
    assert not list(input_warnings(load_model(Patches()), [], ("size",), False))
    fitting = load_model(Patches(), preprocess=Preprocess((128, 128), 128))
    assert not list(input_warnings(fitting, [], (), False))
    warnings = list(input_warnings(load_model(timm.create_model("efficientnet_b3")), [], (), False))
    assert ["its pretrained_cfg names 288x288 px" in warning for warning in warnings] == [True]
    named = load_model("timm:efficientnet_b3")  # which takes its configuration over
    assert not list(input_warnings(named, [], (), False))
    grey = Model(nn.Conv2d(1, 2, 3), preprocess=Preprocess())
    assert "takes 1 channels, but mean has 3" in next(iter(input_warnings(grey, [], (), False)))


def test_a_linear_layer_that_does_not_fit_names_the_sizes_that_do() -> None:
    net = load_model(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Flatten(), nn.Linear(4 * 32 * 32, 2)))
    blank = net.preprocess.blank
    with pytest.raises(InputError, match="it takes 64x64: --size"), refusal_in_a_sentence(net, blank):
        net.logits(blank)
