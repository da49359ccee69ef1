"""Runs: what lands in the folder, what may be added later, broken pictures, shards."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import heatproof as hp
from heatproof.cli import main
from heatproof.errors import CheckpointError, InputError, StoreError
from heatproof.images import Preprocess, open_source
from heatproof.metrics.kit import BatchContext
from heatproof.metrics.stability import comparable
from heatproof.models import probabilities
from heatproof.run import worker
from heatproof.run.engine import prepare, run_study
from heatproof.run.plan import PlannedUnit, make_plan
from heatproof.run.score import MetricResults, measure
from heatproof.run.study import open_study
from heatproof.store import RunFolder
from heatproof.store.folder import inspect
from tiny_study import METHODS, METRICS, NETWORK, fingerprint, make_study, write_study


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with its finished run in `out`."""
    folder = tmp_path_factory.mktemp("finished")
    run_study(make_study(folder), folder / "out")
    return folder


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hashes of the units that are computed, in order."""
    seen: list[str] = []
    compute, group = worker.Worker.compute, worker.Worker.group

    def noted_compute(self: worker.Worker, unit: PlannedUnit, loaded: worker.Loaded) -> object:
        seen.append(unit.hash)
        return compute(self, unit, loaded)

    def noted_group(self: worker.Worker, unit: PlannedUnit) -> None:
        seen.append(unit.hash)
        group(self, unit)

    monkeypatch.setattr(worker.Worker, "compute", noted_compute)
    monkeypatch.setattr(worker.Worker, "group", noted_group)
    return seen


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that go through any model, other than those of the checks.

    The checks are one blank image, and two passes over two images of noise once per run.
    """
    sizes: list[int] = []
    forward, check_repeatable = hp.Model.forward, hp.Model.check_repeatable

    def counted(self: hp.Model, images: torch.Tensor) -> torch.Tensor:
        if images.any():
            sizes.append(len(images))
        return forward(self, images)

    def checked(self: hp.Model, images: torch.Tensor) -> None:
        before = len(sizes)
        check_repeatable(self, images)
        assert sizes[before:] == [2, 2]
        del sizes[before:]

    monkeypatch.setattr(hp.Model, "forward", counted)
    monkeypatch.setattr(hp.Model, "check_repeatable", checked)
    return sizes


def test_rows_are_what_the_library_says(finished: Path) -> None:
    run = RunFolder.open(finished / "out")
    source = open_source("folder", finished / "pictures")
    model = hp.load_model(f"{finished}/net.py:tiny", finished / "epochs" / "epoch02.pt")
    images = torch.stack([model.preprocess(source.open(i)) for i in range(4)])
    labels = torch.tensor([s.label for s in source.samples[:4]])
    ids = [s.id for s in source.samples[:4]]
    maps = hp.explain(model, images, METHODS, targets=labels)
    chances = probabilities(model.logits(images))
    for method in METHODS:
        stored = run.maps().read("epoch02", method, ids)
        assert stored.explained.tolist() == labels.tolist()
        torch.testing.assert_close(stored.normalised(), maps[method].normalised(), atol=1e-3, rtol=0)
    rows = run.scores().sql(
        "select image, explained, value from scores where checkpoint = 'epoch02' and metric = 'probability'"
    )
    values = {(row["image"], row["explained"]): row["value"] for row in rows}
    assert len(values) == 2 * len(source)
    for i, name in enumerate(ids):
        for c in range(2):
            assert values[name, c] == pytest.approx(float(chances[i, c]), abs=1e-6)


def test_group_rows_are_what_the_metrics_say(finished: Path) -> None:
    run = RunFolder.open(finished / "out")
    source = open_source("folder", finished / "pictures")
    ids, labels = [s.id for s in source.samples], [s.label for s in source.samples]
    sql = run.scores().sql
    answers = sql(
        "select image, explained, value from scores where checkpoint = 'epoch01' and metric = 'probability'"
    )
    probs = torch.zeros(len(ids), 2, dtype=torch.float64)
    for row in answers:
        probs[ids.index(row["image"]), row["explained"]] = row["value"]
    values = {
        (row["method"], row["metric"], row["label"]): row["value"]
        for row in sql("select * from scores where checkpoint = 'epoch01' and image = ''")
    }
    for method in METHODS:
        expected = hp.metrics.cscore_by_class(run.maps().read("epoch01", method, ids), labels, probs)  # type: ignore[arg-type]
        assert values[method, "cscore", None] == expected.overall.value
        assert values[method, "cscore_n", 1] == expected.classes[1].n
    assert values["", "accuracy", None] == hp.metrics.accuracy(labels, probs).value  # type: ignore[arg-type]
    assert values["", "auc", None] == hp.metrics.auc(labels, probs).value  # type: ignore[arg-type]
    assert ("gradcam ~ layercam", "method_agreement_ssim", None) in values


