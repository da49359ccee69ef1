"""What a run was made from: mix-ups of pictures, code and weights are noticed, and moving is no mix-up."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from heatproof.errors import InputError, StoreError
from heatproof.images import open_source
from heatproof.images.kinds import open_memory
from heatproof.run import engine, worker
from heatproof.run.engine import run_study
from heatproof.run.plan import code_hashes
from heatproof.store import RunFolder
from tiny_study import NETWORK, fingerprint, make_study, write_study

PLAIN = ["gradcam"], ["accuracy"], "epochs/epoch01.pt"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Eight pictures of equal size in bytes, in two units."""
    path = make_study(tmp_path, 0, *PLAIN)
    for i in range(8):
        picture = tmp_path / "pictures" / ("cat", "dog")[i % 2] / f"{i}.bmp"
        picture.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (36, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(picture)
    return path


def swap(first: Path, other: Path) -> None:
    """Exchange the contents of two files, and leave no trace in their times."""
    contents, times = [p.read_bytes() for p in (first, other)], [p.stat() for p in (first, other)]
    for path, content, before in zip((first, other), reversed(contents), times, strict=True):
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_pictures_of_equal_size_that_change_places_are_refused_by_name(study: Path) -> None:
    run_study(study, study.parent / "out")
    swap(*(study.parent / "pictures" / "cat" / name for name in ("0.bmp", "2.bmp")))
    with pytest.raises(StoreError, match=r"images are not those of the run \(cat/0\.bmp and 1 more\)"):
        run_study(study, study.parent / "out")


def test_a_swap_after_a_lost_manifest_gives_no_mixed_rows(study: Path) -> None:
    out = study.parent / "out"
    run_study(study, out)
    swap(*(study.parent / "pictures" / "cat" / name for name in ("0.bmp", "2.bmp")))
    (out / "run.json").unlink()
    result = run_study(study, out)
    assert result.computed == 4  # the unit with the changed pictures, and not the other one
    run_study(study, study.parent / "fresh")
    assert fingerprint(out)[0] == fingerprint(study.parent / "fresh")[0]


def test_other_weights_after_a_lost_manifest_give_no_mixed_rows(study: Path) -> None:
    folder, out = study.parent, study.parent / "out"
    run_study(study, out)
    shutil.copy(folder / "epochs" / "epoch02.pt", folder / "epochs" / "epoch01.pt")
    (out / "run.json").unlink()
    sorted((out / "scores").iterdir())[0].unlink()  # as in a run that was stopped halfway
    run_study(study, out)
    run_study(study, folder / "fresh")
    assert fingerprint(out)[0] == fingerprint(folder / "fresh")[0]


def test_other_code_of_a_factory_or_of_what_it_imports_is_refused(study: Path) -> None:
    folder, out = study.parent, study.parent / "out"
    (folder / "own").mkdir()  # a package without an __init__.py
    (folder / "own" / "parts.py").write_text("SLOPE = 0.0\n")
    network = NETWORK.replace("import torch\n", "import torch\nfrom own.parts import SLOPE\n", 1)
    network = network.replace("nn.ReLU()", "nn.LeakyReLU(SLOPE)")
    (folder / "net.py").write_text(network)
    run_study(study, out)
    (folder / "own" / "parts.py").write_text("SLOPE = 0.9\n")
    with pytest.raises(StoreError, match=r"the code of own/parts\.py is not that of the run"):
        run_study(study, out)
    (folder / "own" / "parts.py").write_text("SLOPE = 0.0\n")
    (folder / "net.py").write_text(network.replace("SLOPE)", "0.5)"))
    write_study(folder, PLAIN[0], ["accuracy", "auc"], PLAIN[2])  # also where the run may grow
    with pytest.raises(StoreError, match=r"the code of net\.py is not that of the run"):
        run_study(study, out)


def test_helper_files_of_a_factory_are_hashed_however_they_are_imported(tmp_path: Path) -> None:
    files = {
        "net.py": "import importlib, one\nfrom folder import two\ndef make():\n    import folder.deep.three\n"
        "    importlib.import_module('five')\n",
        "one.py": "import torch", "folder/two.py": "from .deep import four", "folder/deep/three.py": "",
        "folder/deep/four.py": "from ... import one", "five.py": "", "other.py": "import net",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert set(code_hashes("net.py:make", tmp_path)) == set(files) - {"other.py"}


def test_a_run_goes_on_when_it_and_its_pictures_moved(study: Path) -> None:
    folder = study.parent
    run_study(study, folder / "out")
    before = fingerprint(folder / "out")
    shutil.copytree(folder, folder.parent / "elsewhere", copy_function=shutil.copyfile)  # with new times
    shutil.rmtree(folder / "pictures")
    moved = folder.parent / "elsewhere"
    result = run_study(moved / "study.toml", moved / "out")
    assert result.computed == 0 and result.folder.status().complete and fingerprint(moved / "out") == before


def test_masks_are_known_by_content(tmp_path: Path) -> None:
    from heatproof.images.source import Hashes, identify

    Image.new("L", (20, 20)).save(tmp_path / "a.bmp")
    Image.new("L", (20, 20)).save(tmp_path / "mask.bmp")
    (tmp_path / "list.csv").write_text("path,mask_finder\na.bmp,mask.bmp\n")
    before = identify(open_source("csv", tmp_path / "list.csv"), Hashes())
    Image.new("L", (20, 20), 255).save(tmp_path / "mask.bmp")
    after = identify(open_source("csv", tmp_path / "list.csv"), Hashes())
    assert before[0][0] == after[0][0] and before != after
    source = open_memory([np.zeros((4, 4), np.uint8)])
    assert identify(source, Hashes()) == identify(source, Hashes())


def test_a_file_is_hashed_once_unless_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heatproof.images.source import Hashes

    path, hashes = tmp_path / "a", Hashes()
    path.write_bytes(b"first")
    first = hashes.of(path)
    assert hashes.remembered(path) is None  # so young that another write might not show in its times
    monkeypatch.setattr("heatproof.images.source.SETTLED", -1)
    assert hashes.of(path) == hashes.remembered(path) == first
    path.write_bytes(b"other")
    assert hashes.remembered(path) is None and hashes.of(path) not in (first, None)
    assert hashes.remembered(tmp_path / "absent") is None and hashes.of(tmp_path / "absent") is None


def test_trusted_times_stand_for_contents(study: Path) -> None:
    out, picture = study.parent / "out", study.parent / "pictures" / "cat" / "0.bmp"
    run_study(study, out, trust_mtime=True)
    assert not (out / "hashes.json").exists()
    assert run_study(study, out).computed == 0  # as the run began, without being told again
    os.utime(picture)
    with pytest.raises(StoreError, match=r"images are not those of the run \(cat/0\.bmp\)"):
        run_study(study, out)


def test_a_picture_that_changes_during_the_run_ends_it(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, pictures = study.parent / "out", study.parent / "pictures"
    compute = worker.Worker.compute

    def and_swap(self: worker.Worker, *given: object) -> object:
        monkeypatch.setattr(worker.Worker, "compute", compute)
        swap(pictures / "dog" / "5.bmp", pictures / "dog" / "7.bmp")
        return compute(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.Worker, "compute", and_swap)
    with pytest.raises(InputError, match=r"dog/5\.bmp changed during the run"):
        run_study(study, out)
    status = RunFolder.open(out).status()
    assert (status.state, status.used, status.missing) == ("failed", 4, 4)
    swap(pictures / "dog" / "5.bmp", pictures / "dog" / "7.bmp")
    run_study(study, out)
    run_study(study, study.parent / "fresh")
    assert fingerprint(out)[0] == fingerprint(study.parent / "fresh")[0]


# Pictures that could not be read


def test_broken_pictures_are_tried_again_when_asked(study: Path) -> None:
    folder, out = study.parent, study.parent / "out"
    run_study(study, folder / "whole")
    picture = folder / "pictures" / "dog" / "5.bmp"
    whole = picture.read_bytes()
    picture.write_bytes(whole[:-100])
    assert [row["image"] for row in run_study(study, out).broken] == ["dog/5.bmp"]
    assert run_study(study, out, retry_broken=True).broken  # still broken
    picture.write_bytes(whole)
    with pytest.raises(StoreError, match=r"images are not those of the run \(dog/5\.bmp\)"):
        run_study(study, out)
    result = run_study(study, out, retry_broken=True)
    assert not result.broken and result.computed == 4  # its unit alone
    assert fingerprint(out) == fingerprint(folder / "whole")
    other = folder / "pictures" / "cat" / "0.bmp"
    other.write_bytes(whole)
    with pytest.raises(StoreError, match=r"images are not those of the run \(cat/0\.bmp\)"):
        run_study(study, out, retry_broken=True)  # which was not broken


def test_pictures_that_are_away_for_a_moment_become_no_rows(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = study.parent
    run_study(study, folder / "whole")
    prepare = engine.prepare

    def and_move_away(*given: object) -> object:
        prepared = prepare(*given)  # type: ignore[arg-type]
        (folder / "pictures").rename(folder / "away")
        threading.Timer(0.3, lambda: (folder / "away").rename(folder / "pictures")).start()
        return prepared

    monkeypatch.setattr(engine, "prepare", and_move_away)
    assert run_study(study, folder / "out").broken == []
    assert fingerprint(folder / "out") == fingerprint(folder / "whole")


def test_pictures_that_stay_away_become_rows_and_come_back(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = study.parent, study.parent / "out"
    run_study(study, folder / "whole")
    prepare = engine.prepare

    def and_move_away(*given: object) -> object:
        prepared = prepare(*given)  # type: ignore[arg-type]
        (folder / "pictures").rename(folder / "away")
        return prepared

    pauses: list[float] = []
    monkeypatch.setattr(worker, "PAUSES", (0.25,))
    with monkeypatch.context() as patched:
        patched.setattr(engine, "prepare", and_move_away)
        patched.setattr(worker.time, "sleep", pauses.append)
        assert len(run_study(study, out).broken) == 8
    assert pauses.count(0.25) <= worker.FRUITLESS
    status = RunFolder.open(out).status()
    assert (status.complete, status.used, status.broken, status.usable) == (True, 0, 8, 0.0)
    (folder / "away").rename(folder / "pictures")
    assert run_study(study, out, retry_broken=True).broken == []
    assert fingerprint(out) == fingerprint(folder / "whole")
