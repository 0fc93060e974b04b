"""Clients of real servers on the CPU, and a server that tests may harm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import topkd
from tests.conftest import Server, StartServer


class Harmed:
    """A server with a queue of one, to be killed and started again on the same directory."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._again: list[subprocess.Popen[bytes]] = []

    @property
    def socket_dir(self) -> Path:
        return self._server.socket_dir

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._again[-1] if self._again else self._server.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def start(self) -> None:
        """Starts it again; clients wait until it serves."""
        with self._server.log.open("ab") as log:
            self._again.append(subprocess.Popen(self._server.process.args, stdout=log, stderr=log, cwd="/"))

    def stop(self) -> None:
        for process in self._again:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[topkd.Client]:
    """A client of the server that most tests share; do not close it."""
    with topkd.Client(server.socket_dir, name="tests") as client:
        yield client


@pytest.fixture(scope="session")
def harmed(start_server: StartServer) -> Iterator[Harmed]:
    """A server that tests may harm, as long as they leave it running."""
    harmed = Harmed(start_server(limit="queue=1"))
    yield harmed
    harmed.stop()


def halt(pid: int) -> None:
    """Stops a process by SIGSTOP, and returns when every thread of it has stopped: the signal alone comes later."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while True:
        states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        if set(states) <= {"T", "t"}:
            return
        assert time.monotonic() < deadline, f"process {pid} does not stop: {states}"
        time.sleep(0.001)
