"""Two real processes that train together: what a monitor decides, it decides in both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).parent / "distributed_training.py"
SECONDS = 300  # a machine that is busy with other tests is slow to start two processes
Both = tuple[dict[str, Any], dict[str, Any]]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """What both processes wrote; two do everything, as each takes seconds to import what it needs."""
    out = tmp_path_factory.mktemp("distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, str(WORKER), str(out)]
    process = subprocess.Popen(
        command, env={**os.environ, **shared}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        reported = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert process.returncode == 0, reported
    first, second = (json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1))
    return first, second


@pytest.fixture(scope="module")
def plain(both: Both) -> Both:
    return both[0]["plain"], both[1]["plain"]


def test_both_stop_after_the_same_epoch_with_the_same_words(plain: Any) -> None:
    first, second = (result["stop"] for result in plain)
    assert first["epochs"] == second["epochs"] == 1 and first["here"] == second["here"] == 2
    assert first["ended"] == second["ended"]
    assert first["ended"].startswith("AlarmRaised: stopped after epoch 2: attribution collapse (critical)")


def test_a_warning_is_logged_once_and_known_to_both(plain: Any) -> None:
    first, second = (result["warn"] for result in plain)
    assert first["reports"] == second["reports"] == [[0, ""], [1, ""], [0, ""]]
    assert (first["ended"], second["ended"], first["known"], second["known"]) == ("", "", 3, 3)
    assert len(first["said"]) == 1 and "attribution collapse" in first["said"][0] and second["said"] == []
    assert plain[0]["seen"] == plain[1]["seen"] == [2]  # on_alarm is called in both


def test_epochs_that_are_not_due_are_so_in_both(plain: Any) -> None:
    first, second = (result["every"] for result in plain)
    assert first["reports"] == second["reports"] == [[0, ""], [1, ""], None]


@pytest.mark.parametrize("where", ["first", "second"])
def test_an_error_in_one_process_stops_both(plain: Any, where: str) -> None:
    result = [item[f"raise in the {where}"] for item in plain]
    own, other = result if where == "first" else result[::-1]
    assert own["ended"] == "RuntimeError: enough"
    assert other["ended"] == "HeatproofError: in another process: enough"
    assert own["epochs"] == other["epochs"] == 1 and own["here"] == other["here"] == 2


def test_what_cannot_be_measured_lets_both_go_on(plain: Any) -> None:
    first, second = (result["cannot be measured"] for result in plain)
    assert first["reports"] == second["reports"] and all(
        "nowhere" in problem for _, problem in first["reports"]
    )
    assert first["epochs"] == second["epochs"] == 3


def test_a_check_that_fails_in_one_process_fails_in_both(plain: Any) -> None:
    first, second = (result["check"] for result in plain)
    assert "out of memory, as it were" in first["ended"] and "in another process" in first["ended"]
    assert "out of memory, as it were" in second["ended"] and "in another" not in second["ended"]


@pytest.mark.parametrize(("library", "package"), [("lightning", "lightning"), ("huggingface", "accelerate")])
def test_callbacks_stop_both(both: Both, library: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    first, second = (result[library] for result in both)
    assert first == second == {"stop": 2, "warn": 3}
