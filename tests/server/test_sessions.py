"""Sessions: how they begin, what bounds them, and that their ends free everything and disturb nobody."""

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.server.harness import SEALS, ServerProcess, Session, SideRefusedError, eventually, inline, refused, select
from topkd.v1 import side_pb2

SMALL = select(input=inline(np.ones((1, 8), dtype=np.float32)), k=1)


def of_sessions(front: ServerProcess) -> dict[str, float]:
    """Gauges that a session moves."""
    names = ("topkd_sessions{", "topkd_regions", "topkd_region_bytes", "topkd_plans", 'topkd_workers{state="busy"}')
    found = {name: value for name, value in front.metrics().items() if name.startswith(names)}
    found['topkd_workers{state="busy"}'] -= 1  # the shared worker
    return {name: value for name, value in found.items() if value}


def test_attach_gives_words_and_information(front: ServerProcess, session: Session) -> None:
    info = session.info.info
    assert os.fstat(session.words).st_size == 4096
    assert fcntl.fcntl(session.words, fcntl.F_GET_SEALS) & SEALS == SEALS
    assert (info.device.uuid, info.protocol_revision, info.limits.max_queue) == ("CPU", 5, 4)
    assert info.epoch == front.serving["epoch"]
    assert front.serving["device"]["backend"] == "cpu"
    assert [family.name for family in info.kernels]
    assert info.sessions >= 1


def test_modes_of_the_sockets(front: ServerProcess, session: Session) -> None:
    assert stat.S_IMODE(front.socket_dir.stat().st_mode) == 0o750
    sockets = [entry for entry in front.socket_dir.iterdir() if entry.is_socket()]
    assert {"attach.sock", "grpc.sock"} <= {entry.name for entry in sockets}
    for entry in sockets:
        assert stat.S_IMODE(entry.stat().st_mode) == 0o660, entry


def test_side_requests_that_are_wrong(front: ServerProcess, session: Session) -> None:
    for request, field in (
        (side_pb2.SideRequest(attach={}), "attach"),
        (side_pb2.SideRequest(register_memfd=side_pb2.RegisterMemfd(size=1)), "register_memfd"),
    ):
        reply, _ = session.ask(request)
        assert (reply.error.code, reply.error.field) == (3, field)
    for seals, claim, reason in (
        (0, None, "MEMFD_NOT_SEALED"),
        (SEALS, 0, "ARGUMENT_VALUE"),
        (SEALS, 5000, "ARGUMENT_VALUE"),
    ):
        with pytest.raises(SideRefusedError, match=reason):
            session.register(4096, seals, claim)
    session.register(4096)
    session.select(SMALL)


def test_first_request_must_be_attach(front: ServerProcess) -> None:
    for data in (b"\xff\xff", b"\x12\x00", side_pb2.SideRequest().SerializeToString() or b"\x00"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(front.attach_path)
            sock.send(data)
            assert side_pb2.SideReply.FromString(sock.recv(65536)).error.code == 3
            assert sock.recv(10) == b""


def test_another_device_is_refused(front: ServerProcess) -> None:
    with pytest.raises(SideRefusedError, match="DEVICE_MISMATCH"):
        Session(front, device_uuid="GPU-elsewhere")
    Session(front, device_uuid="CPU").close()


def test_regions_are_bounded(front: ServerProcess) -> None:
    with Session(front) as session:
        with pytest.raises(SideRefusedError, match="max_region_bytes"):
            session.register((1 << 24) + 4096)
        for _ in range(2):
            session.register(1 << 24)
        with pytest.raises(SideRefusedError, match="REGION_LIMIT"):
            session.register(1)
    with Session(front) as session:
        for _ in range(5):
            session.register(1)
        with pytest.raises(SideRefusedError, match="REGION_LIMIT"):
            session.register(1)


def test_sessions_are_bounded(front: ServerProcess, session: Session) -> None:
    eventually(lambda: of_sessions(front).get('topkd_sessions{transport="unix"}') == 1)
    before = of_sessions(front)
    sessions = [Session(front) for _ in range(5)]
    try:
        with pytest.raises(SideRefusedError) as caught:
            Session(front)
        assert (caught.value.error.code, caught.value.error.reason) == (8, "SESSION_LIMIT")
        assert caught.value.error.retry_after_ms > 0
        assert len({each.info.data_address for each in (session, *sessions)}) == 6
    finally:
        for each in sessions:
            each.close()
    eventually(lambda: of_sessions(front) == before)
    Session(front).close()


_CLIENT = """
import sys, time, pathlib
from tests.server.harness import *
class Server: attach_path = sys.argv[1]
session = Session(Server)
session.register(1 << 20)
print(session.info.session_id, flush=True)
scores = inline(np.ones((1000, 200), dtype=np.float32))
while True:
    session.select(select(input=scores, k=50))
"""


def test_killed_client_leaves_nothing(front: ServerProcess, session: Session) -> None:
    eventually(lambda: of_sessions(front).get('topkd_sessions{transport="unix"}') == 1)
    before = of_sessions(front)
    root = Path(__file__).resolve().parents[2]
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, front.attach_path], stdout=subprocess.PIPE, cwd=root, env={**os.environ}
    )
    assert client.stdout is not None
    with client.stdout:
        assert client.stdout.readline()
    eventually(lambda: of_sessions(front).get('topkd_region_bytes{memory="memfd"}') == 1 << 20)
    client.kill()
    client.wait()
    assert eventually(lambda: of_sessions(front) == before, 2.0) < 2.0
    session.select(SMALL)
    eventually(lambda: len(front.children()) == 5, 60)  # the shared one, three spares, and the session's


def test_killed_worker_ends_its_session_at_once(front: ServerProcess, session: Session) -> None:
    with Session(front) as doomed:
        path = doomed.info.data_address.removeprefix("unix:")
        worker = next(
            pid for pid in front.children() if path in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        )
        doomed.select(SMALL)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        doomed.sock.settimeout(5)
        assert doomed.sock.recv(10) == b""
        assert time.monotonic() - started < 1.0
        with refused(grpc.StatusCode.UNAVAILABLE):
            doomed.select(SMALL)
    session.select(SMALL)
    ended = front.wait_event("session_ended", 5, session=doomed.info.session_id)
    assert ended["cause"] == "worker_lost"
    assert not Path(path).exists()
    Session(front).close()


def test_closed_session_frees_its_memory(front: ServerProcess) -> None:
    with Session(front) as session:
        worker = next(line["worker"] for line in front.lines if line.get("session") == session.info.session_id)
        session.register(1 << 20)
        assert "memfd:test" in Path(f"/proc/{worker}/maps").read_text()
        path = session.info.data_address.removeprefix("unix:")
    eventually(lambda: not Path(f"/proc/{worker}").exists(), 2)
    assert not Path(path).exists()
