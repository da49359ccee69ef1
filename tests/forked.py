"""Processes of their own for tests, forked from one that has imported torch and heatproof.

A test that is about imports, or about another environment, starts Python with subprocess instead.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

# Forks for each request a process that waits for the one with the code and reports its exit status.
SERVER = """
import json, os, signal, socket, sys
import torch
import heatproof.cli
from heatproof.registry import explainers, metrics
from heatproof.run import engine
explainers.names(), metrics.names()
link = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    data, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
    if not data:
        os._exit(0)
    if os.fork() == 0:
        break
    for file in files:
        os.close(file)
link.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
child, (out, errors, status) = os.fork(), files
if child:
    os.close(out), os.close(errors)
    os.write(status, f"{child}\\n".encode())
    os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
    os._exit(0)
os.dup2(out, 1), os.dup2(errors, 2)
for file in files:
    os.close(file)
request = json.loads(data)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = ["-c", *request["arguments"]]
exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
"""


@cache
def server() -> socket.socket:
    """The connection to a process that forks others; it ends with this one."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


class Forked(subprocess.Popen[str]):
    """Runs code in a forked process; stdout is read as of subprocess.Popen, stderr where requested."""

    def __init__(
        self, code: str, *arguments: object, cwd: Path | None = None, stderr: int = subprocess.STDOUT
    ) -> None:
        (ours, out), (status, result) = os.pipe(), os.pipe()
        apart = os.pipe() if stderr == subprocess.PIPE else None
        request = {
            "code": code, "arguments": [str(argument) for argument in arguments],
            "folder": str(cwd or Path.cwd()), "environment": dict(os.environ),
        }  # fmt: skip
        files = [out, apart[1] if apart else out, result]
        socket.send_fds(server(), [json.dumps(request).encode()], files)
        for file in {*files}:
            os.close(file)
        self.args = code
        self.stdin = None
        self.stdout = os.fdopen(ours)
        self.stderr = os.fdopen(apart[0]) if apart else None
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            with self._status:
                self.returncode = int(self._status.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[str, str]:
        texts = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            with getattr(self, name) as stream:
                texts[name] = "" if stream.closed else stream.read()

        readers = [
            threading.Thread(target=read, args=[name], daemon=True)
            for name in texts
            if (stream := getattr(self, name)) is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts["stdout"], texts["stderr"]

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        """Only this: the process is not a child of the one that started it."""
        self._status.close()