def test_running_again_computes_nothing(finished: Path, computed: list[str]) -> None:
    before = fingerprint(finished / "out")
    result = run_study(finished / "study.toml", finished / "out")
    assert computed == [] and result.done == result.units == 14
    assert fingerprint(finished / "out") == before


def test_shards_give_the_same_rows_and_maps(finished: Path) -> None:
    for i in range(3):
        result = run_study(finished / "study.toml", finished / "shards", shard=(i, 3))
        assert (result.done == result.units) == (i == 2)
    assert fingerprint(finished / "shards") == fingerprint(finished / "out")


def test_a_metric_added_later_costs_no_pass_and_gives_the_same_numbers(
    tmp_path: Path, finished: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path, metrics=["accuracy", "insertion(steps=4)"])
    run_study(study, tmp_path / "out")
    first = set(computed)
    computed.clear()
    sizes = passes(monkeypatch)
    write_study(tmp_path, metrics=["accuracy", "insertion(steps=4)", "cscore", "auc", "method_agreement"])
    run_study(study, tmp_path / "out")
    assert not sizes and computed and not first & set(computed)
    computed.clear()
    write_study(
        tmp_path,
        metrics=["accuracy", "insertion(steps=4)", "cscore", "auc", "method_agreement", "deletion(steps=4)"],
    )
    run_study(study, tmp_path / "out")  # deletion needs the model, but no map is made again
    assert len(computed) == 10 and sizes
    assert fingerprint(tmp_path / "out")[0] == fingerprint(finished / "out")[0]  # all rows, bit for bit


def test_a_method_added_later_leaves_the_others_alone(
    tmp_path: Path, finished: Path, computed: list[str]
) -> None:
    metrics = [m for m in METRICS if m != "method_agreement"]
    study = make_study(tmp_path, methods=METHODS[:2], metrics=metrics)
    run_study(study, tmp_path / "out")
    first = set(computed)
    write_study(tmp_path, metrics=metrics)
    run_study(study, tmp_path / "out")
    assert len(computed) == len(set(computed)) and first < set(computed)
    query = "select * exclude unit from scores where metric not like 'method_agreement%' order by all"
    rows = [RunFolder.open(run / "out").scores().sql(query) for run in (tmp_path, finished)]
    assert str(rows[0]) == str(rows[1])


def test_curves_are_walked_as_far_as_needed_and_a_method_added_later_walks_the_same(tmp_path: Path) -> None:
    every, exact = ["insertion", "deletion"], ["insertion(adaptive=False)", "deletion(adaptive=False)"]
    for name, methods, metrics in (
        ("grown", ["gradcam", "random", "edges"], every),
        ("whole", ["gradcam", "random", "edges", "gradient"], every + exact),
    ):
        study = make_study(tmp_path / name, images=4, methods=methods, metrics=metrics)
        run_study(study, tmp_path / name / "out")
    write_study(tmp_path / "grown", methods=["gradcam", "random", "edges", "gradient"], metrics=every)
    run_study(tmp_path / "grown" / "study.toml", tmp_path / "grown" / "out")
    query = "select * exclude unit from scores where metric not like '%adaptive%' order by all"
    grown, whole = (RunFolder.open(tmp_path / name / "out").scores() for name in ("grown", "whole"))
    assert str(grown.sql(query)) == str(whole.sql(query))
    walked = "select method, image, value from scores where metric = '{}' order by all"
    points = [row["value"] for row in whole.sql(walked.format("insertion_points"))]
    assert len(points) == 2 * 4 * 4 and max(points) <= 68 and min(points) < 60
    near, true = (whole.sql(walked.format(name)) for name in ("insertion", "insertion(adaptive=False)"))
    assert all(abs(a["value"] - b["value"]) < 0.02 for a, b in zip(near, true, strict=True))


