"""A run over volumes: NIfTI files with masks, a small 3D network, scores, planes of them in the report."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import heatproof as hp
from heatproof.cli import main
from heatproof.errors import InputError
from heatproof.images import batches
from heatproof.images.kinds import SOURCES, source_options
from heatproof.report.gallery import ORDERS, gallery, unpack, volume_axes
from heatproof.run.engine import prepare
from heatproof.show import sections
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run

nibabel = pytest.importorskip("nibabel", reason="install heatproof[volumes]")

SIZE = (12, 20, 16)  # of the network; the files have others
NETWORK = """
import torch
from torch import nn

def network():
    # class 1 where the brightest place is bright
    net = nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(2, 2, 1), nn.ReLU(),
        nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(2, 2),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net[0].weight[:] = 1 / 27
        net[3].weight[:, :, 0, 0, 0] = torch.eye(2)
        net[7].weight[:] = torch.tensor([[-3.0, -3.0], [3.0, 3.0]])
        net[7].bias[:] = torch.tensor([3.0, -3.0])
    return net
"""
STUDY = """
methods = ["gradcam", "gradient", "occlusion(window=0.5, stride=0.25)", "random", "edges"]
metrics = ["insertion(steps=4)", "deletion(steps=4)", "pointing", "inside", "cscore",
  "auc", "fragility(draws=1)", "method_agreement"]

[model]
spec = "network.py:network"

[images]
kind = "nifti"
path = "volumes.csv"

[preprocess]
size = [12, 20, 16]
window = [40, 400]

