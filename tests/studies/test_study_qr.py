"""The QR study end to end: data, regimes, tables that follow from rows and maps, seeds, bad input."""

from __future__ import annotations

import csv
import itertools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from scipy.stats import spearmanr

import heatproof as hp
from heatproof.cli import main
from heatproof.images.codes import EDITS, MANIFEST, make_qr
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.report.pieces import TEMPLATES
from heatproof.report.tables import Table, Value, number
from heatproof.store import RunFolder
from heatproof.studies.common import mean_value
from heatproof.studies.qr.protocol import Probe
from heatproof.studies.qr.results import (
    Columns,
    Results,
    apart,
    curve_value,
    flipped,
    floors,
    leakage,
    ours,
    over_seeds,
    published_rows,
    qr_table,
    read_columns,
    rho_value,
    seed_value,
)  # fmt: skip
from heatproof.studies.qr.trainings import Trained
from heatproof.studies.settings import QrSettings
from heatproof.train import DEPTHS, REGIMES, Epoch, History

pytestmark = [pytest.mark.trains, pytest.mark.usefixtures("short_studies")]

TINY = [
    "--size", "40", "--width", "2", "--train", "16", "--test", "8", "--proxy", "24", "--proxy-epochs", "1",
    "--head-epochs", "1", "--epochs", "2", "--train-batch", "16", "--subset", "2", "--robust", "4",
    "--causal", "6", "--threads", "1", "--device", "cpu", "--methods", "gradcam,eigengradcam",
]  # fmt: skip
SHORT = [*TINY, "--no-depth-study", "--no-ablation", "--no-figures"]


ANSWERS: Any = TEMPLATES.get_template("studies/qr/answers.md").module


