"""The pytest plugin, in real runs of pytest: it is there by itself, answers, and disturbs nobody."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from judged_run import make_judged

from heatproof.store import RunFolder

MAPS = """
def test_maps(heatproof_run):
    assert heatproof_run.verdict.follows("gradcam")
"""
NUMBERS = """
def test_numbers(heatproof_run):
    assert heatproof_run.holds("insertion.gradcam >= 0.4")
"""  # which need no torch
# What else is installed here, whose asserts pytest would rewrite each time.
WITHOUT = [f"-pno:{name}" for name in ("cacheprovider", "anyio", "hypothesispytest", "xdist")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judged(tmp_path_factory.mktemp("plugin") / "run").path


def run_pytest(folder: Path, code: str, *options: object, **files: str) -> tuple[int, str]:
    """pytest in a folder with this test and these files: its exit code, and what it printed."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "test_it.py").write_text(code)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLUMNS"))}
    command = [sys.executable, "-m", "pytest", *WITHOUT, "-ra", *map(str, options)]
    done = subprocess.run(
        command, cwd=folder, env=clean | {"COLUMNS": "200"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_the_assertion_of_the_readme_holds(run: Path, tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, MAPS, "--heatproof-run", run)
    assert code == 0 and "1 passed" in output and f"heatproof run: {run}" in output


def test_what_does_not_hold_says_why(run: Path, tmp_path: Path) -> None:
    several = """
def test_follows(heatproof_run):
    assert heatproof_run.verdict.follows("layercam")

def test_looks(heatproof_run):
    assert heatproof_run.verdict.looks_there("Pneumonia")

def test_network(heatproof_run):
    assert heatproof_run.verdict.looks_there()

def test_rule(heatproof_run):
    assert heatproof_run.holds("insertion >= 0.4", "insertion.gradcam >= 0.9", "no-alarms")

def test_typo(heatproof_run):
    assert heatproof_run.verdict.follows("gradcan")

def test_fine(heatproof_run):
    assert heatproof_run.holds("insertion >= 0.4", "follows lime")
    assert heatproof_run.verdict.looks_there("normal") and heatproof_run.verdict.follows("Grad-CAM")
    assert len(heatproof_run.run.scores()) > 1000
"""
    code, output = run_pytest(tmp_path, several, "--heatproof-run", run)
    assert code == 1 and "5 failed, 1 passed" in output
    for pattern in (
        r"assert layercam does not follow the network \(no better than its control maps; .*n = 100\)",
        r"assert pneumonia: uses something else; .*n = 50\)",
        r"assert the network uses something else \(The network uses something other than the object for pneu",
        r"assert insertion.gradcam >= 0.9: does not hold, 0\.\d+ \(n = 100\) gradcam / epoch02",
        r"unknown method in this verdict: 'gradcan'; did you mean 'gradcam'",
    ):
        assert re.search(pattern, output), f"{pattern}\n{output}"


def test_without_a_run_such_tests_are_skipped_and_it_is_reported_how_to_name_one(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, MAPS + "\ndef test_other(): pass\n")
    assert code == 0 and "1 passed, 1 skipped" in output and "heatproof run" not in output
    assert (
        "no run is named; give pytest --heatproof-run FOLDER, or set heatproof_run in its settings" in output
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest__ini", "[pytest]\nheatproof_run = audited\n"),
        ("pyproject__toml", '[tool.pytest.ini_options]\nheatproof_run = "audited"\n'),
    ],
)
def test_settings_name_a_run_beside_them(run: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "audited").symlink_to(run)
    (tmp_path / name.replace("__", ".")).write_text(text)
    code, output = run_pytest(tmp_path / "tests", NUMBERS)
    assert code == 0 and "1 passed" in output, output
    code, output = run_pytest(
        tmp_path / "tests", MAPS, "--heatproof-run", "elsewhere"
    )  # the option comes first
    assert code == 1 and f"{tmp_path / 'tests' / 'elsewhere'} cannot be opened" in output


def test_a_folder_without_a_run_and_half_a_run_are_errors(run: Path, tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, MAPS, "--heatproof-run", tmp_path)
    assert code == 1 and "1 error" in output and f"{tmp_path} cannot be opened: " in output
    assert "Traceback" not in output and "def heatproof_run" not in output
    manifest = RunFolder.open(run).manifest
    half = RunFolder.resume(tmp_path / "half", manifest)
    code, output = run_pytest(tmp_path, MAPS, "--heatproof-run", half.path)
    assert code == 1 and f"{half.path} cannot be judged: complete run" in output, output


def test_other_peoples_tests_are_left_alone(tmp_path: Path) -> None:
    """No torch, no room, no fixture that acts by itself, and the plugin can be turned off."""
    other = """
import sys

def test_alone(request):
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    assert not [name for name in sys.modules if name.startswith(("heatproof.store", "heatproof.verdict"))]
    assert "heatproof_run" not in request.fixturenames
"""
    code, output = run_pytest(tmp_path, other, "-W", "error")
    assert code == 0 and "1 passed" in output, output
    code, output = run_pytest(tmp_path, MAPS, "-p", "no:heatproof")
    assert code == 1 and "fixture 'heatproof_run' not found" in output
