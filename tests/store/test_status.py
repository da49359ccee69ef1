"""A run says whether it is complete, and derives it from what is there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_resume import SLOW, wait_for

from heatproof.cli import main
from heatproof.errors import StoreError
from heatproof.run import worker
from heatproof.run.engine import run_study
from heatproof.store import Manifest, RunFolder
from tiny_study import fingerprint, make_study, start

PLAIN = ["gradcam"], ["accuracy"], "epochs/epoch01.pt"


def status(out: Path) -> tuple[str, int, int, int, int]:
    status = RunFolder.open(out).status()
    return status.state, status.planned, status.used, status.broken, status.missing


@pytest.mark.parametrize(("sign", "state", "why"), [
    (signal.SIGINT, "stopped", "on request"),
    (signal.SIGKILL, "failed", "its process was killed"),
])  # fmt: skip
def test_stopped_and_killed_runs_say_so(tmp_path: Path, sign: int, state: str, why: str) -> None:
    study, out = make_study(tmp_path, 32, *PLAIN), tmp_path / "out"
    process = start(study, out, script=SLOW)
    wait_for(lambda: list((out / "seals").glob("*.json")), process)
    running = RunFolder.open(out).status()
    assert running.state == "started" and "shard 0/1 is running" in running.reason
    process.send_signal(sign)
    process.communicate(timeout=60)
    current = RunFolder.open(out).status()
    assert current.state == state and why in current.reason and 0 < current.used < 32
    assert current.used + current.missing == 32 and not current.complete
    run_study(study, out)
    assert status(out) == ("complete", 32, 32, 0, 0)


def test_an_error_is_kept_with_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, out = make_study(tmp_path, 8, *PLAIN), tmp_path / "out"

    def fail(*_: object) -> None:
        raise StoreError("cannot write it: the disk is full")

    with monkeypatch.context() as patched, pytest.raises(StoreError):
        patched.setattr(worker.Worker, "compute", fail)
        run_study(study, out)
    status = RunFolder.open(out).status()
    assert (status.state, status.reason) == ("failed", "cannot write it: the disk is full")
    assert status.missing == 8


def test_shards_are_stopped_until_the_last_is_done(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, 8, *PLAIN), tmp_path / "out"
    run_study(study, out, shard=(0, 2))
    assert status(out) == ("stopped", 8, 4, 0, 4)
    run_study(study, out, shard=(1, 2))
    assert status(out) == ("complete", 8, 8, 0, 0)


def test_a_deleted_part_makes_a_run_incomplete(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, 8, *PLAIN), tmp_path / "out"
    run_study(study, out)
    before = fingerprint(out)
    sorted((out / "scores").iterdir(), key=lambda p: p.stat().st_size)[-1].unlink()
    current = RunFolder.open(out).status()
    assert (current.state, current.done, current.units) == ("failed", 2, 3)
    assert "1 of 3 units are missing, though it was complete" in current.reason
    run_study(study, out)
    assert status(out)[0] == "complete" and fingerprint(out) == before


def test_broken_pictures_are_counted_and_sql_shows_it(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, 8, *PLAIN), tmp_path / "out"
    for name in ("cat/000.png", "cat/002.png"):
        (tmp_path / "pictures" / name).write_bytes(b"")
    run_study(study, out)
    assert status(out) == ("complete", 8, 6, 2, 0)
    assert RunFolder.open(out).status().usable == 0.75
    query = "select state, planned, used, broken, missing, usable from status"
    result = CliRunner().invoke(main, ["sql", str(out), query, "--format", "csv"])
    assert result.output.splitlines()[1] == "complete,8,6,2,0,0.75"


def test_a_folder_without_a_plan_claims_nothing(tmp_path: Path) -> None:
    run = RunFolder.resume(tmp_path / "run", Manifest.collect({}))
    status = run.status()
    assert (status.state, status.complete) == ("unknown", False) and "plan.json" in status.reason
