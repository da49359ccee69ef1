"""The fault matrix: whatever happens to a run, no row is wrong and nothing passes in silence.

Flips, cuts and deletions are in test_store_verify.py, mix-ups in test_provenance.py, kills in test_resume.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_resume import SLOW, wait_for

from forked import Forked
from heatproof.cli import main
from heatproof.errors import StoreError
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.store import ledger as lease
from tiny_study import NETWORK, fingerprint, make_study, start

PLAIN = ["gradcam", "gradient"], ["accuracy"], "epochs/epoch01.pt"
# A writer that waits with a file half written; it prints its temporary file.
HALF = """
import sys, time
from pathlib import Path
from heatproof.store import RunFolder, folder
from heatproof.types import Unit
def half(path, scores, unit):
    path.write_bytes(b"half of it")
    print(path, flush=True)
    time.sleep(float(sys.argv[2]))
folder.write_part = half
run = RunFolder.open(sys.argv[1])
with run.lock("0/2"):
    run.write_unit(Unit("epoch01", (0, 4), (), ()))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study and its finished run."""
    folder = tmp_path_factory.mktemp("whole")
    run_study(make_study(folder, 12, *PLAIN), folder / "out")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """The same study and run, to be harmed."""
    shutil.copytree(whole, tmp_path / "study")
    return tmp_path / "study"


def half_writer(out: Path, seconds: float, *command: str) -> tuple[subprocess.Popen[str], Path]:
    if command:
        started = [*command, sys.executable, "-c", HALF, str(out), str(seconds)]
        process = subprocess.Popen(started, stdout=subprocess.PIPE, text=True)
    else:
        process = Forked(HALF, out, seconds)
    assert process.stdout is not None
    with process.stdout as stream:
        return process, Path(stream.readline().strip())


def other_namespace() -> list[str]:
    """A command prefix that gives a process numbers of its own, as a container does."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace can only be made by root, with unshare")
    return prefix


@pytest.mark.parametrize(("where", "hours"), [("here", -2), ("here", 2), ("another PID namespace", -2)])
def test_a_live_writer_is_never_touched_and_a_dead_one_is_cleaned_up(
    folder: Path, where: str, hours: int
) -> None:
    out = folder / "out"
    prefix = [] if where == "here" else other_namespace()
    process, temporary = half_writer(out, 60, *prefix)
    try:
        there = time.time() + 3600 * hours  # as if its clock were wrong
        for path in (temporary, *(out / "locks").iterdir()):
            os.utime(path, (there, there))
        with RunFolder.open(out).lock("1/2"):  # the other shard starts, and cleans up
            assert temporary.read_bytes() == b"half of it"
        for shard in ("0/2", "0/1", "1/3"):
            with (
                pytest.raises(StoreError, match=r"is being written by process \d+ on"),
                RunFolder.open(out).lock(shard),
            ):
                pass
        assert "at work" in RunFolder.open(out).status().sentence or RunFolder.open(out).status().complete
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: lease.claims(out) == [])
    with RunFolder.open(out).lock():
        assert not temporary.exists() and not list(out.rglob("*.tmp"))


def wait_until(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_machine_without_heartbeat_is_given_up_and_a_live_machine_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "out"
    monkeypatch.setattr(lease, "PATIENCE", 1.5)
    monkeypatch.setattr(lease, "BEAT", 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(lease, "kernel", lambda: "another machine")
        own = lease.Lease(out)
        own.hold(["0/1"])
    monkeypatch.setattr(lease, "_flock", lambda *_, **__: None)  # locks that do not reach across machines
    with pytest.raises(StoreError, match="is being written by"), RunFolder.open(out).lock():
        pass
    own._stop.set()  # its machine stops
    with RunFolder.open(out).lock():
        assert RunFolder.open(out).status().complete
    own.close()


@pytest.mark.parametrize("shards", [("0/2", "0/3"), ("1/2", "0/1")])
def test_shards_that_overlap_are_refused_while_both_would_run(
    tmp_path: Path, shards: tuple[str, str]
) -> None:
    study, out = make_study(tmp_path, 20, *PLAIN), tmp_path / "out"
    process = start(study, out, "--shard", shards[0], script=SLOW.replace("0.3", "3"))
    try:
        wait_for(lambda: list((out / "seals").glob("*.json")), process)
        result = CliRunner().invoke(main, ["run", str(study), "--out", str(out), "--shard", shards[1]])
        assert result.exit_code == 2 and "shards of one run all have the same count" in " ".join(
            result.output.split()
        )
    finally:
        process.kill()
        process.communicate()
    run_study(study, out)  # but one after the other they may
    assert RunFolder.open(out).status().complete


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("a small disk can only be made by root, who may mount one")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_a_sentence_and_the_run_goes_on_when_there_is_room(
    whole: Path, small_disk: Path
) -> None:
    out = small_disk / "out"
    result = CliRunner().invoke(main, ["run", str(whole / "study.toml"), "--out", str(out)])
    assert result.exit_code == 2 and "the disk is full; free some space" in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not RunFolder.open(out).status().complete
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    run_study(whole / "study.toml", out)
    assert fingerprint(out) == fingerprint(whole / "out")
    assert CliRunner().invoke(main, ["verify", str(out)]).exit_code == 0


def test_memory_that_runs_out_is_a_sentence(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, 8, *PLAIN), tmp_path / "out"
    greedy = "\nclass Greedy(nn.Identity):\n    def forward(self, x):\n"
    greedy += "        import os\n"  # the passes of the run, not those of its checks
    greedy += f"        begun = os.path.exists({str(out / 'run.json')!r})\n"
    greedy += "        return x + torch.empty(1 << 50).sum() if begun else x\n"
    (tmp_path / "net.py").write_text(NETWORK.replace("\ndef tiny", greedy + "\ndef tiny").replace(
        "nn.Conv2d(3, 6, 3, 2), nn.ReLU()", "nn.Conv2d(3, 6, 3, 2), nn.Sequential(nn.ReLU(), Greedy())"
    ))  # fmt: skip
    result = CliRunner().invoke(main, ["run", str(study), "--out", str(out)])
    assert result.exit_code == 2 and "not enough memory for a batch of 4 images" in " ".join(
        result.output.split()
    )
    status = RunFolder.open(out).status()
    assert status.state == "failed" and "not enough memory" in status.reason and status.used == 0


def test_a_crash_has_a_code_of_its_own(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(RunFolder, "status", crash)
    result = CliRunner().invoke(main, ["verify", str(whole / "out")])
    assert (
        result.exit_code == 3 and "ZeroDivisionError" in result.output and "please report it" in result.output
    )


def test_clocks_that_are_ahead_change_nothing(folder: Path) -> None:
    out, ahead = folder / "out", time.time() + 7200
    sorted((out / "scores").iterdir())[0].unlink()
    for path in [*out.rglob("*"), *(folder / "pictures").rglob("*")]:
        os.utime(path, (ahead, ahead))
    result = run_study(folder / "study.toml", out)
    assert result.done == result.units
    assert CliRunner().invoke(main, ["verify", str(out)]).exit_code == 0


def test_killed_anywhere_the_folder_verifies_or_says_what_is_left(folder: Path) -> None:
    study, out = folder / "study.toml", folder / "killed"
    for units in (1, 2):
        process = start(study, out, script=SLOW)
        wait_for(lambda n=units: len(list((out / "seals").glob("*.json"))) >= n, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        result = CliRunner().invoke(main, ["verify", str(out)])
        assert result.exit_code == 0 and "failed (its process was killed" in result.output, result.output
    run_study(study, out)
    assert fingerprint(out) == fingerprint(folder / "out")