def study(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["study", "qr", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole study from an empty folder, by the command line."""
    out = tmp_path_factory.mktemp("qr") / "out"
    result = study(*TINY, "--heavy", "smoothgrad(samples=3)", "--out", out)
    assert result.exit_code == 0, result.output
    assert "Table 6" in result.output
    return out


def table_rows(out: Path, name: str, source: str = "ours") -> list[dict[str, str]]:
    with (out / "tables" / f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["source"].startswith(source)]


def test_the_study_leaves_a_page_with_every_table_and_figure(finished: Path) -> None:
    page = (finished / "summary.md").read_text()
    for words in ("RQ1", "RQ2", "RQ3", "RQ4", "no ImageNet weights", "contradicts itself", "Figure 5"):
        assert words in page, words
    for name in (
        "table-2",
        "coverage",
        "faithfulness",
        "table-3",
        "distortions",
        "table-4",
        "table-5",
        "table-6",
    ):
        assert {r.suffix for r in (finished / "tables").glob(f"{name}.*")} == {".md", ".csv", ".tex"}, name
    for name in ("figure-4", "figure-5", "distortions", "examples"):
        assert (finished / "figures" / f"{name}.png").stat().st_size > 5000, name
    weights = {path.stem for path in (finished / "weights").iterdir()}
    assert {"base", *REGIMES, "depth-all", "depth-l3-l4", "lambda0.5-alpha0"} <= weights
    assert (finished / "data" / "train" / MANIFEST).exists() and (
        finished / "data" / "test" / MANIFEST
    ).exists()


def test_every_regime_is_a_checkpoint_of_an_ordinary_run(finished: Path) -> None:
    folder = RunFolder.open(finished)
    assert list(folder.manifest.models) == list(REGIMES)
    rows = folder.scores().sql("select distinct label, explained from scores where metric = 'bl'")
    assert rows == [{"label": 1, "explained": 1}]  # codes alone, explained as codes


def test_table_2_is_what_the_metrics_say_about_the_stored_maps(finished: Path) -> None:
    maps = RunFolder.open(finished).maps()
    masks = finished / "data" / "test" / "masks"
    for row in table_rows(finished, "table-2"):
        if row["method"].startswith("smoothgrad"):
            assert row["n"] == "2"  # the subset
            continue
        stored = maps.read(row["regime"], row["method"])
        numbers = [Path(name).stem.split("-")[0] for name in stored.ids]
        parts: list[Any] = [
            np.stack([np.asarray(Image.open(masks / f"{n}-{part}.png")) > 0 for n in numbers])
            for part in ("finder", "timing", "box")
        ]
        scores = hp.metrics.structure(stored, *parts)
        for column, metric in (("BL", "bl"), ("FMR", "fmr"), ("TMR", "tmr"), ("DtS", "dts")):
            assert float(row[column]) == pytest.approx(float(scores[metric].nanmean()), abs=1e-6, nan_ok=True)
        assert float(row["empty maps"]) == pytest.approx(float(stored.degenerate.float().mean()))
        assert float(row["ms/image"]) > 0 and row["n"] == "8"


def test_tables_3_and_4_are_what_the_rows_say(finished: Path) -> None:
    measured, run = (read_columns(RunFolder.open(finished / name)) for name in ("measured", "run"))
    (row,) = [
        r for r in table_rows(finished, "table-3") if (r["regime"], r["method"]) == ("zs", "eigengradcam")
    ]
    slopes, areas = [], []
    for kind in DISTORTIONS:
        names = ["(clean=0)", *(f"({kind}={level:g})" for level in SEVERITIES[1:])]
        leak, finder = (
            [np.nanmean(list(measured["zs", "eigengradcam", mass + name].values())) for name in names]
            for mass in ("bl", "fmr")
        )
        slopes.append(np.polyfit(SEVERITIES, leak, 1)[0])
        areas.append(np.trapezoid(np.array(finder) / finder[0], SEVERITIES))
    assert float(row["BL slope"]) == pytest.approx(np.mean(slopes), abs=1e-6)
    assert float(row["FMR-AURC"]) == pytest.approx(np.mean(areas), abs=1e-6)
    assert float(row["BL slope low"]) <= float(row["BL slope"]) <= float(row["BL slope high"])
    drops = measured["zs", "", "drop_finder"]
    mass = run["zs", "eigengradcam", "fmr"]
    (row,) = [
        r for r in table_rows(finished, "table-4") if (r["regime"], r["method"]) == ("zs", "eigengradcam")
    ]
    rho = spearmanr([mass[image] for image in drops], list(drops.values()))[0]
    assert float(row["rho(FMR, drop without finder)"]) == pytest.approx(rho, nan_ok=True)
    assert row["n"] == "6"


def test_lambda_0_is_ft_struct_whatever_alpha_is(finished: Path) -> None:
    zero = [row for row in table_rows(finished, "table-6") if float(row["lambda"]) == 0]
    for method in ("gradcam", "eigengradcam"):
        assert len({(r["BL"], r["FMR"], r["accuracy"]) for r in zero if r["method"] == method}) == 1
    assert [r["trained"] for r in table_rows(finished, "table-5")][:4] == list(DEPTHS)
    shares = [float(row["% of parameters"]) for row in table_rows(finished, "table-5")][:4]
    assert shares == sorted(shares) and shares[-1] == 100


def test_published_rows_are_shown_as_published(finished: Path, papers: dict[str, Any]) -> None:
    short = {"zs": "ZS", "ft-struct": "FTS", "ft-leakmin": "FTL"}
    names = {"layercam": "Layer", "eigengradcam": "Eigen", "xgradcam": "X"}
    rows = table_rows(finished, "table-2", "paper, ResNet-50")
    assert len(rows) == 9
    for row in rows:
        numbers = [float(row[column]) for column in ("BL", "FMR", "TMR", "DtS", "ms/image")]
        golden = papers["cambench"]["table2"][f"R50|{short[row['regime']]}"][names[row["method"]]]
        assert numbers == golden
    for backbone, mark in (("ResNet-50", "R50"), ("ConvNeXt-B", "CNX")):
        for regime, method, *_, score in published_rows("coverage", backbone):
            golden = papers["cambench"]["structure_score_fig5"][f"{mark}|{short[regime]}|{names[method]}"]
            assert score == pytest.approx(golden, abs=1e-9)
    # No published row is marked as the best: none competes.
    page = (finished / "tables" / "table-2.md").read_text().splitlines()
    assert not any("**" in line for line in page if line.startswith("| paper"))
    assert any("**" in line for line in page if line.startswith("| ours"))


def test_the_paper_contradicts_itself_as_the_page_says() -> None:
    cells = {row[1:3]: row[3:] for row in map(tuple, published_rows("table-6", ""))}
    assert len({cells[0.0, alpha] for alpha in (0.0, 0.25, 0.5)}) == 3
    rows = published_rows("table-2", "ResNet-50")
    assert max(row[2] for row in rows if row[0] == "ft-leakmin") == 0.039 < cells[0.25, 0.25][0]
    for backbone in ("ResNet-50", "ConvNeXt-B"):
        scores = {tuple(row[:2]): row[-1] for row in published_rows("coverage", backbone)}
        gains = {m: scores["ft-leakmin", m] > scores["ft-struct", m] for r, m in scores if r == "zs"}
        assert gains == {"layercam": False, "eigengradcam": False, "xgradcam": True}


def test_a_stopped_study_goes_on_and_computes_nothing_twice(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[tuple[str, str]] = []
    real = Probe.explained
    looks = 1 + len(DISTORTIONS) * (len(SEVERITIES) - 1) + 1 + len(EDITS)  # at codes as they are twice
    whole = looks * len(REGIMES) * 4  # methods, floors among them
    first_two = len(SEVERITIES) * len(REGIMES) * 4  # codes as they are, and the first distortion

    def counting(self: Probe, regime: str, pictures: np.ndarray, methods: Any) -> Any:
        if len(pictures) > 1:  # not the one picture whose time is taken
            if stopping and len(explained) == first_two:
                raise KeyboardInterrupt
            explained.extend((regime, method) for method in methods)
        return real(self, regime, pictures, methods)

    monkeypatch.setattr(Probe, "explained", counting)
    stopping = True
    assert study(*SHORT, "--heavy", "smoothgrad(samples=3)", "--out", tmp_path).exit_code == 130
    stopping = False
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert sum(path.parent.parent.name == "measured" for path in times) == 2 * len(REGIMES) * 4
    assert not (tmp_path / "summary.md").exists()
    status = RunFolder.open(tmp_path / "measured").status()  # planned before anything is measured
    assert status.units > status.done == 2 * len(REGIMES) * 4

    def no_more(*_: Any) -> Any:
        raise AssertionError("something was computed again")

    monkeypatch.setattr("heatproof.train.loop._epoch", no_more)
    assert study(*SHORT, "--heavy", "smoothgrad(samples=3)", "--out", tmp_path).exit_code == 0
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert len(explained) == whole  # every map that is needed, once
    for name in ("run", "subset", "measured"):
        query = (
            "select checkpoint, method, metric, image, value from scores where metric <> 'ms' order by all"
        )
        stopped, straight = (RunFolder.open(out / name).scores().sql(query) for out in (tmp_path, finished))
        assert str(stopped) == str(straight), name
    # Once more: not a single map.
    monkeypatch.setattr(Probe, "explained", no_more)
    page = (tmp_path / "summary.md").read_bytes()
    assert study(*SHORT, "--heavy", "smoothgrad(samples=3)", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "summary.md").read_bytes() == page


def test_another_symbol_two_seeds_and_no_proxy(tmp_path: Path) -> None:
    options = ["--symbol", "datamatrix", "--seeds", "2", "--proxy", "0", "--methods", "gradcam"]
    result = study(*SHORT, *options, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Table 2: structure and speed, 2 seeds" in result.output
    assert "without any training before the regimes" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "seeds" / "1" / "run" / "run.json").exists()
    single, both = (table_rows(tmp_path, name)[1] for name in ("table-2", "table-2-seeds"))
    assert single["method"] == both["method"] == "random" and both["BL n"] == "2"
    assert float(both["BL low"]) <= float(single["BL"]) <= float(both["BL high"])
    assert {path.stem for path in (tmp_path / "weights").iterdir()} == set(REGIMES)


def results(columns: Columns, methods: tuple[str, ...], accuracy: float = 0.9, seed: int = 0) -> Results:
    """What a study would have measured."""
    end = History((Epoch(1, "train", 0.1, accuracy, 0.9, 1e-3, 1.0),))
    settings = QrSettings(out=Path("nowhere"), methods=methods, depth_study=False, ablation=False)
    trained = Trained(dict.fromkeys(REGIMES, end), {})
    return Results(settings, seed, trained, {"run": columns, "subset": {}, "measured": {}})


def columns_of(maps: dict[str, torch.Tensor], masks: dict[str, np.ndarray]) -> Columns:
    columns: Columns = {}
    for method, values in maps.items():
        scores = hp.metrics.structure(values, masks["finder"], masks["timing"], masks["box"])
        for regime, (name, column) in itertools.product(REGIMES, scores.items()):
            name = "structure_score" if name == "score" else name
            columns[regime, method, name] = {str(i): v for i, v in enumerate(column.tolist())}
    return columns


def test_an_oracle_and_an_anti_oracle_get_the_extremes() -> None:
    codes = make_qr(4, 0, 64, seed=3)
    maps = {
        "gradcam": torch.from_numpy(codes.masks["finder"]).float(),  # stands for the oracle
        "layercam": torch.from_numpy(~codes.masks["box"]).float(),  # and this for its opposite
        "xgradcam": torch.rand(4, 64, 64, generator=torch.Generator().manual_seed(0)),
    }
    table = qr_table(results(columns_of(maps, codes.masks), tuple(maps)), "table-2")
    leak, finder, distance = (
        {m: number(cell) for m, cell in ours(table, "zs", column).items()} for column in ("BL", "FMR", "DtS")
    )
    assert finder["gradcam"] == pytest.approx(1, abs=1e-5) and leak["gradcam"] == 0 == distance["gradcam"]
    assert leak["layercam"] == pytest.approx(1, abs=1e-5) and finder["layercam"] == 0
    assert 0 < leak["xgradcam"] < 1 and finder["layercam"] < finder["xgradcam"] < finder["gradcam"]
    best = {table.columns[j].name: table.rows[i][2] for (i, j), place in table.marks().items() if place == 1}
    assert best["BL"] == best["FMR"] == "gradcam"


def drawn(leaks: dict[str, float], seed: int, codes: int = 80) -> Table:
    """Table 2 of methods whose leakage scatters about a mean, on the codes of one seed."""
    random = np.random.default_rng(seed)
    columns: Columns = {}
    for regime, (method, mean) in itertools.product(REGIMES, leaks.items()):
        for metric in ("bl", "fmr", "tmr", "dts"):
            columns[regime, method, metric] = {
                str(i): v for i, v in enumerate(random.normal(mean, 0.1, codes))
            }
    return qr_table(results(columns, tuple(leaks), seed=seed), "table-2")


def test_the_order_of_methods_does_not_change_with_the_seed_beyond_its_intervals() -> None:
    leaks = {"gradcam": 0.3, "layercam": 0.5, "xgradcam": 0.31}  # two of them hardly differ
    several = [drawn(leaks, seed) for seed in range(5)]
    orders = {tuple(sorted(leaks, key=lambda m: number(ours(t, "zs", "BL")[m]))) for t in several}
    assert len(orders) > 1  # the bare order does change
    assert flipped(several) == [] and "No two methods" in ANSWERS.seeds([])
    over = ours(over_seeds(several), "zs", "BL")
    assert apart(over["gradcam"], over["layercam"]) == -1 and apart(over["gradcam"], over["xgradcam"]) == 0
    turned = [*several, drawn({"gradcam": 0.5, "layercam": 0.3, "xgradcam": 0.31}, 9)]
    pairs = flipped(turned)
    assert "BL: gradcam and layercam under zs" in pairs and "change places" in ANSWERS.seeds(pairs)


def test_floors_that_are_beaten_are_counted() -> None:
    leaks = {"gradcam": 0.2, "layercam": 0.8, "random": 0.5, "edges": 0.2}
    text = ANSWERS.floors(floors(drawn(leaks, 0, codes=400)))
    assert "BL: random by 3, edges by 0 of 6" in text and "FMR: random by 3, edges by 3 of 6" in text


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)

    def share(inside: list[bool]) -> float:
        return sum(inside) / len(inside)

    def holds(value: Value, truth: float) -> bool:
        assert value.interval is not None
        return value.interval[0] <= truth <= value.interval[1]

    seeds = [holds(seed_value(random.normal(2, 1, 5)), 2) for _ in range(400)]
    assert 0.92 < share(seeds) < 0.98  # Student's t is exact here
    codes = [holds(mean_value(random.normal(2, 1, 60).tolist(), k), 2) for k in range(100)]
    assert 0.88 < share(codes) <= 1
    lines = np.array(SEVERITIES)
    curves = [
        holds(curve_value(0.1 + 0.3 * lines + random.normal(0, 0.1, (40, 6, 5)), "bl", k), 0.3)
        for k in range(60)
    ]
    assert 0.86 < share(curves) <= 1
    pairs = random.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], (60, 60))
    truth = 6 / np.pi * np.arcsin(0.25)  # Spearman's rho of a normal pair with correlation 0.5
    assert share([holds(rho_value(p[:, 0], p[:, 1], k), truth) for k, p in enumerate(pairs)]) > 0.85


def test_the_answer_about_leakage_follows_the_intervals() -> None:
    lower = drawn({"gradcam": 0.5, "layercam": 0.5}, 0)
    place = [column.name for column in lower.columns].index("BL")
    rows = [list(row) for row in lower.rows]
    for row in rows:
        if row[:3] == ["ours", "ft-leakmin", "gradcam"]:
            row[place] = Value(0.1, (0.05, 0.15), 80)
    answer = ANSWERS.leakage(**leakage(Table("t", "t", lower.columns, tuple(map(tuple, rows)))))
    assert "lower beyond both intervals for 1 of 2 methods, higher for 0" in answer
    assert "90.0% → 90.0%, not more than one point lost" in answer and "No method's maps go empty" in answer
    blank = [column.name for column in lower.columns].index("empty maps")
    for row in rows:
        if row[0] == "ours":
            row[blank] = 0.6 if row[1:3] == ["ft-leakmin", "gradcam"] else 0.0
    answer = ANSWERS.leakage(**leakage(Table("t", "t", lower.columns, tuple(map(tuple, rows)))))
    assert "**Maps go empty**" in answer and "gradcam 0% → 60%." in answer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--symbol", "qrr"], "did you mean 'qr'"),
        (["--size", "20"], "does not fit into 20x20 pixels"),
        (["--methods", "gradcamm"], "did you mean 'gradcam'"),
        (["--methods", "gradcam", "--heavy", "gradcam"], "named twice"),
        (["--seeds", "0"], "'--seeds': 0 is not in the range x>=1"),
        (["--alpha", "2"], "must lie in [0, 1]"),
        (["--schedule", "step"], "'step' is not one of 'cosine', 'constant'"),
        (["--model", "resnet"], "cannot read the model 'resnet'"),
        (["--layer", "layer9"], "layer9"),
        (["--photos", "/nowhere"], "there is no folder"),
    ],
)
def test_bad_input_raises_a_clear_error_before_any_work(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = study(*TINY, "--out", tmp_path, *arguments)
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and words in output and "Traceback" not in output, output
    assert not (tmp_path / "data").exists() and not (tmp_path / "training").exists()


def test_other_settings_are_refused_in_a_folder_that_was_begun(finished: Path) -> None:
    result = study(*TINY, "--heavy", "smoothgrad(samples=3)", "--out", finished, "--test", "9")
    assert result.exit_code == 2 and "test was 8 and is now 9" in " ".join(result.output.split())


def test_the_help_names_the_defaults() -> None:
    help_text = " ".join(study("--help").output.split())
    numbers = {
        field.name: field.default for field in fields(QrSettings) if type(field.default) in (int, float)
    }
    assert len(numbers) > 15
    for name, default in numbers.items():
        (about,) = re.findall(rf"--{name.replace('_', '-')} (?:INTEGER|FLOAT)[^\[]*\[([^\]]*)\]", help_text)
        assert about.split(";")[0] == f"default: {default:g}", name


def test_the_example_is_read(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "qr.toml"
    result = study(example, "--out", tmp_path, "--seeds", "0")
    assert result.exit_code == 2 and "0 is not in the range" in result.output  # every key was understood
