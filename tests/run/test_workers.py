"""Workers of one run, each in a process of its own: one that stands still holds up nobody."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from tiny_study import fingerprint, make_study, start

# Stands still for good in its first unit.
STANDS_STILL = """
import time
from heatproof.run import worker
worker.Worker.compute = lambda *_: time.sleep(600)
"""


def test_units_do_not_wait_for_those_of_another_worker(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, images=16), tmp_path / "out"
    slow = start(study, out, "--shard", "0/2", script=STANDS_STILL)
    try:
        while not (out / "locks").exists():
            assert slow.poll() is None, slow.communicate()[0]
            time.sleep(0.02)
        run_study(study, out, shard=(1, 2))
        assert slow.poll() is None, "it did not stand still"
        status = RunFolder.open(out).status()
        assert status.done == 4  # its half of the blocks: 2 checkpoints x 2 of 4
    finally:
        slow.send_signal(signal.SIGKILL)
        slow.communicate()
    run_study(study, out)
    run_study(study, tmp_path / "alone")
    assert fingerprint(out) == fingerprint(tmp_path / "alone")
