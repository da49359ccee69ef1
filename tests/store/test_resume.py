"""Runs that are killed, interrupted, refused or run out of room, and what is left of them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from forked import Forked
from heatproof.errors import StoreError
from heatproof.run import engine
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from tiny_study import fingerprint, make_study, start

# Forks: each child goes on with the run until it is killed.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import duckdb
from heatproof.run import engine, worker

study, out, log = map(Path, sys.argv[1:])
compute, group = worker.Worker.compute, worker.Worker.group

def slow_compute(self, unit, loaded):
    with log.open("a") as file:
        file.write(f"\\n{attempt} {unit.hash}")
    time.sleep(0.05)  # so that ten kills find a run that is not over
    return compute(self, unit, loaded)

def slow_group(self, unit):
    with log.open("a") as file:
        file.write(f"\\n{attempt} {unit.hash}")
    return group(self, unit)

worker.Worker.compute, worker.Worker.group = slow_compute, slow_group
kills, done_before = 0, []
rng = random.Random()
for attempt in range(11):
    done_before.append(sorted(p.stem for p in (out / "seals").glob("*.json")))  # the last of a unit
    child = os.fork()
    if child == 0:
        engine.run_study(study, out)
        os._exit(0)
    if attempt < 10:
        if attempt % 3:  # kill at work, in one of the next units; otherwise anywhere, the start included
            wanted = rng.randint(2, 6)  # from the fourth on, a unit is sealed
            while not log.exists() or log.read_text().count(f"\\n{attempt} ") < wanted:
                time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1 if attempt % 3 else 0.4))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kills += os.WIFSIGNALED(status)
print(json.dumps({"kills": kills, "status": status, "done_before": done_before}))
"""


def test_ten_kills_then_the_same_rows_and_no_unit_twice(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=100, metrics=["cscore", "auc", "insertion(steps=2)"])
    log = tmp_path / "log"
    process = Forked(KILLER, study, tmp_path / "killed", log)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    report = json.loads(output.splitlines()[-1])
    assert report["kills"] == 10 and report["status"] == 0
    started = [line.split() for line in log.read_text().split("\n") if line]
    for attempt, done in enumerate(report["done_before"]):
        again = {unit for number, unit in started if int(number) == attempt} & set(done)
        assert not again, f"attempt {attempt} computed finished units"
    assert any(report["done_before"]) and len({number for number, _ in started}) > 2  # some got somewhere
    run_study(study, tmp_path / "whole")
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.tmp"))


SLOW = """
import time
from heatproof.run import engine, worker
compute = worker.Worker.compute
def slow(self, unit, loaded):
    time.sleep(0.3)
    return compute(self, unit, loaded)
worker.Worker.compute = slow
"""


def test_ctrl_c_leaves_a_run_that_resumes_and_a_second_process_is_refused(tmp_path: Path) -> None:
    study, out = make_study(tmp_path), tmp_path / "out"
    process = start(study, out, script=SLOW)
    wait_for(lambda: bool(list((out / "scores").glob("*.parquet"))), process)
    with pytest.raises(StoreError, match="is being written by process"):
        run_study(study, out)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"to resume: heatproof run {study} --out {out}" in output and "Traceback" not in output
    finished = RunFolder.open(out).done()
    assert 0 < len(finished) < 14
    assert run_study(study, out).done == 14
    run_study(study, tmp_path / "whole")
    assert fingerprint(out) == fingerprint(tmp_path / "whole")


def wait_for(condition: object, process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.02)


def test_two_shards_may_run_at_once(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, metrics=["cscore", "auc"]), tmp_path / "out"
    other = start(study, out, "--shard", "1/2")
    run_study(study, out, shard=(0, 2))
    output, _ = other.communicate(timeout=60)
    assert other.returncode == 0, output
    run_study(study, tmp_path / "whole")
    assert fingerprint(out) == fingerprint(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_raises_a_clear_error(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=4, metrics=[])
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot write"):
        run_study(study, tmp_path / "taken" / "out")


def test_a_disk_that_fills_up_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, out = make_study(tmp_path), tmp_path / "out"
    write, written = RunFolder.write_unit, []

    def full(self: RunFolder, unit: engine.Any, *rest: engine.Any, **more: engine.Any) -> None:
        if len(written) == 3:
            raise StoreError(f"cannot write {self.path}: the disk is full; free some space and start again")
        write(self, unit, *rest, **more)
        written.append(unit.hash)

    with monkeypatch.context() as patched, pytest.raises(StoreError, match="the disk is full"):
        patched.setattr(RunFolder, "write_unit", full)
        run_study(study, out)
    assert RunFolder.open(out).done() == set(written)
    assert run_study(study, out).done == 14  # and nobody holds the lock


def test_a_read_only_disk_raises_a_clear_error(tmp_path: Path) -> None:
    study, disk = make_study(tmp_path, images=4, metrics=[]), tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a read-only disk can only be made by root, who may mount one")
    try:
        with pytest.raises(StoreError, match="is not writable"):
            run_study(study, disk / "out")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
