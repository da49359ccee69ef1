"""Maps that are stored, scored in a run: the same rows as those of the method that made them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import save_file

import findings_networks as several
import heatproof as hp
from heatproof.cli import main
from heatproof.errors import HeatproofError, InputError, StoreError
from heatproof.run.score import READ
from heatproof.verdict.answers import HEADLINES, UNDECIDED
from tiny_study import make_study, write_study

pytestmark = pytest.mark.trains

METRICS = [
    "cscore", "accuracy", "insertion(steps=4)", "deletion(steps=4)", "dispersion", "method_agreement",
    "specificity(draws=1, steps=4)", "randomisation(depths=1)", "grid_pointing",
]  # fmt: skip
AGAIN = ("randomisation", "specificity_weights", "grid_pointing")  # what runs the method again
ONE = "epochs/epoch02.pt"
Table = dict[tuple[str, object, str], tuple[float, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, hp.Run]:
    """A study, and a run of gradcam and of a method that draws."""
    folder = tmp_path_factory.mktemp("foreign")
    make_study(folder, images=10, methods=["gradcam", "random"], metrics=METRICS, checkpoints=ONE)
    weights = torch.load(folder / ONE)
    torch.save(weights | {"6.weight": 200 * weights["6.weight"]}, folder / ONE)  # sure enough to be tested
    run = hp.run(folder / "study.toml", folder / "run")
    run.maps("gradcam").save(folder / "stored.npz")
    return folder, run


def table(run: hp.Run, method: str) -> Table:
    return {
        (row["image"], row["label"], row["metric"]): (row["value"], row["reason"])
        for row in run.folder.scores().sql("select * from scores where method = ?", [method])
    }


def score(folder: Path, method: str, out: str, metrics: list[str] = METRICS) -> hp.Run:
    write_study(folder, [method, "random"], metrics, ONE)
    return hp.run(folder / "study.toml", folder / out)


def assert_same(actual: Table, wanted: Table) -> None:
    compared = {key: value for key, value in wanted.items() if not key[2].startswith(AGAIN)}
    assert len(compared) > 60
    for key, (value, _) in compared.items():
        assert actual[key][0] == value or (math.isnan(value) and math.isnan(actual[key][0])), key


def test_stored_maps_get_the_rows_of_the_run_that_made_them(made: tuple[Path, hp.Run]) -> None:
    folder, run = made
    again = score(folder, "files:stored.npz", "again")
    assert_same(table(again, "files:stored.npz"), table(run, "gradcam"))
    assert repr(sorted(table(again, "random").items(), key=str)) == repr(
        sorted(table(run, "random").items(), key=str)
    )
    metrics = {key[2] for key, (value, why) in table(again, "files:stored.npz").items() if why == READ}
    assert {"randomisation_ssim(depths=1)", "grid_pointing_inside"} <= metrics
    place = [v for key, (v, _) in table(again, "files:stored.npz").items() if "specificity_place" in key[2]]
    assert len(place) == 10 and any(value == value for value in place)
    weights = [
        value for key, value in table(again, "files:stored.npz").items() if "specificity_weights" in key[2]
    ]
    assert len(weights) == 10 and all(
        math.isnan(value) and "no map under random" in why for value, why in weights
    )
    assert "files:stored.npz" in again.verdict().sentence and again.report().stat().st_size > 10_000


def discs_network(path: Path) -> None:
    """Images of discs, and net.py with the weights of a network that tells green from blue ones."""
    from contrast.discs import folder, model_ready, network

    folder(path / "pictures", 25)
    model = network()
    images, labels = model_ready(model, 60, 1)
    optimiser = torch.optim.Adam(model.module.train().parameters(), 3e-3)
    for _ in range(80):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model.module(images), labels).backward()
        optimiser.step()
    torch.save(model.module.state_dict(), path / "best.pt")
    (path / "net.py").write_text("from contrast.discs import network")


def store_maps(path: Path, weights: Path | int, out: str, method: str = "gradcam") -> None:
    """Maps of the network with these weights, or with random ones, as .npy files named after the images."""
    from contrast.discs import network
    from heatproof.images import batches, open_source

    model = network(seed=weights) if isinstance(weights, int) else hp.load_model(network(), weights)
    source = open_source("folder", path / "pictures", class_names=["green", "blue"])
    batch = next(iter(batches(source, model.preprocess, 50, range(50), 0))).batch
    maps = hp.explain(model, batch.images, method, batch.labels, ids=batch.ids)[method]
    for name, values in zip(maps.ids, maps.numpy(), strict=True):
        file = path / out / Path(name).with_suffix(".npy")
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, values)


def score_discs(path: Path, maps: str) -> str:
    command = ["score", str(path / "net.py:network"), str(path / "pictures"), "--maps", str(path / maps)]
    command += [
        "--checkpoint",
        str(path / "best.pt"),
        "--class-names",
        "green,blue",
        "--metrics",
        "specificity",
    ]
    done = CliRunner().invoke(main, [*command, "--out", str(path / f"{maps} scored")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_stored_maps_are_judged_where_control_maps_lie_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "contrast"))
    monkeypatch.chdir(tmp_path)
    discs_network(tmp_path)
    store_maps(tmp_path, tmp_path / "best.pt", "alone")
    message = score_discs(tmp_path, "alone")
    assert UNDECIDED in message
    assert (
        "store this method's maps of 3 networks with random weights beside them, in alone-random/0" in message
    )
    store_maps(tmp_path, tmp_path / "best.pt", "cam")
    store_maps(tmp_path, 7, "untrained")
    store_maps(tmp_path, tmp_path / "best.pt", "edges", "edges")
    for seed in range(3):
        store_maps(tmp_path, 100 + seed, f"cam-random/{seed}")
        store_maps(tmp_path, 100 + seed, f"untrained-random/{seed}")
        store_maps(tmp_path, 100 + seed, f"edges-random/{seed}", "edges")
    follows = f"{HEADLINES['yes', 'undecided']}; what it uses was not tested files:../cam follows the network"
    assert follows in score_discs(tmp_path, "cam")
    assert HEADLINES["yes", "undecided"] not in score_discs(tmp_path, "untrained")
    assert f"{HEADLINES['no', 'undecided']} files:../edges does not" in score_discs(tmp_path, "edges")


def test_control_maps_give_the_numbers_of_the_method_itself(
    made: tuple[Path, hp.Run], tmp_path: Path
) -> None:
    """The same rows, bit for bit, so that the measured error rates apply."""
    from heatproof.images import batches, open_source
    from heatproof.models.derived import untrained_copy

    folder, _ = made
    model = hp.load_model(str(folder / "net.py:tiny"), folder / ONE)
    source = open_source("folder", folder / "pictures")
    batch = next(iter(batches(source, model.preprocess, 10, range(10), 0))).batch
    method = f"files:{tmp_path}/maps.npz"
    own = hp.explain(model, batch.images, "gradcam", batch.labels, ids=batch.ids)["gradcam"]
    own.save(tmp_path / "maps.npz")
    (tmp_path / "maps-random").mkdir()
    for draw in range(3):
        other = untrained_copy(model, batch.images, draw)
        maps = hp.explain(other, batch.images, "gradcam", batch.labels, ids=batch.ids)["gradcam"]
        maps.save(tmp_path / "maps-random" / f"{draw}.npz")
    read = hp.explain(model, batch.images, method, batch.labels, ids=batch.ids)
    inputs: dict[str, Any] = {"model": model, "images": batch.images}
    result = hp.metrics.specificity(read, **inputs)[method]["weights"]
    wanted = hp.metrics.specificity({"gradcam": own}, **inputs)["gradcam"]["weights"]
    assert wanted.isfinite().any() and torch.equal(result.nan_to_num(9), wanted.nan_to_num(9))


def test_control_maps_that_are_missing_are_refused_before_any_work(made: tuple[Path, hp.Run]) -> None:
    folder, _ = made
    method = each(".npy", np.save)(folder, explained(folder))
    (folder / "mapsnpy-random").mkdir()
    with pytest.raises(InputError, match=r"10 of 10 images have no map.*mapsnpy-random/0/"):
        score(folder, method, "controls are missing")
    (folder / "mapsnpy-random").rmdir()


def explained(folder: Path) -> hp.Maps:
    """The maps of a fresh explanation, at full precision."""
    from heatproof.images import batches, open_source

    model = hp.load_model(str(folder / "net.py:tiny"), folder / ONE)
    batch = next(
        iter(batches(open_source("folder", folder / "pictures"), model.preprocess, 10, range(10), 0))
    ).batch
    return hp.explain(model, batch.images, "gradcam", batch.labels, ids=batch.ids, batch_size=4)["gradcam"]


def each(suffix: str, save: Callable[[Path, np.ndarray], object]) -> Callable[[Path, hp.Maps], str]:
    def write(folder: Path, maps: hp.Maps) -> str:
        for name, values in zip(maps.ids, maps.numpy(), strict=True):
            path = folder / f"maps{suffix[1:]}" / Path(name).with_suffix(suffix)
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, values)
        return f"files:maps{suffix[1:]}/{{id}}{suffix}"

    return write


def array(folder: Path, maps: hp.Maps) -> str:
    np.save(folder / "all.npy", maps.numpy())
    return "files:all.npy"


def by_name(folder: Path, maps: hp.Maps) -> str:
    named = dict(zip(maps.ids, map(np.ascontiguousarray, maps.numpy()), strict=True))
    save_file(named, folder / "all.safetensors")
    return "files:all.safetensors"


def folder_of_files(folder: Path, maps: hp.Maps) -> str:
    each(".npy", np.save)(folder, maps)
    return "files:mapsnpy"


FORMS = {
    "npy": each(".npy", np.save),
    "npz": each(".npz", lambda path, values: np.savez(path, values=values[None])),
    "safetensors": each(".safetensors", lambda path, values: save_file({"map": values}, path)),
    "folder": folder_of_files, "array": array, "by name": by_name,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_file_gives_the_same_rows(made: tuple[Path, hp.Run], form: str) -> None:
    folder, run = made
    method = FORMS[form](folder, explained(folder))
    again = score(folder, method, f"form {form}", ["cscore", "insertion(steps=4)"])
    wanted = {k: v for k, v in table(run, "gradcam").items() if k[2].startswith(("cscore", "insertion"))}
    actual = table(again, method)
    assert len(wanted) > 20 and all(
        actual[key][0] == value for key, (value, _) in wanted.items() if value == value
    )


def test_a_grey_picture_is_a_map(tmp_path: Path, cnn: torch.nn.Module) -> None:
    values = np.arange(16, dtype=np.uint8).reshape(4, 4) * 17
    Image.fromarray(values).save(tmp_path / "a.png")
    Image.fromarray(values.astype(np.uint16) * 257).save(tmp_path / "b.png")
    images = torch.randn(2, 3, 32, 32)
    maps = hp.explain(cnn, images, f"files:{tmp_path}/{{id}}.png", ids=["a", "b"]).popitem()[1]
    torch.testing.assert_close(maps.values, torch.from_numpy(values / 255).float().expand(2, 4, 4))


def test_signs_and_classes_are_read_too(tmp_path: Path, cnn: torch.nn.Module) -> None:
    images, path = torch.randn(3, 3, 32, 32), tmp_path / "maps.npz"
    maps = hp.explain(cnn, images, "gradient", [0, 1, 2])["gradient"]
    maps.save(path)
    read = hp.explain(cnn, images, f"files:{path}", [0, 1, 2])[f"files:{path}"]
    assert torch.equal(read.values, maps.values) and torch.equal(read.signed, maps.signed)
    with pytest.raises(
        InputError, match=r"the map of 1 in maps.npz explains class 1, but class 0 is requested"
    ):
        hp.explain(cnn, images, f"files:{path}", 0)


def test_a_method_that_is_read_cannot_be_run_again(tmp_path: Path, cnn: torch.nn.Module) -> None:
    np.save(tmp_path / "m.npy", np.random.default_rng(0).random((2, 4, 4)))
    name = f"files:{tmp_path}/m.npy"
    inputs: dict[str, Any] = {"model": cnn, "images": torch.randn(2, 3, 32, 32)}
    maps = hp.explain(cnn, inputs["images"], [name])
    for again in (hp.metrics.fragility, hp.metrics.adversarial_fragility, hp.metrics.parameter_randomisation):
        with pytest.raises(InputError, match="is read from files, so it cannot be run again"):
            again([name], **inputs)
    with torch.no_grad():
        cnn[-1].weight.mul_(200)  # sure enough to be tested
    scores = hp.metrics.specificity(maps, **inputs, steps=2)[name]
    assert scores["weights"].isnan().all() and not scores["place"].isnan().all()


def lose(folder: Path) -> str:
    return "files:nothing/{id}.npy"


def too_few(folder: Path) -> str:
    np.save(folder / "few.npy", np.zeros((7, 4, 4)))
    return "files:few.npy"


def too_flat(folder: Path) -> str:
    np.save(folder / "flat.npy", np.zeros((10, 16)))
    return "files:flat.npy"


def other_shape(folder: Path) -> str:
    np.save(folder / "wide.npy", np.zeros((10, 36, 64)))
    return "files:wide.npy"


def other_sizes(folder: Path) -> str:
    sizes = iter(range(4, 40))
    each(".npy", lambda path, _values: np.save(path, np.zeros((next(sizes),) * 2)))(
        folder / "sizes", explained(folder)
    )
    return "files:sizes/mapsnpy"


def coloured(folder: Path) -> str:
    save = lambda path, values: Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)  # noqa: E731
    return each(".png", save)(folder, explained(folder))


def broken(folder: Path) -> str:
    (folder / "broken.npz").write_bytes(b"PK nothing")
    return "files:broken.npz"


def words(folder: Path) -> str:
    np.save(folder / "words.npy", np.array([["a"]] * 10))
    return "files:words.npy"


def other_names(folder: Path) -> str:
    np.savez(folder / "names.npz", values=np.zeros((10, 4, 4)), ids=[f"x{i}" for i in range(10)])
    return "files:names.npz"


def one_for_two(folder: Path) -> str:
    (folder / "stems").mkdir(exist_ok=True)
    for name in ("000", "001"):
        np.save(folder / "stems" / f"{name}.npy", np.zeros((4, 4)))
    return "files:stems"


WRONG = {
    lose: r"10 of 10 images have no map, such as cat/000.png; looked for .*000.png.npy or .*cat/000.npy or",
    too_few: r"few.npy holds 7 maps, but there are 10 images; give one for each",
    too_flat: r"has shape \(16,\); a map has height and width",
    other_shape: r"the map of cat/000.png is 36 x 64, but the input is 32 x 32, another shape",
    other_sizes: r"maps differ in size: cat/000.png has 4 x 4, cat/002.png 5 x 5; resize them to one size",
    coloured: r"is in colour \(RGB\), and colours cannot be read back",
    broken: r"cannot read maps from .*broken.npz",
    words: r"words.npy holds <U1, not numbers",
    other_names: r"names.npz has no map of cat/000.png; its first is x0",
    one_for_two: r"8 of 10 images have no map",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda function: function.__name__)
def test_maps_that_cannot_be_scored_raise_a_clear_error_before_any_work(
    made: tuple[Path, hp.Run], wrong: Callable[[Path], str]
) -> None:
    folder, _ = made
    with pytest.raises(HeatproofError, match=WRONG[wrong]) as raised:
        score(folder, wrong(folder), f"wrong {wrong.__name__}")
    assert "\n" not in str(raised.value) and not (folder / f"wrong {wrong.__name__}").exists()


def test_two_pictures_do_not_share_a_map(tmp_path: Path, cnn: torch.nn.Module) -> None:
    np.save(tmp_path / "1.npy", np.zeros((4, 4)))
    with pytest.raises(
        InputError, match=r"cat/1.png and dog/1.png would both read .*1.npy; name maps by the whole"
    ):
        hp.explain(cnn, torch.randn(2, 3, 32, 32), f"files:{tmp_path}", ids=["cat/1.png", "dog/1.png"])


def test_nan_pixels_are_rows_with_a_reason(made: tuple[Path, hp.Run]) -> None:
    folder, _ = made
    values = explained(folder).numpy().copy()
    values[3, 0, 0] = np.nan
    np.save(folder / "nan.npy", values)
    rows = table(score(folder, "files:nan.npy", "nan", ["insertion(steps=4)", "dispersion"]), "files:nan.npy")
    bad = [(key[0], why) for key, (value, why) in rows.items() if math.isnan(value)]
    assert {name for name, _ in bad} == {"cat/006.png"} and {why for _, why in bad} == {
        "the map has NaN or infinite values"
    }


def test_maps_and_code_that_changed_are_not_taken_for_those_of_the_run(made: tuple[Path, hp.Run]) -> None:
    folder, _ = made
    np.save(folder / "m.npy", np.random.default_rng(0).random((10, 4, 4)))
    (folder / "mine.py").write_text("def f(model, images, targets):\n    return images.mean(1)\n")
    metrics = ["dispersion"]
    write_study(folder, ["files:m.npy", "mine.py:f"], metrics, ONE)
    hp.run(folder / "study.toml", folder / "changing")
    hp.run(folder / "study.toml", folder / "changing")
    np.save(folder / "m.npy", np.random.default_rng(1).random((10, 4, 4)))
    with pytest.raises(StoreError, match=r"the files of files:m.npy are not those of the run"):
        hp.run(folder / "study.toml", folder / "changing")
    np.save(folder / "m.npy", np.random.default_rng(0).random((10, 4, 4)))
    (folder / "mine.py").write_text("def f(model, images, targets):\n    return images.sum(1)\n")
    with pytest.raises(StoreError, match=r"the files of mine.py:f are not those of the run"):
        hp.run(folder / "study.toml", folder / "changing")


def test_a_dry_run_runs_no_method_of_a_study(made: tuple[Path, hp.Run]) -> None:
    folder, _ = made
    mark = folder / "mine was run"
    (folder / "marks.py").write_text(
        f"open({str(mark)!r}, 'w').close()\ndef f(m, x, t):\n    return x.mean(1)\n"
    )
    write_study(folder, ["marks.py:f"], ["dispersion"], ONE)
    result = CliRunner().invoke(main, ["run", str(folder / "study.toml"), "--dry-run"])
    assert result.exit_code == 0 and "runs net.py and runs marks.py" in result.output and not mark.exists()


def test_a_method_in_a_file_is_run_again_by_metrics(made: tuple[Path, hp.Run]) -> None:
    folder, _ = made
    (folder / "own.py").write_text(
        "import torch\n"
        "def own(model, images, targets):\n"
        "    score = model(images.requires_grad_()).gather(1, targets[:, None]).sum()\n"
        "    return torch.autograd.grad(score, images)[0].abs().sum(1)\n"
    )
    metrics = ["randomisation(depths=1)", "insertion(steps=4)"]
    write_study(folder, ["own.py:own", "gradient"], metrics, ONE)
    run = hp.run(folder / "study.toml", folder / "own")
    ours, mine = table(run, "gradient"), table(run, "own.py:own")
    assert ours.keys() == mine.keys()
    for key in ours:
        assert mine[key][0] == pytest.approx(ours[key][0], abs=0.02, nan_ok=True), key


def test_score_is_a_run_with_a_page_and_says_what_cannot_be(
    made: tuple[Path, hp.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = made
    monkeypatch.chdir(folder)
    command = ["score", "net.py:tiny", "pictures", "-c", ONE, "--maps", "stored.npz", "--out", "scored"]
    mistaken = CliRunner().invoke(main, [part.replace("stored.npz", "store.npz") for part in command])
    assert mistaken.exit_code == 2 and "there is no file or folder of maps" in mistaken.output
    result = CliRunner().invoke(main, command)  # into the same folder: nothing was computed yet
    assert result.exit_code == 0, result.output
    again = hp.open_run(folder / "scored")
    method = "files:../stored.npz"
    wanted = table(run, "gradcam")
    actual = table(again, method)
    for i in range(0, 10, 2):
        key = f"cat/{i:03d}.png", 0, "dispersion"
        assert actual[key] == wanted[key]
    assert (folder / "scored" / "report.html").exists() and again.verdict().sentence in result.output.replace(
        "\n", " "
    )
    for words in (
        "it runs the method again, which stored maps cannot be",
        "fragility",
        "insertion",
        "cscore",
    ):
        assert words in result.output
    for words in (
        "cscore_n",
        "cscore_degenerate",
        "insertion_points",
        "it needs scores",
        "it needs severities",
    ):
        assert words not in result.output
    assert re.search(r"cscore +\d\.\d{4} \((?!1\))\d+\)", result.output), "the number of images"
    assert f"maps {folder / 'store.npz'}" in mistaken.output.replace("\n", ""), "the path without scored/.."
    assert "checkpoint epoch02: " in result.output
    assert CliRunner().invoke(main, command).exit_code == 0  # goes on, nothing is left to do
    other = CliRunner().invoke(main, [*command, "--targets", "predicted"])
    assert other.exit_code == 2 and "holds another study; name a new folder with --out" in other.output
    alone = CliRunner().invoke(
        main, [*command[:-2], "--metrics", "insertion", "--out", "few", "--limit", "4"]
    )
    assert alone.exit_code == 0 and json.loads((folder / "few" / "run" / "run.json").read_text())["config"][
        "metrics"
    ] == ["insertion"]


def test_stored_maps_of_several_findings_are_named_by_finding(tmp_path: Path) -> None:
    several.write(tmp_path, 12)
    space: dict[str, object] = {}
    exec(several.CODE, space)
    torch.save(space["Net"]().state_dict(), tmp_path / "weights.pt")
    study = several.study(tmp_path) | {"metrics": ["localise", "cscore", "dispersion"]}
    run = hp.run(study, tmp_path / "run")
    maps = run.maps("gradcam")
    for name, values in zip(maps.ids, maps.numpy(), strict=True):
        picture, _, finding = name.partition("#")
        np.save(tmp_path / f"{Path(picture).stem}#{finding}.npy", values)
    method = f"files:{tmp_path}/{{id}}.npy"
    again = hp.run(study | {"methods": [method, "random"]}, tmp_path / "again")
    wanted, actual = table(run, "gradcam"), table(again, method)
    assert len(wanted) > 100 and {k: repr(v[0]) for k, v in wanted.items()} == {
        k: repr(v[0]) for k, v in actual.items()
    }
    predicted = {"methods": [method], "run": study["run"] | {"targets": "predicted"}}
    with pytest.raises(InputError, match=r"not of a network's predictions; set run.targets = 'label'"):
        hp.run(study | predicted, tmp_path / "predicted")
