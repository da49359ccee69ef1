"""A run folder that knows what was written into it: seals, verify, repair, folders of other versions."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from heatproof.cli import main
from heatproof.errors import HeatproofError, StoreError
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.store.folder import inspect
from tiny_study import fingerprint, make_study


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small study with its finished run in `out`."""
    folder = tmp_path_factory.mktemp("finished")
    study = make_study(folder, 10, ["gradcam", "gradient"], ["cscore", "accuracy"], "epochs/epoch01.pt")
    run_study(study, folder / "out")
    return folder


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy" / "study.toml"


def verify(run: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["verify", str(run), *options])
    return result.exit_code, result.output


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_whole_run_passes(study: Path) -> None:
    code, output = verify(study.parent / "out")
    assert code == 0 and "all files are intact; complete: 5 of 5 units, 10 of 10 images used" in output


def test_sixty_of_sixty_flipped_bits_are_found_and_none_becomes_a_row(study: Path) -> None:
    out, rng = study.parent / "out", random.Random(0)
    expected = fingerprint(out)[0]
    files = [f for f in sorted(out.rglob("*")) if f.is_file() and "locks" not in f.parts]
    assert {f.parent.name for f in files} >= {"scores", "maps", "gradcam", "pictures", "seals", "out"}
    parts = sorted((out / "scores").iterdir())
    for number in range(60):
        path = parts[number % len(parts)] if number % 3 == 0 else rng.choice(files)
        content = path.read_bytes()
        flip(path, rng)
        assert path.relative_to(out).as_posix() in {finding.path for finding in inspect(out)}, path
        try:  # reading gives the right rows, fewer of them, or a sentence; never other rows
            run = RunFolder.open(out)
            assert run.scores().digest() == expected or not run.status().complete
        except HeatproofError as error:
            assert "\n" not in str(error)
        path.write_bytes(content)
    assert verify(out)[0] == 0


@pytest.mark.parametrize(
    "kind", ["scores/*.parquet", "maps/*.json.gz", "maps/gradient/*.npy", "pictures/*", "seals/*"]
)
@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_harm_is_named_dropped_and_made_again(study: Path, kind: str, harm: str) -> None:
    out = study.parent / "out"
    before = fingerprint(out)
    path = sorted(out.glob(kind))[0]
    if harm == "delete":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        flip(path, random.Random(1))
    code, output = verify(out, "--repair")
    assert code == 1 and path.name in output.replace("\n", "") and "dropped " in output
    assert not RunFolder.open(out).status().complete
    run_study(study, out)
    assert verify(out)[0] == 0 and fingerprint(out) == before


def test_a_lost_file_is_made_again_by_the_run_alone(study: Path) -> None:
    out = study.parent / "out"
    before = fingerprint(out)
    next((out / "maps").glob("*.json.gz")).unlink()
    status = RunFolder.open(out).status()
    assert (status.state, status.done) == ("failed", 4) and "though it was complete" in status.reason
    with pytest.raises(StoreError, match="it is missing"):  # instead of "the map has NaN"
        RunFolder.open(out).maps().contents()
    run_study(study, out)
    assert fingerprint(out) == before


def test_foreign_parts_are_named_and_are_no_rows(study: Path, tmp_path: Path) -> None:
    out = study.parent / "out"
    other = make_study(tmp_path / "other", 4, ["gradcam"], [], "epochs/epoch02.pt")
    run_study(other, tmp_path / "other" / "out")
    before = fingerprint(out)[0]
    for kind in ("scores", "seals"):
        for path in (tmp_path / "other" / "out" / kind).iterdir():
            shutil.copy(path, out / kind / path.name)
    (out / "scores" / "notes.parquet").write_bytes(next((out / "scores").iterdir()).read_bytes())
    (out / "pictures" / "evil.png").symlink_to("/etc/hostname")
    assert fingerprint(out)[0] == before
    code, output = verify(out, "--repair")
    assert code == 1 and "notes.parquet" in output and "evil.png" in output
    assert verify(out)[0] == 0 and (out / "set-aside" / "scores" / "notes.parquet").exists()


def test_a_lost_manifest_comes_back_with_the_study(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = study.parent / "out"
    before = fingerprint(out)
    (out / "run.json").unlink()
    assert verify(out)[0] == 1
    result = run_study(study, out)
    assert result.computed == 0 and result.done == 5 and fingerprint(out) == before


def test_a_manifest_changed_by_hand_is_refused(study: Path) -> None:
    out = study.parent / "out"
    text = (out / "run.json").read_text()
    (out / "run.json").write_text(text.replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(StoreError, match=r"cannot read .*run\.json: its content is not what was written"):
        RunFolder.open(out)


def test_a_folder_of_the_future_is_refused(study: Path) -> None:
    path = study.parent / "out" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    with pytest.raises(
        StoreError, match=r"later version of heatproof \(format 3; this one reads up to 2\): install"
    ) as error:
        RunFolder.open(path.parent)
    assert "\n" not in str(error.value)


def test_a_folder_of_0_1_is_refused_with_a_clear_error(study: Path) -> None:
    manifest = study.parent / "out" / "run.json"
    content = {k: v for k, v in json.loads(manifest.read_text()).items() if k not in ("checksum", "format")}
    manifest.write_text(json.dumps(content))
    code, output = verify(manifest.parent)
    assert code == 1 and "run.json" in output
    result = CliRunner().invoke(main, ["verdict", str(manifest.parent)])
    assert result.exit_code == 2 and "was written by heatproof 0.1" in result.output.replace("\n", " ")


def test_resuming_under_other_versions_says_so(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from heatproof.run import engine

    out, messages = study.parent / "out", []
    monkeypatch.setattr(engine, "maker", lambda device: {"torch": "9.9", "device": device})
    engine.report_makers(RunFolder.open(out), "cpu", messages.append)
    (line,) = messages
    assert "5 units were computed with torch" in line and "(now 9.9)" in line
    assert RunFolder.open(out).makers()[0]["parts"] == 5
