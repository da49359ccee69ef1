"""Run folders that lost files, were edited, or hold values of other types; the commands that read them."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from heatproof.cli import main
from heatproof.disk import digest
from heatproof.errors import StoreError
from heatproof.report.gallery import UNAVAILABLE, gallery
from heatproof.run import worker
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.store.ledger import RECORDS, known_record, write_record
from heatproof.verdict.answers import HEADLINES, UNDECIDED
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import conclude, judge
from made_run import made_record, make_run
from tiny_study import make_study

TESTS = ("specificity_weights", "specificity_place")
REPORT = ("report", "--gallery", "3")
IN_TURN = (
    ("verdict",),
    ("gate", "--rule", "follows gradcam", "--rule", "accuracy >= 0"),
    ("sql", "from status"),
)
Commands = tuple[tuple[str, ...], ...]
OTHER_TYPES: tuple[Any, ...] = ("text", 7, -1.5, None, True, [1], {"key": 1})


def heatproof(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small study, with its finished run in `out`."""
    folder = tmp_path_factory.mktemp("finished")
    study = make_study(folder, 12, ["gradcam", "gradient"], ["cscore", "accuracy"], "epochs/epoch01.pt")
    conclude(run_study(study, folder / "out").folder)
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy" / "out"


# --- files that are missing ---------------------------------------------------------------------------------


def test_a_run_of_unknown_state_is_not_complete(tmp_path: Path) -> None:
    values = lambda *given: given[2].normal(0.6, 0.1, 100)  # noqa: E731
    folder = make_run(tmp_path / "run", values, 100, metrics=TESTS, maps=False, evidence=made_record())
    rule = "gate", folder.path, "--rule", "follows gradcam"
    assert judge(read_run(folder)).level == "clear" and heatproof(*rule).exit_code == 0
    (folder.path / "plan.json").unlink()
    verdict = judge(read_run(folder))
    assert verdict.headline == UNDECIDED and verdict.level == "thin" and verdict.network.answer != "yes"
    assert "the run is not complete: unknown (plan.json" in verdict.notes[0]
    gate = heatproof(*rule)
    assert gate.exit_code == 1 and "unknown (plan.json" in " ".join(gate.output.split())
    verify = heatproof("verify", folder.path)
    assert verify.exit_code == 1 and "plan.json" in verify.output


def test_a_third_of_the_units_cannot_vanish_with_the_plan(out: Path) -> None:
    for name in ("plan.json", "images.json"):
        (out / name).unlink()
    for seal in sorted((out / "seals").iterdir())[::3]:
        for path in out.rglob(f"{seal.stem}*"):
            path.unlink()
    verify = heatproof("verify", out)
    assert verify.exit_code == 1 and "plan.json" in verify.output and "images.json" in verify.output
    assert judge(read_run(RunFolder.open(out))).level == "thin"
    assert heatproof("gate", out, "--rule", "accuracy >= 0").exit_code == 1


