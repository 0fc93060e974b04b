"""Wrong packets on the side socket: an answer or an end, no descriptor left behind, nobody else held up.

A session costs the start of a worker, so that most tests share one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from tests.e2e import processes, raw, scrape
from tests.e2e.raw import RawSession, Side, attach_request, attached, memfd
from tests.e2e.servers import Running, health
from topkd.v1 import selection_pb2, side_pb2

pytestmark = pytest.mark.timeout(60)
SIZE = 8192
INVALID, PRECONDITION = 3, 9
RUDE = {
    "garbage": b"\xff" * 64,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "one-byte": b"\x00",
    "empty-request": side_pb2.SideRequest().SerializeToString() or b"\x7a\x00",
    "cut": attach_request().SerializeToString()[:-1],
    "register-first": side_pb2.SideRequest(register_memfd=side_pb2.RegisterMemfd(size=SIZE)).SerializeToString(),
}


def register(size: int = SIZE) -> side_pb2.SideRequest:
    return side_pb2.SideRequest(register_memfd=side_pb2.RegisterMemfd(size=size))


def force_send(sock: socket.socket, size: int) -> None:
    """Sends one packet of `size` bytes, as large as this kernel lets it be."""
    for option in (getattr(socket, "SO_SNDBUFFORCE", 32), socket.SO_SNDBUF):
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, 2 * size)
            sock.send(b"\x0a" + b"\xff" * (size - 1))
        except OSError:
            continue
        return
    sock.send(b"\x0a" + b"\xff" * (150_000 - 1))


def serves(session: RawSession) -> None:
    """The session still selects rightly."""
    scores = np.arange(8, dtype=np.float32)[None]
    reply = session.select(selection_pb2.Selection(input=raw.inline(scores), k=2, order=selection_pb2.ORDER_VALUE))
    assert raw.numbers(reply.results[0].indices).tolist() == [[7, 6]]


@pytest.fixture(scope="module", autouse=True)
def front_is_unharmed(cpu: Running) -> Iterator[None]:
    """After all tests the front has no descriptor more, and sessions and regions are as before."""
    cpu.spare()
    before = processes.descriptors(cpu.pid)
    yield
    cpu.spare()
    processes.wait_until(lambda: processes.descriptors(cpu.pid) <= before, 5, f"{before} descriptors in the front")
    scrape.wait_for(cpu.metrics_port, {"topkd_sessions": 0, "topkd_regions": 0, "topkd_region_bytes": 0})


@pytest.fixture(scope="module")
def session(cpu: Running) -> Iterator[RawSession]:
    with attached(cpu.socket_dir) as opened:
        serves(opened)
        yield opened


@pytest.mark.parametrize("name", RUDE)
def test_a_rude_first_packet_ends_the_connection(cpu: Running, name: str) -> None:
    with closing(Side(cpu.socket_dir, timeout=3)) as side:
        side.send(RUDE[name])
        reply, fds = side.receive()
        assert not fds
        if reply is not None:
            assert reply.WhichOneof("reply") == "error"
            assert (reply.error.code, bool(reply.error.reason), bool(reply.error.message)) == (INVALID, True, True)
            assert side.receive() == (None, []), "the connection ends after a refusal"


def test_a_huge_first_packet(cpu: Running) -> None:
    with closing(Side(cpu.socket_dir, timeout=3)) as side:
        force_send(side.socket, 1 << 20)
        reply, _ = side.receive()
        assert reply is None or reply.error.code == INVALID


def test_descriptors_beside_an_attach_are_closed(cpu: Running) -> None:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]
    try:
        before = processes.descriptors(cpu.pid)
        for count in (1, 3, 8, 9, 200):
            with closing(Side(cpu.socket_dir, timeout=3)) as side:
                side.send(b"\xff" * 8, fds[:count])
                side.receive()
        processes.wait_until(lambda: processes.descriptors(cpu.pid) <= before, 5, "no descriptor is left over")
    finally:
        for fd in fds:
            os.close(fd)


def test_silent_and_abandoned_connections_hold_up_nobody(cpu: Running) -> None:
    silent = [Side(cpu.socket_dir) for _ in range(20)]
    for _ in range(20):
        gone = Side(cpu.socket_dir)
        gone.send(attach_request().SerializeToString() if _ == 0 else b"\xff")
        gone.close()
    started = time.monotonic()
    with attached(cpu.socket_dir) as session:
        serves(session)
    took = time.monotonic() - started
    for side in silent:
        side.close()
    assert took < 10, f"an attach took {took:.1f} s beside silent peers"  # one of the abandoned took the warm spare


def test_any_number_of_silent_connections_takes_a_few_descriptors(cpu: Running) -> None:
    """The oldest of them have to go, so that an attach, health and metrics have theirs."""
    cpu.settle()
    before = processes.descriptors(cpu.pid)
    with ExitStack() as open_ones:
        silent = []
        for _ in range(400):
            silent.append(Side(cpu.socket_dir))
            open_ones.callback(silent[-1].close)
            assert processes.descriptors(cpu.pid) < before + 100
        with attached(cpu.socket_dir) as session, raw.front(cpu.socket_dir) as channel:
            serves(session)
            assert health(channel) == "SERVING"
        assert silent[0].receive() == (None, []), "the oldest was not sent away"
        silent[-1].socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].socket.recv(1)


def test_a_client_that_reads_no_answer_blocks_itself_only(cpu: Running, session: RawSession) -> None:
    with attached(cpu.socket_dir) as slow:
        slow.side.socket.settimeout(0.2)
        request = register().SerializeToString()
        with pytest.raises(TimeoutError):
            _send_forever(slow.side, request)
        serves(session)
        serves(slow)


def _send_forever(side: Side, packet: bytes) -> None:
    while True:
        side.send(packet)


def _unsealed() -> int:
    return memfd(SIZE, 0)


def _half_sealed() -> int:
    return memfd(SIZE, fcntl.F_SEAL_GROW)


def _write_sealed() -> int:
    return memfd(SIZE, raw.SEALS | fcntl.F_SEAL_WRITE)


def _future_write_sealed() -> int:
    return memfd(SIZE, raw.SEALS | 0x10)


def _read_only() -> int:
    fd = memfd(SIZE)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def _file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _socket() -> int:
    return socket.socket(socket.AF_UNIX).detach()


def _folder() -> int:
    return os.open("/", os.O_RDONLY)


def _device() -> int:
    return os.open("/dev/zero", os.O_RDWR)


BAD_FILES = (
    _unsealed,
    _half_sealed,
    _write_sealed,
    _future_write_sealed,
    _read_only,
    _file,
    _pipe,
    _socket,
    _folder,
    _device,
)


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__.strip("_"))
def test_a_descriptor_that_is_no_sealed_memfd(session: RawSession, make: Callable[[], int]) -> None:
    fd = make()
    try:
        reply = session.side.ask(register(), [fd])
    finally:
        os.close(fd)
    assert reply is not None, "the connection ended"
    assert (reply.error.code, reply.error.reason) == (PRECONDITION, "MEMFD_NOT_SEALED"), reply
    session.register(SIZE)
    serves(session)


@pytest.mark.parametrize("size", [0, SIZE + 1, SIZE * 2, 1 << 39, 1 << 63, (1 << 64) - 1])
def test_a_size_that_the_file_has_not(session: RawSession, size: int) -> None:
    fd = memfd(SIZE)
    try:
        reply = session.side.ask(register(size), [fd])
    finally:
        os.close(fd)
    assert reply is not None, "the connection ended"
    assert reply.error.code == INVALID, reply
    assert reply.error.field.startswith("register_memfd"), reply
    serves(session)


@pytest.mark.parametrize("count", [0, 2, 8])
def test_too_few_or_too_many_descriptors(session: RawSession, count: int) -> None:
    worker = processes.listener(session.worker_socket)
    before = processes.descriptors(worker)
    fds = [memfd(SIZE) for _ in range(count)]
    try:
        reply = session.side.ask(register(), fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert reply is not None, "the connection ended"
    assert (reply.error.code, reply.error.field[:14]) == (INVALID, "register_memfd"), reply
    serves(session)
    assert processes.descriptors(worker) <= before


@pytest.mark.parametrize("count", [0, 1, 250])
def test_allocations_are_refused_where_there_is_no_gpu(session: RawSession, count: int) -> None:
    worker = processes.listener(session.worker_socket)
    serves(session)
    before = processes.descriptors(worker)
    fd = memfd(SIZE)
    request = side_pb2.SideRequest(register_vmm=side_pb2.RegisterVmm(device_uuid="CPU", sizes=[2 << 20] * count))
    try:
        reply = session.side.ask(request, [fd] * count)
    finally:
        os.close(fd)
    assert reply is not None, "the connection ended"
    assert (reply.error.reason, reply.error.field) == ("DEVICE_MISMATCH", "register_vmm"), reply
    serves(session)
    assert processes.descriptors(worker) <= before


@pytest.mark.parametrize("name", ["garbage", "one-byte", "empty-request", "cut"])
def test_a_rude_later_packet_is_answered(session: RawSession, name: str) -> None:
    session.side.send(RUDE[name])
    reply, _ = session.side.receive()
    assert reply is not None, "the connection ended"
    assert reply.error.code == INVALID
    serves(session)


def test_a_second_attach_on_a_connection(session: RawSession) -> None:
    reply = session.side.ask(attach_request())
    assert reply is not None, "the connection ended"
    assert (reply.error.code, reply.error.field) == (INVALID, "attach")
    serves(session)


def test_a_huge_later_packet_ends_no_other_session(cpu: Running, session: RawSession) -> None:
    with attached(cpu.socket_dir) as rude:
        force_send(rude.side.socket, 1 << 20)
        rude.side.receive()
        serves(session)


def test_descriptors_do_not_pile_up_in_the_worker(session: RawSession) -> None:
    worker = processes.listener(session.worker_socket)
    serves(session)
    before = processes.descriptors(worker)
    for make in BAD_FILES * 5:
        fd = make()
        session.side.ask(register(), [fd, fd] if make is _file else [fd])
        os.close(fd)
    for _ in range(20):
        region, _memory = session.register(SIZE)
        request = selection_pb2.ReleaseRegionRequest(region_id=region)
        session.stub.ReleaseRegion(request, metadata=session.metadata, timeout=raw.TIMEOUT)
    processes.wait_until(lambda: processes.descriptors(worker) <= before, 5, f"{before} descriptors again")


def test_the_words_are_sealed_and_of_one_page(session: RawSession) -> None:
    assert os.fstat(session.words).st_size == 4096
    seals = fcntl.fcntl(session.words, fcntl.F_GET_SEALS)
    assert seals & raw.SEALS == raw.SEALS
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(session.words, 0)
