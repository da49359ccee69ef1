"""First calls from several threads, and calls in a forked child: each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

THREADS = """
import threading
import torch
import heatproof as hp
from heatproof.registry import explainers, metrics
barrier, errors = threading.Barrier(16), []
def call(number):
    barrier.wait()
    try:
        if number % 3 == 0:
            metrics.get("insertion")
        elif number % 3 == 1:
            explainers.get("gradient")
        else:
            hp.explain(torch.nn.Conv2d(3, 2, 3), torch.rand(1, 3, 8, 8), "gradient")
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=call, args=(n,)) for n in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(errors)
"""
FORK = """
import os, sys
import torch
import heatproof as hp
from heatproof.explain.api import begin_ahead
torch.set_num_threads(1)  # after a pass with several threads, torch itself hangs in a forked child
net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
images, method = torch.rand(12, 3, 64, 64), sys.argv[1]
first = hp.explain(net, images[:2], method)
if method != "random":  # the threads of the parent are at work while it forks
    begin_ahead([method], hp.load_model(net), images)
child = os.fork()
second = hp.explain(net, images, method)
if child == 0:
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def finished(code: str, *arguments: str) -> str:
    """What a fresh process prints; one that hangs is killed with its children."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=100)[0].strip()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            pytest.fail("it hangs")


def test_first_calls_from_many_threads_know_every_method() -> None:
    assert finished(THREADS) == "[]"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.parametrize("method", ["random", "lime(samples=4, segment_count=6)"])
def test_a_forked_child_explains_as_its_parent_did(method: str) -> None:
    assert finished(FORK, method) == "0"