def test_a_checkpoint_added_later_is_computed_alone(
    tmp_path: Path, finished: Path, computed: list[str]
) -> None:
    study = make_study(tmp_path, checkpoints=["epochs/epoch01.pt"])
    run_study(study, tmp_path / "out")
    first = set(computed)
    write_study(tmp_path, checkpoints=["epochs/epoch01.pt", "epochs/epoch02.pt"])
    run_study(study, tmp_path / "out")
    assert len(computed) == 14 and len(first) == 7
    assert fingerprint(tmp_path / "out") == fingerprint(finished / "out")


def test_pictures_added_later_are_computed_alone(tmp_path: Path, computed: list[str]) -> None:
    def drawn(limit: int) -> Path:
        wanted: dict[str, Any] = {"methods": ["gradcam"], "metrics": ["cscore", "specificity"]}
        return write_study(
            tmp_path, checkpoints=["epochs/epoch02.pt"], extra=f"growing = true\nlimit = {limit}\n", **wanted
        )

    make_study(tmp_path, images=18)
    run_study(drawn(10), tmp_path / "out")
    first = len(computed)
    result = run_study(drawn(16), tmp_path / "out")
    assert (first, len(computed)) == (4, 7)  # blocks of 4, 4 and 2, all images; then two blocks, all images
    assert result.folder.status().state == "complete" and not inspect(tmp_path / "out")
    whole = run_study(drawn(16), tmp_path / "whole")
    rows = "select method, metric, label, image, explained, value, reason from scores order by all"
    assert str(result.folder.scores().sql(rows)) == str(whole.folder.scores().sql(rows))
    Image.new("RGB", (9, 9)).save(
        tmp_path / "pictures" / "cat" / "new.png"
    )  # which is drawn in another order
    with pytest.raises(StoreError, match="the images are not those of the run"):
        run_study(drawn(18), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"methods": METHODS[1:]}, "methods lost 'gradcam'"),
        ({"extra": "limit = 6\n"}, "images.limit was None and is now 6"),
        ({"checkpoints": ["epochs/epoch01.pt"]}, "checkpoint 'epoch02' is gone"),
    ],
)
def test_another_change_is_refused_with_what_changed(finished: Path, change: dict, why: str) -> None:
    study = write_study(finished, **change)
    try:
        with pytest.raises(StoreError, match=why):
            run_study(study, finished / "out")
    finally:
        write_study(finished)


def test_other_weights_or_pictures_are_refused(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=6, methods=["gradcam"], metrics=[])
    run_study(study, tmp_path / "out")
    picture = tmp_path / "pictures" / "cat" / "000.png"
    content = picture.read_bytes()
    Image.new("RGB", (9, 9)).save(picture)
    with pytest.raises(StoreError, match="the images are not those of the run"):
        run_study(study, tmp_path / "out")
    picture.write_bytes(content)
    (tmp_path / "epochs" / "epoch01.pt").write_bytes((tmp_path / "epochs" / "epoch02.pt").read_bytes())
    with pytest.raises(StoreError, match="weights of 'epoch01'"):
        run_study(study, tmp_path / "out")


