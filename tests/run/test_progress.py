"""What a user sees while something is computed: one display, signs of life, and an answer to Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from rich.live import Live

from forked import Forked
from heatproof.cli import _console, main
from heatproof.run import engine, progress
from heatproof.run.engine import prepare
from heatproof.run.progress import Progress
from heatproof.run.worker import fastest_threads, fixed_threads, usual_threads
from tiny_study import make_study, start

CSCORE = """
import sys, time
from heatproof.train import loop
epoch = loop._epoch
def slow(*given):
    time.sleep(0.5)
    return epoch(*given)
loop._epoch = slow
"""
EXACT = "insertion(steps=50, adaptive=false)"
LOCALISE = """
import time
from heatproof.studies.localise import protocol
def sift(*given):
    print("sifting", flush=True)
    time.sleep(60)
protocol.sift = sift
"""
NETWORK = """
from heatproof.train import small_net
def build(num_classes=2):
    return small_net(num_classes, size=32, width=4)
"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """The command line's console as if it were a terminal; what it shows goes nowhere."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(_console, "console", console)
    return console


def test_bars_inside_each_other_share_one_display(terminal: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich 13 refuses to open a second live display while one is open."""
    opened: list[Live] = []
    begin, end = Live.start, Live.stop

    def started(self: Live, *given: Any, **more: Any) -> None:
        assert not opened, "a live display is open already"
        opened.append(self)
        begin(self, *given, **more)

    def ended(self: Live) -> None:
        if self in opened:
            opened.remove(self)
        end(self)

    monkeypatch.setattr(Live, "start", started)
    monkeypatch.setattr(Live, "stop", ended)
    with _console.steps("training", 3) as bar:
        bar.done(None)
        for _ in range(2):  # a study runs the engine several times
            inside = Progress(terminal)
            inside.start(4, 2, 0)
            inside.inputs(9)
            inside.advance(4, 2)
            inside.finish()
        assert len(opened) == 1
        bar.done(None)
    assert not opened
    assert "training" in terminal.file.getvalue() and "images" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_a_long_unit_prints_progress_in_a_pipe(tmp_path: Path) -> None:
    """Lines come while the first unit is computed, with the inputs passed so far."""
    study = make_study(tmp_path, methods=["rise(masks=400)"], metrics=[], checkpoints="epochs/epoch01.pt")
    soon = (
        "from heatproof.run import progress\nprogress.SECONDS_TO_FIRST_LINE = 0.1\n"
        "progress.SECONDS_BETWEEN_LINES = 0.1\nimport time\nfrom heatproof.models.model import Queue\n"
        "each = Queue.each\ndef slow(self, count, work, done, *more):\n"
        "    each(self, count, lambda a, b: (time.sleep(0.0005 * (b - a)), work(a, b))[1], done, *more)\n"
        "Queue.each = slow\n"
    )
    process = start(study, tmp_path / "out", script=soon)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    lines = [line for line in output.splitlines() if "/18 images, 0/5 units, " in line and "inputs" in line]
    images = [float(line.partition("/")[0]) for line in lines]
    assert len(images) > 1 and images == sorted(images) and 0 < images[0] < images[-1] <= 4
    assert all(line.endswith(" left") for line in lines)
    assert f"next: heatproof report {tmp_path / 'out'}" in output


def test_images_in_hand_count_by_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    shown = Progress(quiet=True)
    shown.start(8, 4, 0)
    assert shown.so_far == 0 and shown.line().endswith("time left unknown")
    shown.begin(2, 100)
    shown.inputs(50)
    now = 7.0
    assert shown.so_far == 1 and shown.line() == "1/8 images, 0/4 units, 50 inputs, 7 s, 49 s left"
    shown.inputs(350)
    assert 1.9 < shown.so_far < 2  # more inputs than expected
    shown.advance(2, 1)
    assert shown.so_far == 2
    shown.begin(4, 200)  # which will take four times as many, too
    shown.inputs(400)
    assert shown.so_far == 4 and shown.line().startswith("4/8 images, 1/4 units, 800 inputs")
    shown.inputs(10_000)
    assert 5.9 < shown.so_far < 6
    shown.start(2000, 4, 0)
    shown.advance(1234, 1)
    assert shown.line().startswith("1234/2000 images")


def test_the_expected_inputs_of_a_unit_are_close_to_those_it_takes(tmp_path: Path) -> None:
    metrics = ["specificity(steps=5)", "insertion(steps=4)", "deletion(steps=4)"]
    study = make_study(tmp_path, 4, ["gradcam", "gradient", "rise(masks=50)"], metrics, "epochs/epoch01.pt")
    expected: list[int] = []

    class Noted(Progress):
        def begin(self, images: int, inputs: int) -> None:
            super().begin(images, inputs)
            expected.append(inputs)

    noted = Noted(quiet=True)
    engine.run_study(study, tmp_path / "out", progress=noted)
    assert len(expected) == 1 and 1 <= noted._passed / expected[0] < 2


def test_threads_are_as_many_as_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    now = 0.0
    for seconds, best in (({4: 1, 2: 2, 1: 4}, 4), ({4: 9, 2: 3, 1: 4}, 2), ({4: 40, 2: 4, 1: 4}, 1)):

        def work(seconds: dict[int, int] = seconds) -> None:
            nonlocal now
            now += seconds[torch.get_num_threads()]

        before = torch.get_num_threads()
        assert fastest_threads(work, 4, clock=lambda: now) == best
        assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert fastest_threads(lambda: None, 3) == 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_that_start_in_a_run_use_one_thread_of_torch(count: int) -> None:
    """Else a run that loads and writes in threads has more OpenMP threads than CPUs, and passes are slow."""

    def of_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    with fixed_threads(3):
        with fixed_threads(count):
            assert torch.get_num_threads() == count and of_a_new_thread() == 1
            with ThreadPoolExecutor(1) as pool:  # also after a pass, which initialises threads
                assert (
                    pool.submit(lambda: (torch.randn(99, 99) @ torch.randn(99, 99)).shape[0]).result() == 99
                )
                assert pool.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == count
        assert torch.get_num_threads() == 3
    before = torch.get_num_threads()
    assert of_a_new_thread() == before  # the process of a user is as it was


def test_a_run_in_a_pipe_prints_within_two_seconds() -> None:
    assert progress.SECONDS_TO_FIRST_LINE <= 2


BUSY = """
import hashlib, os, time
from heatproof.run.worker import stop_on_signal
with stop_on_signal(lambda text: os.write(1, f"{time.monotonic()} {text}\\n".encode())) as stop:
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10)
    os.write(1, b"ready\\n")
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 5_000_000)  # one long call, in which no Python code runs
    over = time.monotonic()
    assert stop.is_set()
