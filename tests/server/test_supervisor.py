"""Clients that come at once: a worker starts for each, several together, and none is left over."""

import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.server.harness import ServerProcess, Session, SideRefusedError, eventually, inline, select
from topkd.server._supervisor import WorkerProcess
from topkd.server.errors import WorkerLostError
from topkd.v1 import control_pb2, side_pb2

ATTACH = side_pb2.SideRequest(attach=control_pb2.AttachRequest(client_name="one of several")).SerializeToString()


SECOND_FAILS = """
from topkd.server._supervisor import Supervisor
command, asked = Supervisor._command, []
def of_no_gpu(*arguments):
    asked.append(arguments)
    options = command(*arguments)
    return options if len(asked) == 1 else [each.replace("=cpu", "=GPU-none") for each in options]
Supervisor._command = of_no_gpu
"""


def _attach(server: ServerProcess) -> socket.socket:
    """Asks for a session without waiting for it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(server.attach_path)
    sock.send(ATTACH)
    return sock


def _workers(server: ServerProcess) -> dict[str, float]:
    states = ("starting", "spare", "busy", "ending")
    page = server.metrics()
    return {state: page[f'topkd_workers{{state="{state}"}}'] for state in states}


def _kind(packet: bytes) -> str | None:
    return side_pb2.SideReply.FromString(packet).WhichOneof("reply")


def test_workers_start_together_for_clients_that_wait(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s", log_level="debug", max_sessions=3).wait_serving()
    before = len(server.lines)
    sockets = [_attach(server) for _ in range(3)]
    assert [_kind(sock.recv(65536)) for sock in sockets] == ["session"] * 3
    events = [line["event"] for line in server.lines[before:]]
    assert [event for event in events if event in ("worker_started", "worker_ready")][:2] == ["worker_started"] * 2
    assert _workers(server)["busy"] == 3
    for sock in sockets:
        sock.close()
    eventually(lambda: _workers(server) == {"starting": 0, "spare": 1, "busy": 0, "ending": 0}, 60)
    assert server.stop() == 0


def test_a_client_hears_why_no_worker_can_start(short_dir: Path) -> None:
    """As on a GPU that takes no more contexts: what serves goes on."""
    server = ServerProcess(short_dir / "s", SECOND_FAILS, attach_timeout_s=2).wait_serving()
    with Session(server) as served:
        server.wait_event("worker_ended", 90)
        with pytest.raises(SideRefusedError, match=r"no worker became ready in time: .*GPU-none.* shows no such"):
            Session(server)
        assert len(served.select(select(input=inline(np.ones((1, 8), np.float32)), k=1)).results) == 1
    assert server.stop() == 0


def test_workers_of_clients_that_went_away_are_ended(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s").wait_serving()
    sockets = [_attach(server) for _ in range(4)]
    eventually(lambda: _workers(server)["starting"] >= 2)
    for sock in sockets[1:]:
        sock.close()
    eventually(lambda: _workers(server) == {"starting": 0, "spare": 1, "busy": 1, "ending": 0}, 60)
    assert _kind(sockets[0].recv(65536)) == "session"
    sockets[0].close()
    assert server.stop() == 0


def test_a_worker_is_started_once_the_machine_lets_it(short_dir: Path) -> None:
    """The front is out of descriptors when its spare dies; nothing but time comes to its help."""
    server = ServerProcess(short_dir / "s", log_level="debug").wait_serving()
    (spare,) = server.children()
    _, hard = resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (8, hard))
    os.kill(spare, signal.SIGKILL)
    told = server.wait_event("worker_start_failed", failures=2)
    assert "Too many open files" in told["error"]
    assert not server.children()
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (hard, hard))
    eventually(server.children, 20)
    sock = _attach(server)
    assert _kind(sock.recv(65536)) == "session"
    sock.close()
    assert server.stop() == 0


def test_a_worker_that_has_ended_is_killed_no_more() -> None:
    """The number of its descriptor may be that of another process's by then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other = subprocess.Popen(["sleep", "60"])
    try:
        worker = WorkerProcess(other, ours, "/none", shared=False)
        worker.state = "dead"
        ours.close()
        theirs.close()
        with pytest.raises(WorkerLostError):
            worker.tell({"t": "close"})
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        os.close(worker.pidfd)
    finally:
        other.kill()
        other.wait()