def break_pictures(folder: Path) -> tuple[set[str], set[str]]:
    """Ten kinds of doubtful files; names of those that cannot be used, and of those that can."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
    (folder / "zero.jpg").write_bytes(b"")
    Image.fromarray(pixels).save(folder / "whole.jpg")
    content = (folder / "whole.jpg").read_bytes()
    (folder / "whole.jpg").unlink()
    (folder / "truncated.jpg").write_bytes(content[: len(content) // 2])
    (folder / "text.jpg").write_text("this is no image")
    header = bytearray(content)
    start = header.index(b"\xff\xc0") + 5
    header[start : start + 4] = (20000).to_bytes(2, "big") * 2
    (folder / "huge.jpg").write_bytes(header)
    Image.fromarray(rng.integers(0, 65536, (40, 40), dtype=np.uint16)).save(folder / "sixteen.png")
    Image.fromarray(pixels).convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(pixels).convert("P").save(folder / "palette.png")
    Image.fromarray(pixels[..., 0]).save(folder / "grey.png")
    frames = [Image.fromarray(np.roll(pixels, i, 0)) for i in range(3)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    Image.fromarray(pixels).save(folder / "locked.png")
    (folder / "locked.png").chmod(0)
    good = {"sixteen.png", "cmyk.jpg", "palette.png", "grey.png", "animated.gif"}
    bad = {"zero.jpg", "truncated.jpg", "text.jpg", "huge.jpg"}
    (good if os.geteuid() == 0 else bad).add("locked.png")  # root may read everything
    return bad, good


def test_broken_pictures_are_rows_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    study = make_study(tmp_path, checkpoints="epochs/epoch01.pt")
    bad, good = break_pictures(tmp_path / "pictures" / "cat")
    result = CliRunner().invoke(main, ["run", str(study), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert f"{len(bad)} images could not be used" in result.output
    scores = RunFolder.open(tmp_path / "out").scores()
    broken = scores.sql("select image, reason, value from scores where metric = 'image'")
    assert {row["image"] for row in broken} == {f"cat/{name}" for name in bad}
    assert all(row["reason"] and math.isnan(row["value"]) for row in broken)
    scored = {
        row["image"] for row in scores.sql("select distinct image from scores where method = 'gradcam'")
    }
    assert len(scored - {""}) == 18 + len(good) and not scored & {f"cat/{name}" for name in bad}
    with pytest.raises(InputError, match="cannot use cat/"):
        run_study(study, tmp_path / "strict", fail_fast=True)


def test_a_folder_of_broken_pictures_still_ends(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=6)
    for picture in (tmp_path / "pictures").rglob("*.png"):
        picture.write_bytes(b"")
    result = run_study(study, tmp_path / "out")
    assert result.done == result.units and len(result.broken) == 6
    scores = result.folder.scores().sql("select value, reason from scores where metric = 'cscore'")
    assert scores and all(math.isnan(row["value"]) and row["reason"] for row in scores)


def test_a_model_that_answers_nan_is_rows_with_reasons(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=6, checkpoints="epochs/epoch01.pt")
    weights = torch.load(tmp_path / "epochs" / "epoch01.pt")
    torch.save({name: w * math.nan for name, w in weights.items()}, tmp_path / "epochs" / "epoch01.pt")
    result = run_study(study, tmp_path / "out")
    assert result.done == result.units
    rows = result.folder.scores().sql("select distinct metric, reason from scores where isnan(value)")
    reasons = {row["metric"]: row["reason"] for row in rows}
    assert reasons["probability"] == "the network's output is NaN or infinite for this image"
    assert reasons["degenerate"] == reasons["insertion(steps=4)"] == reasons["probability"]
    assert reasons["auc"] == reasons["cscore"] == "no image of this checkpoint could be used"


def test_a_run_says_how_many_pictures_got_no_answer(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=6, metrics=[], checkpoints="epochs/epoch01.pt")
    weights = torch.load(tmp_path / "epochs" / "epoch01.pt")
    torch.save({name: w * math.nan for name, w in weights.items()}, tmp_path / "epochs" / "epoch01.pt")
    result = CliRunner().invoke(main, ["run", str(study), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert "6 images without a prediction: the network's output is NaN or infinite" in result.output


def test_weights_that_change_during_a_run_are_refused(tmp_path: Path) -> None:
    opened = prepare(make_study(tmp_path)).opened
    opened.model("epoch01")
    (tmp_path / "epochs" / "epoch02.pt").write_bytes((tmp_path / "epochs" / "epoch01.pt").read_bytes())
    with pytest.raises(CheckpointError, match="changed during the run"):
        opened.model("epoch02")


def test_units_do_not_depend_on_the_shard_or_the_engine(finished: Path) -> None:
    plan = make_plan(RunFolder.open(finished / "out").manifest, 18)
    assert len({unit.hash for unit in plan.units}) == len(plan.units) == 14
    dealt = [block for i in range(3) for block in plan.shard(i, 3)]
    assert sorted(dealt, key=plan.blocks.index) == list(plan.blocks)


def test_dry_run_counts_and_writes_nothing(finished: Path) -> None:
    result = CliRunner().invoke(
        main, ["run", str(finished / "study.toml"), "--out", str(finished / "x"), "--dry-run", "--trust"]
    )
    assert result.exit_code == 0, result.output
    assert "10 of up to 4 images, 4 about whole checkpoints; 0 done" in result.output
    assert "1 threads" not in result.output and not (finished / "x").exists()
    # Each image: one shared pass, 2 end points, 3 methods x 2 curves x 3 inner points; for 18 images, twice.
    assert f"about {18 * 2 * (1 + 2 + 18):,} inputs" in result.output


def test_sql_and_export(finished: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    counted = run(main, ["sql", str(finished / "out"), "select count(*) as n from scores", "--format", "csv"])
    rows = int(counted.output.split()[1])
    names = {form: str(tmp_path / f"scores.{form}") for form in ("csv", "parquet", "latex")}
    wrote = run(
        main, ["export", str(finished / "out"), *(a for f, p in names.items() for a in (f"--{f}", p))]
    )
    assert wrote.exit_code == 0, wrote.output
    assert len(Path(names["csv"]).read_text().splitlines()) == rows + 1
    assert "insertion" in Path(names["latex"]).read_text()
    assert "columns" in run(main, ["sql", str(finished / "out"), "select nonsense from scores"]).output
    help_text = " ".join(run(main, ["sql", "--help"]).output.split())
    for query in re.findall(r'heatproof sql runs/first "(.*?)"', help_text)[:2]:
        queried = run(main, ["sql", str(finished / "out"), query, "--format", "json"])
        assert queried.exit_code == 0 and len(json.loads(queried.output)) >= 5, query
    assert run(main, ["sql", str(tmp_path), "from scores"]).exit_code == 2


def test_boxes_and_masks_reach_the_metrics(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=4, metrics=["localise", "structure"], checkpoints="epochs/epoch01.pt")
    lines = ["path,label,x0,y0,x1,y1,mask_finder,mask_timing,mask_box"]
    for part in ("finder", "timing", "box"):
        mask = np.zeros((36, 40), np.uint8)
        mask[4:12, 6:20] = 255
        Image.fromarray(mask).save(tmp_path / f"{part}.png")
    for picture in sorted((tmp_path / "pictures").rglob("*.png")):
        masks = "finder.png,timing.png,box.png" if picture.name != "003.png" else ",,"
        box = "6,4,19,11" if picture.name != "003.png" else ",,,"
        lines.append(f"{picture.relative_to(tmp_path)},{picture.parent.name},{box},{masks}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    text = study.read_text().replace('"folder"', '"csv"').replace('"pictures"', '"list.csv"')
    study.write_text(text)
    result = run_study(study, tmp_path / "out")
    rows = result.folder.scores().sql(
        "select metric, count(*) as n, count(*) filter (isnan(value)) as undefined from scores "
        "where method = 'layercam' group by metric"
    )
    counts = {row["metric"]: (row["n"], row["undefined"]) for row in rows}
    assert counts["pointing"] == counts["mask_iou"] == (4, 1)  # one picture has neither box nor mask
    assert counts["structure_score"] == (4, 1) and counts["fmr"] == (4, 1)


def test_the_pictures_are_kept_as_the_model_sees_them(finished: Path, tmp_path: Path) -> None:
    run, source = RunFolder.open(finished / "out"), open_source("folder", finished / "pictures")
    model = hp.load_model(f"{finished}/net.py:tiny")
    for i, sample in enumerate(source.samples):
        expected = model.preprocess.restore(model.preprocess(source.open(i))[None])[0]
        pixels = np.asarray(Image.open(run.pictures().path(sample.id)))  # type: ignore[arg-type]  # noise: stored as JPEG
        assert np.abs(pixels / 255 - expected.permute(1, 2, 0).numpy()).mean() < 0.06
    assert len(list((run.path / "pictures").iterdir())) == len(source)
    without = run_study(make_study(tmp_path, run="pictures = false"), tmp_path / "out").folder
    assert not (without.path / "pictures").exists()
    assert without.pictures().read(source.samples[0].id) is None


def test_the_curve_behind_an_area_is_kept(finished: Path) -> None:
    rows = (
        RunFolder.open(finished / "out")
        .scores()
        .sql(
            "select image, metric, value from scores where checkpoint = 'epoch02' and method = 'gradcam' and "
            "metric like '%sertion%(steps=4)' and not isnan(value)"
        )
    )
    by_image: dict[str, dict[str, float]] = {}
    for row in rows:
        by_image.setdefault(row["image"], {})[row["metric"]] = row["value"]
    assert by_image
    for scores in by_image.values():
        heights = [scores[f"insertion_at_{percent}(steps=4)"] for percent in range(0, 101, 10)]
        # four steps: the curve bends at 0, 25, 50, 75 and 100 %, of which 0, 50 and 100 are among these
        assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=1e-5)
        assert min(heights) - 0.2 <= scores["insertion(steps=4)"] <= max(heights) + 0.2


def test_cose_over_checkpoints_comes_from_stored_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = 'targets = "predicted"'
    study = make_study(tmp_path, methods=["gradcam", "gradient"], metrics=["accuracy"], run=predicted)
    run_study(study, tmp_path / "out")
    write_study(
        tmp_path, methods=["gradcam", "gradient"], metrics=["accuracy", "cose", "cscore"], run=predicted
    )
    seen = passes(monkeypatch)
    run = run_study(study, tmp_path / "out").folder
    assert seen == []
    source = open_source("folder", tmp_path / "pictures")
    ids = [s.id for s in source.samples]
    images = torch.stack([Preprocess(size=(32, 32), resize=32)(source.open(i)) for i in range(len(ids))])
    for method in ("gradcam", "gradient"):
        maps: list[Any] = []
        guesses: list[Any] = []
        for epoch in (1, 2):
            model = hp.load_model(f"{tmp_path}/net.py:tiny", tmp_path / "epochs" / f"epoch{epoch:02d}.pt")
            maps.append(comparable(hp.explain(model, images, method)[method]))
            guesses.append(model.logits(images).argmax(1))
        alike, same = hp.metrics.ssim(*maps), guesses[0] == guesses[1]
        scores = {
            row["metric"]: row["value"]
            for row in run.scores().sql(
                f"select metric, value from scores where metric like 'cose%' and method = '{method}'"
            )
        }
        assert scores["cose_to(epoch02)"] == pytest.approx(float(alike.nanmean()), abs=5e-3)
        assert scores["cose_same"] + scores["cose_changed"] == len(ids)
        if same.any():
            assert scores["cose_consistency"] == pytest.approx(float(alike[same].mean()), abs=5e-3)
        if not same.all():
            assert scores["cose_sensitivity"] == pytest.approx(float(1 - alike[~same].mean()), abs=5e-3)


def test_cose_needs_checkpoints_and_predicted_classes(tmp_path: Path) -> None:
    study = make_study(tmp_path, metrics=["cose"])
    with pytest.raises(InputError, match="cose needs maps of the predicted class"):
        run_study(study, tmp_path / "out")
    write_study(tmp_path, metrics=["cose"], checkpoints=["epochs/epoch01.pt"], run='targets = "predicted"')
    with pytest.raises(InputError, match="cose compares checkpoints, but there is one"):
        run_study(study, tmp_path / "out")


def test_the_untrained_network_is_untrained_also_where_the_builder_brings_weights(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=2, methods=["gradcam"], metrics=[], checkpoints=[])
    text = study.read_text().replace('"net.py:tiny"', '"lite0"\nrandom_init = true')
    study.write_text(text.replace("checkpoints = []", ""))
    opened = open_study(study)
    random, own = opened.model("random"), hp.load_model("lite0")
    for (name, mine), theirs in zip(random.module.named_parameters(), own.module.parameters(), strict=True):
        assert name.endswith("bias") or not torch.equal(mine, theirs), name


def test_maps_that_are_constant_at_both_checkpoints_have_that_reason(tmp_path: Path) -> None:
    """A network whose last filters are dead: every map is there, and none of them has contrast."""
    study = make_study(tmp_path, 6, ["gradcam"], ["cose"], run='targets = "predicted"')
    for file in (tmp_path / "epochs").glob("*.pt"):
        weights = torch.load(file, weights_only=True)
        weights["2.weight"].zero_()
        torch.save(weights, file)
    folder = run_study(study, tmp_path / "out").folder
    rows = folder.scores().sql("select value, reason from scores where metric = 'cose_to(epoch02)'")
    assert [row["reason"] for row in rows] == ["on every image both maps are constant, so they have no range"]
    assert all(math.isnan(row["value"]) for row in rows)


def test_passes_that_memory_does_not_hold_are_halved_wherever_a_run_makes_them(tmp_path: Path) -> None:
    methods = ["gradcam", "gradient", "smoothgrad(samples=3)", "rise(masks=8)", "scorecam"]
    metrics = [
        "accuracy", "auc", "insertion(steps=4)", "specificity", "randomisation", "fragility", "input_shift",
        "adversarial_fragility(steps=2)", "untrained",
    ]  # fmt: skip
    limited = """
