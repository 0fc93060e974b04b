"""The side socket's client end against a peer that the test plays."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from topkd._side import SideConnection
from topkd.errors import ProtocolError, ResourceExhaustedError, SessionLostError, UnavailableError
from topkd.v1 import control_pb2, side_pb2

ATTACH = side_pb2.SideRequest(attach=control_pb2.AttachRequest(client_name="x"))
Peer = Callable[[Callable[[socket.socket], None]], SideConnection]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    path = tmp_path / "side"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    ends: list[SideConnection] = []
    threads: list[threading.Thread] = []

    def play(serve: Callable[[socket.socket], None]) -> SideConnection:
        def run() -> None:
            with listener.accept()[0] as connection:
                serve(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        ends.append(SideConnection(path, 5))
        return ends[-1]

    yield play
    for end in ends:
        end.hang_up()
        end.close()
    for thread in threads:
        thread.join(5)
    listener.close()


def test_descriptors_go_both_ways_and_close_on_exec(peer: Peer) -> None:
    def serve(connection: socket.socket) -> None:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        assert side_pb2.SideRequest.FromString(data) == ATTACH
        reply = side_pb2.SideReply(session=control_pb2.Session(session_id="s"))
        socket.send_fds(connection, [reply.SerializeToString()], fds)
        os.close(fds[0])
        connection.recv(1)

    end = peer(serve)
    reading, writing = os.pipe()
    reply, received = end.request(ATTACH, [writing])
    assert reply.session.session_id == "s"
    assert len(received) == 1
    assert fcntl.fcntl(received[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.write(received[0], b"here")
    assert os.read(reading, 10) == b"here"
    for fd in (reading, writing, *received):
        os.close(fd)


def test_a_refusal_is_raised_and_its_descriptors_closed(peer: Peer) -> None:
    reading, writing = os.pipe()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        error = side_pb2.SideError(code=8, reason="SESSION_LIMIT", message="full")
        socket.send_fds(connection, [side_pb2.SideReply(error=error).SerializeToString()], [writing])
        os.close(writing)
        connection.recv(1)

    with pytest.raises(ResourceExhaustedError, match="full"):
        peer(serve).request(ATTACH)
    assert os.read(reading, 1) == b"", "nobody holds the other end"
    os.close(reading)


@pytest.mark.parametrize("answer", [b"\xff\xff\xff", b"x" * 70000])
def test_nonsense_is_a_protocol_error(peer: Peer, answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.send(answer)
        connection.recv(1)

    with pytest.raises(ProtocolError):
        peer(serve).request(ATTACH)


def test_more_descriptors_than_allowed_are_refused(peer: Peer) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 9))]
        connection.sendmsg([side_pb2.SideReply().SerializeToString() or b"\x12\x00"], rights)
        connection.recv(1)

    with pytest.raises(ProtocolError, match="longer"):
        peer(serve).request(ATTACH)


def test_the_end_of_the_connection(peer: Peer) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)

    end = peer(serve)
    watching = threading.Thread(target=end.wait_for_end)
    watching.start()
    with pytest.raises(SessionLostError, match="closed"):
        end.request(ATTACH)
    watching.join(5)
    assert not watching.is_alive()
    with pytest.raises(SessionLostError):
        end.request(ATTACH)


def test_no_answer_in_time_ends_the_connection(peer: Peer) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        assert connection.recv(1 << 16) == b"", "the client hung up"

    end = peer(serve)
    with pytest.raises(SessionLostError, match="no answer"):
        end.request(ATTACH, timeout=0.1)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="No such file"):
        SideConnection(tmp_path / "none", 1)
    with pytest.raises(UnavailableError, match="too long"):
        SideConnection(tmp_path / ("x" * 200), 1)