print(over)
"""


def test_the_first_ctrl_c_is_answered_inside_a_long_call() -> None:
    process = Forked(BUSY)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    answered, over = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0 and "stopping after the current unit" in answered
    # Relative to the length of the call, which depends on the CPU: answered long before the call ends.
    waited, whole = float(answered.split()[0]) - started, float(over) - started
    assert waited < whole / 3


def test_a_second_ctrl_c_stops_at_once() -> None:
    code = (
        "import os, signal, time\nfrom heatproof.run.worker import stop_on_signal\n"
        "with stop_on_signal(print):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    output, errors = Forked(code, stderr=subprocess.PIPE).communicate(timeout=50)
    assert "KeyboardInterrupt" in errors and output.count("stopping") == 1


def test_ctrl_c_in_a_study_leaves_with_130_and_says_how_to_go_on(tmp_path: Path) -> None:
    make_study(tmp_path, 16)
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "list.csv").write_text("path,label,x0,y0,x1,y1\npictures/cat/000.png,0,2,2,20,20\n")
    network = ["--model", "net.py:build", "--out", "out", "--device", "cpu"]
    commands = {
        "epoch 1": (CSCORE, ["study", "cscore", "--images", "pictures", "--first-phase", "all", *network]),
        "sifting": (LOCALISE, ["study", "localise", "--kind", "csv", "--images", "list.csv", *network]),
    }
    for sign, (script, arguments) in commands.items():
        code = f"{script}\nfrom heatproof.cli import main\nmain()"
        process = Forked(code, *arguments, cwd=tmp_path)
        assert process.stdout is not None
        seen = ""
        while sign not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 130, output
        assert f"to resume: heatproof {' '.join(arguments)}" in output and "Traceback" not in output


@pytest.mark.parametrize("command", [["explain", "lite0", "a.png"], ["run", "study.toml"]])
def test_ctrl_c_leaves_every_command_with_130(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(tmp_path, 2)
    monkeypatch.chdir(tmp_path)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heatproof.cli.explain.find_images", interrupted)
    monkeypatch.setattr(engine, "run_study", interrupted)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 130 and result.stderr.startswith("stopped")
    assert ("to resume: heatproof run study.toml" in result.stderr) == (command[0] == "run")


@pytest.mark.parametrize(("setting", "threads"), [("1", 1), ("3", 3), ("3,2", 3)])
def test_threads_follow_omp_num_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    study = make_study(tmp_path, images=2, methods=["gradcam"], metrics=[])
    study.write_text(study.read_text().replace("threads = 1\n", ""))
    assert prepare(study, tmp_path / "out").opened.threads == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert usual_threads() == len(os.sched_getaffinity(0))


SLOW_NETWORK = """

class Slow(nn.Module):
    def forward(self, x):
        import time
        time.sleep(0.004 * len(x))
        with open(__file__ + ".inputs", "a") as file:
            file.write(f"{len(x)}\\n")
        return x

def slow():
    model = tiny()
    model.module.append(Slow())
    return model
"""


def test_a_dry_run_of_a_slow_study_is_estimated_from_a_small_part_of_it(tmp_path: Path) -> None:
    study = make_study(tmp_path, methods=["gradcam", "rise(masks=4000)"], metrics=[EXACT])
    network = tmp_path / "net.py"
    network.write_text(network.read_text() + SLOW_NETWORK)
    study.write_text(study.read_text().replace("net.py:tiny", "net.py:slow"))
    result = CliRunner().invoke(
        main, ["run", str(study), "--out", str(tmp_path / "x"), "--dry-run", "--trust"]
    )
    assert result.exit_code == 0, result.output
    assert "timed 1 image, " in result.output and not (tmp_path / "x").exists()
    # Each image: a shared pass, 4,000 masks, 2 end points, 2 methods x 2 curves x 49; 18 images, twice.
    inputs = 18 * 2 * (1 + 4000 + 2 + 2 * 2 * 49)
    passed = sum(map(int, Path(f"{network}.inputs").read_text().split()))
    assert passed < inputs / 36  # less than one image of one checkpoint
    assert f"about {inputs:,} inputs" in result.output
    line = next(line for line in result.output.splitlines() if "estimated time" in line)
    minutes = int(line.split("about ")[1].split(" min")[0])
    assert 0.7 < minutes / (0.004 * inputs / 60) < 3