class HoldsThree(nn.Sequential):
    def forward(self, images):
        if len(images) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(images)
"""
    rows = []
    for name, network in {
        "all": NETWORK,
        "three": NETWORK.replace("def tiny", limited + "\ndef tiny").replace(
            "nn.Sequential(nn", "HoldsThree(nn"
        ),
    }.items():
        study = make_study(tmp_path / name, 8, methods, metrics, "epochs/epoch01.pt")
        study.write_text(study.read_text().replace("batch_size = 4", "batch_size = 8"))
        (tmp_path / name / "net.py").write_text(network)
        run_study(study, tmp_path / name / "out")
        query = "select image, method, metric, label, explained, value from scores order by all"
        rows.append(RunFolder.open(tmp_path / name / "out").scores().sql(query))
    assert [{**row, "value": 0} for row in rows[0]] == [{**row, "value": 0} for row in rows[1]]
    values = [[row["value"] for row in some] for some in rows]
    assert values[1] == pytest.approx(values[0], abs=2e-3, nan_ok=True)


def test_a_block_whose_metrics_run_out_of_memory_is_computed_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods, metrics = ["gradcam", "gradient", "random"], ["accuracy", "cscore", "randomisation", "localise"]
    sizes: list[int] = []

    def limited(names: Sequence[str], scene: BatchContext, *more: Any) -> list[MetricResults]:
        sizes.append(len(scene.batch.ids))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 MiB")
        return measure(names, scene, *more)

    study = make_study(tmp_path, 9, methods, metrics, "epochs/epoch01.pt")
    study.write_text(study.read_text().replace("batch_size = 4", "batch_size = 9"))
    lines = ["path,label,x0,y0,x1,y1"]
    files = sorted(tmp_path.glob("pictures/*/*.png"))
    lines += [f"{file.relative_to(tmp_path)},{file.parent.name},4,5,20,21" for file in files]
    (tmp_path / "boxes.csv").write_text("\n".join(lines))
    images = 'kind = "folder"\npath = "pictures"'
    study.write_text(study.read_text().replace(images, 'kind = "csv"\npath = "boxes.csv"'))
    run_study(study, tmp_path / "whole")
    monkeypatch.setattr(worker, "measure", limited)
    run_study(study, tmp_path / "halves")
    assert sizes == [9, 5, 3, 3, 3]
    query = "select image, method, metric, label, explained, reason, value from scores order by all"
    first, other = (RunFolder.open(tmp_path / name).scores().sql(query) for name in ("whole", "halves"))
    assert [{**row, "value": 0} for row in first] == [{**row, "value": 0} for row in other]
    values = [[row["value"] for row in rows] for rows in (first, other)]
    assert values[1] == pytest.approx(values[0], abs=2e-3, nan_ok=True)
    stores = [RunFolder.open(tmp_path / name).maps() for name in ("whole", "halves")]
    assert torch.allclose(*(store.read("epoch01", "gradcam").values for store in stores), atol=1e-3)  # type: ignore[misc, arg-type]


def test_a_resolved_study_runs_like_its_file_and_extends(finished: Path, tmp_path: Path) -> None:
    """A study object gives the rows of its TOML file; an extended one shares the loaded network."""
    opened = open_study(finished / "study.toml")
    run_study(opened, tmp_path / "out")
    assert fingerprint(tmp_path / "out") == fingerprint(finished / "out")
    network = opened.model(opened.checkpoints[-1].name)
    more = opened.extended(msgspec.structs.replace(opened.study, methods=[*opened.study.methods, "edges"]))
    assert more.model(opened.checkpoints[-1].name) is network
    result = run_study(more, tmp_path / "out")
    assert result.done == result.units


def test_images_that_python_holds(finished: Path, tmp_path: Path) -> None:
    """A source object is used instead of the study's [images]."""
    opened = open_study(finished / "study.toml")
    content = msgspec.to_builtins(opened.study) | {"images": {"kind": "memory", "path": "in memory"}}
    spec = content["model"]["spec"]
    content["model"] |= {
        "checkpoints": str(finished / "epochs/*.pt"), "spec": str(finished / spec), "name": spec,
    }  # fmt: skip
    result = run_study(open_study(content, images=opened.source), tmp_path / "out")
    assert result.done == result.units
    assert result.folder.scores().digest() == RunFolder.open(finished / "out").scores().digest()


def test_the_last_line_of_a_run_is_the_next_command(tmp_path: Path) -> None:
    """In a process of its own: DuckDB prints about connections that are open when the interpreter ends."""
    study = make_study(tmp_path, images=4)
    command = [sys.executable, "-m", "heatproof", "run", str(study), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("next: heatproof report"), done.stdout