@pytest.mark.parametrize("name", ["run.json", "plan.json", "images.json", "status.json", "hashes.json"])
def test_verify_names_a_missing_record_and_the_run_writes_it_again(
    out: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heatproof.images.source.is_settled", lambda state: True)
    run_study(out.parent / "study.toml", out)  # whose images are old enough for hashes.json by now
    assert heatproof("verify", out).exit_code == 0
    (out / name).unlink()
    verify = heatproof("verify", out, "--repair")
    assert verify.exit_code == 1 and name in verify.output and "missing" in verify.output
    run_study(out.parent / "study.toml", out)
    assert heatproof("verify", out).exit_code == 0


def test_verify_names_an_edited_verdict(out: Path) -> None:
    path = out / "verdict.json"
    path.write_text(path.read_text().replace(UNDECIDED, HEADLINES["yes", "undecided"]))
    verify = heatproof("verify", out, "--repair")
    assert verify.exit_code == 1 and "verdict.json" in verify.output and "damaged" in verify.output
    assert heatproof("verdict", out).exit_code == 0 and heatproof("verify", out).exit_code == 0


def test_a_folder_of_a_later_version_is_refused_and_left_alone(out: Path) -> None:
    content = known_record(out / "run.json") or {}
    write_record(out / "run.json", {**content, "format": 3, "config": ["another", "form"]})
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for options in ((), ("--repair",)):
        verify = heatproof("verify", out, *options)
        assert verify.exit_code == 2 and "written by a later version" in verify.output
        assert "damaged" not in verify.output and len(verify.output.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# --- files that vanish while the run is going ---------------------------------------------------------------


@pytest.mark.parametrize("what", ["seal", "part", "folder", "run.json"])
def test_what_vanishes_during_a_run_is_an_error_that_names_it(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, out = make_study(tmp_path, 12, ["gradcam"], [], "epochs/epoch01.pt"), tmp_path / "out"
    compute, calls = worker.Worker.compute, []

    def losing(self: worker.Worker, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            while len(seals := list((out / "seals").glob("*.json"))) < 2:  # written in the background
                time.sleep(0.01)
            lost = {"seal": seals[0], "part": out / f"scores/{seals[0].stem}.parquet", "folder": out}
            path = lost.get(what, out / what)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return compute(self, *given)

    monkeypatch.setattr(worker.Worker, "compute", losing)
    result = heatproof("run", study, "--out", out)
    named = {"seal": "seals/", "part": "scores/", "folder": "run.json", "run.json": "run.json"}[what]
    assert result.exit_code == 2 and "other shards" not in result.output, result.output
    assert named in result.output.rpartition("error: ")[2] and str(out) in result.output.replace("\n", "")
    monkeypatch.undo()
    assert run_study(study, out).done == 3 and heatproof("verify", out).exit_code == 0


@pytest.mark.parametrize("unit", range(4))
def test_a_report_is_written_whichever_unit_is_deleted(out: Path, unit: int) -> None:
    seal = sorted((out / "seals").iterdir())[unit]
    for path in out.rglob(f"{seal.stem}*"):
        path.unlink()
    result = heatproof("report", out)
    assert result.exit_code == 0 and "the run is not complete: failed (1 of" in result.output


# --- stored images ------------------------------------------------------------------------------------------


def test_swapped_images_are_not_shown_under_the_wrong_names(out: Path) -> None:
    data = read_run(RunFolder.open(out))
    pictures, (first, second) = data.folder.pictures(), data.images.ids[:2]
    first_path, other = pictures.path(first), pictures.path(second)
    assert first_path and other and {r["unavailable"] for r in gallery(data)["images"]} == {""}
    moved = first_path.read_bytes()
    first_path.write_bytes(other.read_bytes())
    other.write_bytes(moved)
    records = {record["id"]: record for record in gallery(read_run(RunFolder.open(out)))["images"]}
    for name, record in records.items():
        assert (record["picture"] is None) == (name in (first, second))
        assert record["unavailable"] == (UNAVAILABLE if name in (first, second) else "")
    with pytest.raises(StoreError, match="not what was written"):
        RunFolder.open(out).pictures().read(first)
    assert heatproof("report", out).exit_code == 0
    assert UNAVAILABLE in (out / "report.html").read_text()


def test_an_image_that_was_repaired_later_is_taken_with_an_option_that_is_named(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, 8, ["gradcam"], ["accuracy"], "epochs/epoch01.pt"), tmp_path / "out"
    broken = tmp_path / "pictures" / "cat" / "000.png"
    good = broken.read_bytes()
    broken.write_bytes(b"no image")
    assert heatproof("run", study, "--out", out).exit_code == 1
    broken.write_bytes(good)
    refused = heatproof("run", study, "--out", out)
    assert refused.exit_code == 2 and "cat/000.png" in refused.output and "--retry-broken" in refused.output
    assert heatproof("run", study, "--out", out, "--retry-broken").exit_code == 0
    other = tmp_path / "pictures" / "dog" / "001.png"
    other.write_bytes(good)  # which could be read before
    refused = heatproof("run", study, "--out", out)
    assert refused.exit_code == 2 and "--retry-broken" not in refused.output


# --- values of other types ----------------------------------------------------------------------------------


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside a record; of long lists, to the first entry."""
    if way:
        yield way
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield from places(inner, (*way, key))


def with_other(value: Any, way: tuple[Any, ...], other: Any) -> Any:
    if not way:
        return other
    copy = value.copy()
    copy[way[0]] = with_other(copy[way[0]], way[1:], other)
    return copy


def harmed(content: Any) -> Iterator[Any]:
    """The record with one value of another type, for each of its values."""
    for i, way in enumerate(places(content)):
        kinds = [other for other in OTHER_TYPES if type(other) is not type(_at(content, way))]
        yield with_other(content, way, kinds[i % len(kinds)])


def _at(value: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("name", "with_report"),
    [
        *((name, False) for name in ("run.json", "seals")),  # with more values than all others together
        *(pytest.param(name, True, marks=pytest.mark.seeds) for name in ("run.json", "seals")),
        *((name, True) for name in sorted(RECORDS.keys() - {"verdict.json"})),
    ],
)
def test_no_value_of_another_type_crashes_a_command(out: Path, name: str, with_report: bool) -> None:
    """With each value, `verify` and the other commands in turn; with_report: also `report` each time."""
    always: Commands = (("verify",), REPORT) if with_report else (("verify",),)
    in_turn: Commands = IN_TURN if with_report else (REPORT, *IN_TURN)
    path = sorted((out / "seals").iterdir())[0] if name == "seals" else out / name
    if name == "left_out.json":
        write_record(path, {"reasons": {"lime": "too slow"}})
    if name == "gradients.json":
        write_record(path, {"checkpoints": {"epoch01": {"0": [0.5, 1.0]}}})
    if name == "hashes.json":
        write_record(path, {"files": {"a.png": [1, 2, 3, "mark"]}})
    refused = 0
    for i, content in enumerate(harmed(known_record(path))):
        write_record(path, content)
        for command, *options in (*always, in_turn[i % len(in_turn)]):
            result = heatproof(command, out, *options)
            sentence = result.output.rpartition("error: ")[2].strip()
            assert result.exit_code in (0, 1, 2), (path.read_text()[:2000], command, result.output)
            assert result.exit_code != 2 or "\n" not in sentence, (command, result.output)
            refused += result.exit_code > 0
    assert refused


@pytest.mark.parametrize("way", [("checkpoint",), ("ids", 0), ("maps", 0, "values"), ("maps", 0, "method")])
def test_an_index_of_maps_with_another_type_raises_a_clear_error(out: Path, way: tuple[Any, ...]) -> None:
    index = sorted((out / "maps").glob("*.json.gz"))[0]
    content = json.loads(gzip.decompress(index.read_bytes()))
    index.write_bytes(gzip.compress(json.dumps(with_other(content, way, [1])).encode()))
    seal = out / "seals" / f"{index.name.removesuffix('.json.gz')}.json"
    sealed = known_record(seal) or {}
    sealed["files"][f"maps/{index.name}"] = digest(index)
    write_record(seal, sealed)
    result = heatproof("report", out)
    assert result.exit_code == 2 and index.name in result.output.replace("\n", "")