[run]
batch_size = 3
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans in Hounsfield units: a bright ball in half of them, a faint one in the others."""
    root = tmp_path_factory.mktemp("scans")
    (root / "network.py").write_text(NETWORK)
    random, rows = np.random.default_rng(0), ["path,label,mask_lesion"]
    shape = (18, 30, 24)
    for i in range(6):
        centre = np.array([5 + 2 * (i // 2), 8 + 3 * (i // 2), 6 + 4 * (i // 2)])
        ball = ((np.indices(shape) - centre.reshape(-1, 1, 1, 1)) ** 2).sum(0) <= 16
        scan = random.normal(-60, 20, shape) + np.where(ball, 300 if i % 2 else 40, 0)
        nibabel.save(nibabel.Nifti1Image(scan.astype(np.int16), np.eye(4)), root / f"{i}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(ball.astype(np.uint8), np.eye(4)), root / f"{i}.mask.nii.gz")
        rows.append(f"{i}.nii.gz,{'large' if i % 2 else 'faint'},{i}.mask.nii.gz")
    (root / "volumes.csv").write_text("\n".join(rows) + "\n")
    (root / "study.toml").write_text(STUDY)
    return root / "study.toml"


@pytest.fixture(scope="module")
def run(study: Path) -> RunFolder:
    hp.run(study, out=study.parent / "run")
    return RunFolder.open(study.parent / "run")


def test_every_metric_has_numbers(run: RunFolder) -> None:
    rows = run.scores().sql("select metric, method, value from scores where not isnan(value)")
    pairs = {(row["metric"].partition("(")[0], row["method"].partition("(")[0]) for row in rows}
    real = ("gradcam", "gradient", "occlusion", "random", "edges")
    for metric in ("insertion", "deletion", "pointing", "inside", "cscore"):
        assert {method for of, method in pairs if of == metric} == set(real), metric
    assert ("auc", "") in pairs


def test_the_gradient_points_at_the_lesion_and_noise_does_not(run: RunFolder) -> None:
    """The mask went the way of the volume: turned, resized and cropped alike."""
    rows = run.scores().sql(
        "select method, avg(value) as hit from scores where metric = 'pointing' and label = 1 group by method"
    )
    hits = {row["method"]: row["hit"] for row in rows}
    assert hits["gradient"] == 1 and hits["random"] < 1


def test_maps_come_back_as_volumes(run: RunFolder) -> None:
    checkpoint = run.maps().contents()[0][0]
    maps = run.maps().read(checkpoint, "gradient")
    assert maps.values.shape == (6, *SIZE) and maps.image_size == SIZE


def test_the_report_shows_the_planes_with_most_heat(run: RunFolder) -> None:
    data = read_run(run)
    content = gallery(data)
    record = next(image for image in content["images"] if image["picture"])
    planes = run.pictures().planes(record["id"])
    assert planes is not None and len(planes) == 3
    assert record["planes"] == "planes: sagittal x {}, coronal y {}, axial z {}".format(*planes)
    picture = Image.open(io.BytesIO(base64.b64decode(record["picture"].split(",")[1])))
    depth, height, width = SIZE
    assert picture.size == (width + 2 + width + 2 + height, max(depth, height))
    packed = record["maps"][data.methods.index("gradient")]
    maps = run.maps().read(data.checkpoint, "gradient", [record["id"]])
    wanted = torch.from_numpy(sections(maps.upsample()[0], planes))
    assert unpack(packed).shape == wanted.shape
    torch.testing.assert_close(torch.from_numpy(unpack(packed)), wanted, rtol=0, atol=0.02)
    real = [
        maps for method in data.real for maps in [run.maps().read(data.checkpoint, method, [record["id"]])]
    ]
    heat = torch.stack([draw.upsample()[0] for draw in real]).mean(0)
    assert heat.sum((1, 2)).argmax() == planes[0]


def test_a_page_is_made(run: RunFolder, study: Path) -> None:
    page = Path(hp.open_run(run.path).report(study.parent / "report.html")).read_text()
    above, gallery_text = page.split('id="pictures"')
    assert "gradcam" in page and above.count("<br>planes: sagittal x ") == 6  # one for each picture
    assert all("three planes, one per axis" in part for part in (above, gallery_text))


def test_axes_are_called_as_the_source_calls_them() -> None:
    for kind in SOURCES:
        options = source_options(kind)
        known = {name: options[name] for name in ("order", "canonical") if name in options}
        assert ORDERS.get(kind, {}) == known
    assert volume_axes({"kind": "nifti", "options": {"order": "zyx"}}) == [
        "axial z",
        "coronal y",
        "sagittal x",
    ]
    assert volume_axes({"kind": "nifti", "options": {"canonical": False}}) == ["x", "y", "z"]
    assert volume_axes({"kind": "dicom-series"}) == ["z", "y", "x"]
    assert volume_axes({"kind": "npz"}) == volume_axes({}) == ("depth", "height", "width")


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ('"gradcam", ', '"rise", ', "methods: rise is not built for volumes; leave it out or use one of"),
        (
            '"auc"',
            '"grid_pointing"',
            "metrics: grid_pointing is not built for volumes; leave it out or use one of",
        ),
        ("window = [40, 400]", "window = [40, 0]", "window is a centre and a width above 0"),
        ("size = [12, 20, 16]", "size = [12, 20]", "resize"),
    ],
)
def test_what_cannot_work_is_reported_before_any_work(
    study: Path, line: str, instead: str, message: str
) -> None:
    other = study.with_name("other.toml")
    other.write_text(STUDY.replace(line, instead))
    with pytest.raises(InputError, match=message):
        hp.run(other, out=study.parent / "other")


def test_the_command_line_draws_the_planes_of_a_scan(study: Path, tmp_path: Path) -> None:
    command = ["explain", f"{study.parent}/network.py:network", str(study.parent / "1.nii.gz")]
    options = ["--window", "40,400", "--methods", "gradcam,gradient", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command + options)
    assert done.exit_code == 0, done.output
    with Image.open(tmp_path / "1.nii.gradient.png") as drawn:
        assert drawn.size == (96 * 3 + 4, 96)
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 1 and "set preprocess.window" in refused.output.replace("\n", " ")


def test_voxels_of_one_size_in_a_run(study: Path, tmp_path: Path) -> None:
    """A scan whose voxels are twice as long along one axis: said, and with a spacing seen as it is."""
    first = nibabel.load(study.parent / "1.nii.gz")
    nibabel.save(
        nibabel.Nifti1Image(first.get_fdata()[::2], np.diag([2.0, 1, 1, 1])), study.parent / "long.nii.gz"
    )
    lines = (study.parent / "volumes.csv").read_text().splitlines()
    (study.parent / "two.csv").write_text("\n".join([lines[0], lines[2], "long.nii.gz,faint,1.mask.nii.gz"]))
    text = STUDY.replace("volumes.csv", "two.csv").replace('"cscore",', "").replace('"auc", ', "")
    messages: list[str] = []
    for name, line in (("stretched", ""), ("alike", "spacing = [1.5, 1.5, 1.5]\n")):
        (study.parent / f"{name}.toml").write_text(text.replace("[preprocess]\n", f"[preprocess]\n{line}"))
        prepared = prepare(study.parent / f"{name}.toml", tmp_path / name, say=messages.append)
    assert [message.partition(",")[0] for message in messages] == ["voxels differ between volumes"]
    model = prepared.opened.model("own")
    ((batch, _),) = batches(prepared.opened.source, model.preprocess)
    assert (batch.images[0] - batch.images[1]).abs().mean() < 0.03


def test_evidence_and_a_contrast_test_are_of_images(run: RunFolder) -> None:
    from heatproof.contrast import make_pair
    from heatproof.metrics.interventions import evidence

    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 2, 1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten()
    )
    volumes = torch.rand(4, 1, 4, 8, 8)
    with pytest.raises(InputError, match="evidence is not built for volumes"):
        evidence([0, 1, 0, 1], model=net, images=volumes)
    with pytest.raises(InputError, match="plants its token in images"):
        make_pair(net, volumes, [0, 1, 0, 1])


def test_five_channels_of_sixteen_bits_to_the_end(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(2):
            values = random.integers(0, 65536, (16, 16, 5), dtype=np.uint16)
            np.save(tmp_path / "set" / name / f"{i}.npy", values)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef net():\n"
        "    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)\n"
        "    return nn.Sequential(nn.Conv2d(5, 4, 3), nn.ReLU(), *end)\n"
    )
    study = {
        "methods": ["gradcam", "gradient"], "metrics": ["insertion(steps=4)"],
        "model": {"spec": str(tmp_path / "net.py:net")},
        "images": {"kind": "arrays", "path": str(tmp_path / "set"), "options": {"bits": 16}},
        "preprocess": {"size": [16, 16], "resize": 16, "mean": [0.5] * 5, "std": [0.25] * 5},
    }  # fmt: skip
    hp.run(study, out=tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    rows = folder.scores().sql(
        "select value from scores where metric like 'insertion(%' and not isnan(value)"
    )
    assert len(rows) >= 4
    assert {image["planes"] for image in gallery(read_run(folder))["images"]} == {""}
    (picture,) = [folder.pictures().read("a/0.npy")]
    assert picture is not None
    wanted = np.load(tmp_path / "set" / "a" / "0.npy").mean(2) / 257
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"), float)
    assert np.abs(pixels - wanted).mean() < 3


def test_a_monitor_shows_the_middle_planes(tmp_path: Path) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 2, 1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten()
    )
    volumes, labels = torch.rand(4, 1, 6, 10, 8), torch.tensor([0, 1, 0, 1])
    report = hp.monitor.Monitor(volumes, labels, methods=["gradcam"], out=tmp_path / "watched").step(net, 1)
    assert report.n == 4
    assert report.pictures.shape[:3] == report.heat["gradcam"].shape == (2, 10, 8 + 2 + 8 + 2 + 10)
    (planes,) = {
        image["planes"] for image in gallery(read_run(RunFolder.open(tmp_path / "watched")))["images"]
    }
    assert planes == "planes: depth 3, height 5, width 4"


def test_methods_of_a_run_over_volumes_are_compared(run: RunFolder) -> None:
    comparison = hp.compare(f"{run.path}@gradcam", f"{run.path}@gradient")
    assert len(comparison.moved) == 6 and comparison.differences


def test_an_audit_of_scans_says_what_it_lacks(study: Path, tmp_path: Path) -> None:
    command = ["audit", f"{study.parent}/network.py:network", str(study.parent / "volumes.csv")]
    done = CliRunner().invoke(main, [*command, "--minutes", "1", "--out", str(tmp_path / "audit")])
    output = " ".join(done.output.split())
    assert done.exit_code == 2 and "lists NIfTI volumes" in output
    assert "none of the images tried can be used" in output and "set preprocess.window" in output
