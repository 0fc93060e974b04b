"""Servers and workers that go away, and clients that come back."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topkd
from tests.client.conftest import Harmed, halt
from tests.conftest import Server
from tests.e2e.processes import children, wait_until


def worker_of(client: topkd.Client | topkd.AsyncClient, server: Harmed) -> int:
    """Returns the process that serves the client's session."""
    inode = _listener(client._core.session._data_path)  # type: ignore[union-attr]
    for pid in children(server.process.pid):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(fd.readlink()) == f"socket:[{inode}]":
                    return pid
            except OSError:
                continue
    raise AssertionError("no child of the front listens there")


def _listener(path: Path) -> str:
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if fields[-1] == str(path) and fields[3] == "00010000":
            return fields[6]
    raise AssertionError(f"nobody listens on {path}")


class Background:
    """A call on a thread of its own."""

    def __init__(self, function: Any) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self.ended = 0.0
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        self.ended = time.monotonic()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the call hangs"


@pytest.fixture
def data(harmed: Harmed) -> Iterator[tuple[Harmed, topkd.Client, Any]]:
    with topkd.Client(harmed.socket_dir, attach_timeout=60) as client:
        array = client.empty((2, 600_000), "float32")
        array[:] = 0
        array[0, 5] = array[1, 9] = 1
        yield harmed, client, array


def check(client: topkd.Client, array: Any) -> None:
    assert client.select_topk(array, 1).indices.tolist() == [[5], [9]]


def test_a_worker_killed_in_a_call(data: tuple[Harmed, topkd.Client, Any]) -> None:
    server, client, array = data
    plan = client.plan(array, 1)
    small = client.empty((1, 4), "float32")
    small[:] = [[1, 2, 3, 0]]
    other = topkd.Client(server.socket_dir)
    check(client, array)
    check(other, np.array([[0, 0, 0, 0, 0, 1, 0, 0, 0, 0], [0] * 9 + [1]], np.float32))
    epoch = client.info().epoch
    pid = worker_of(client, server)
    halt(pid)
    call = Background(lambda: client.select_topk(array, 1))
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    call.join()
    assert isinstance(call.error, topkd.SessionLostError)
    assert call.ended - killed < 1, "at once"
    check(client, array)
    assert plan().indices.tolist() == [[5], [9]]
    assert client.select_topk(small, 1).indices.tolist() == [[2]]
    assert client.info().epoch == epoch
    check(other, np.array([[0, 0, 0, 0, 0, 1, 0, 0, 0, 0], [0] * 9 + [1]], np.float32))
    other.close()


def test_a_worker_killed_between_calls(data: tuple[Harmed, topkd.Client, Any]) -> None:
    server, client, array = data
    check(client, array)
    os.kill(worker_of(client, server), signal.SIGKILL)
    wait_until(lambda: not client.attached, 5, "the client notices")
    check(client, array)


def test_a_front_killed_in_a_call_and_started_again(data: tuple[Harmed, topkd.Client, Any]) -> None:
    server, client, array = data
    plan = client.plan(array, 1)
    check(client, array)
    epoch = client.info().epoch
    stopped = worker_of(client, server)
    halt(stopped)
    call = Background(lambda: client.select_topk(array, 1))
    time.sleep(0.3)
    server.kill()
    killed = time.monotonic()
    os.kill(stopped, signal.SIGCONT)  # a stopped worker cannot notice that its front is gone
    call.join()
    assert isinstance(call.error, topkd.SessionLostError)
    assert call.ended - killed < 2
    options = client._core.options
    client._core.options = dataclasses.replace(options, attach_timeout=0.3)
    with pytest.raises(topkd.UnavailableError, match="no server at"):
        client.select_topk(array, 1)
    client._core.options = options
    waiting = Background(lambda: client.select_topk(array, 1))
    server.start()
    waiting.join()
    assert waiting.error is None
    assert waiting.result.indices.tolist() == [[5], [9]]
    assert plan().indices.tolist() == [[5], [9]]
    assert client.info().epoch != epoch


def test_no_server(tmp_path: Path) -> None:
    started = time.monotonic()
    with topkd.Client(tmp_path, attach_timeout=0.3) as client:
        with pytest.raises(topkd.UnavailableError, match="no server at"):
            client.select_topk(np.zeros((1, 4), np.float32), 1)
        with pytest.raises(topkd.UnavailableError):
            client.empty(4)
    assert time.monotonic() - started < 3


def test_a_call_seeks_a_server_no_longer_than_its_own_time_out(tmp_path: Path) -> None:
    with topkd.Client(tmp_path, timeout=0.1, attach_timeout=30) as client:
        started = time.monotonic()
        with pytest.raises(topkd.UnavailableError, match="no server at"):
            client.connect()
        assert time.monotonic() - started < 3
        started = time.monotonic()
        with pytest.raises(topkd.UnavailableError, match="no server at"):
            client.connect(timeout=2)
        assert time.monotonic() - started > 0.3


def test_computing_locally_without_a_server(tmp_path: Path) -> None:
    with topkd.Client(tmp_path, attach_timeout=5, on_unavailable="local") as client:
        started = time.monotonic()
        array = client.empty((2, 10), "float32")
        array[:] = [range(10), range(10, 0, -1)]
        out = np.empty((2, 2), np.int32)
        result = client.select_topk(array, 2, order="value", values=True, out_indices=out)
        assert result.local
        assert result.kernel == "torch"
        assert result.indices is out
        assert out.tolist() == [[9, 8], [0, 1]]
        assert result.values.tolist() == [[9, 8], [10, 9]]
        assert client.merge_topk(array, np.arange(20, dtype=np.int32).reshape(2, 10), 1).indices.tolist() == [[9], [10]]
        with pytest.raises(topkd.ArgumentValueError, match="k"):
            client.select_topk(array, 0)
        with pytest.raises(topkd.ArgumentTypeError, match="lengths"):
            client.select_topk(array, 1, lengths=np.zeros(2, np.int64))
        for _ in range(50):
            client.select_topk(array, 1)
        assert time.monotonic() - started < 20


def test_computing_locally_until_the_server_is_back(harmed: Harmed) -> None:
    with topkd.Client(harmed.socket_dir, on_unavailable="local") as client:
        array = client.empty((2, 50), "float32")
        array[:] = 0
        array[0, 5] = array[1, 9] = 1
        plan = client.plan(array, 1)
        assert not plan().local
        harmed.kill()
        wait_until(lambda: not client.attached, 5, "the client notices")
        assert client.select_topk(array, 1).local
        local = plan()
        assert local.local
        assert local.indices.tolist() == [[5], [9]]
        harmed.start()
        wait_until(lambda: not client.select_topk(array, 1).local, 30, "the client is back")
        assert not plan().local


def test_a_deadline_passes_and_the_memory_is_not_reused_before_the_next_answer(
    data: tuple[Harmed, topkd.Client, Any],
) -> None:
    server, client, array = data
    check(client, array)
    pid = worker_of(client, server)
    halt(pid)
    with pytest.raises(topkd.DeadlineExceededError):
        client.select_topk(array, 1, timeout=0.2)
    session = client._core.session
    assert session is not None
    assert len(session.quarantine) == 1
    os.kill(pid, signal.SIGCONT)
    check(client, array)
    assert not session.quarantine


def test_closing_the_client_ends_its_calls(data: tuple[Harmed, topkd.Client, Any]) -> None:
    server, client, array = data
    check(client, array)
    pid = worker_of(client, server)
    halt(pid)
    call = Background(lambda: client.select_topk(array, 1))
    time.sleep(0.2)
    client.close()
    call.join()
    assert isinstance(call.error, topkd.ClientClosedError)


def test_a_full_queue_is_tried_again_until_the_deadline(data: tuple[Harmed, topkd.Client, Any]) -> None:
    server, client, array = data
    check(client, array)
    calls = [Background(lambda: check(client, array)) for _ in range(6)]
    for call in calls:
        call.join()
    assert [call.error for call in calls] == [None] * 6
    pid = worker_of(client, server)
    halt(pid)
    calls = [Background(lambda: client.select_topk(array, 1, timeout=0.7)) for _ in range(2)]
    for call in calls:
        call.join()
    os.kill(pid, signal.SIGCONT)
    assert all(isinstance(c.error, (topkd.DeadlineExceededError, topkd.ResourceExhaustedError)) for c in calls)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # a client has threads; that is the test
def test_a_forked_child_cannot_use_the_client_and_does_not_hold_the_session(server: Server) -> None:
    client = topkd.Client(server.socket_dir)
    array = client.empty((1, 8), "float32")
    array[:] = range(8)
    before = client.info().sessions
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            client.select_topk(array, 1)
            said = "nothing"
        except topkd.ForkError as error:
            said = str(error)
        client.close()
        os.write(writing, said.encode())
        time.sleep(30)
        os._exit(0)
    try:
        assert b"before a fork" in os.read(reading, 1000)
        assert client.select_topk(array, 1).indices.tolist() == [[7]], "the parent goes on"
        client.close()
        with topkd.Client(server.socket_dir) as other:
            wait_until(lambda: other.info().sessions <= before, 5, "the session ends though the child lives")
    finally:
        os.close(reading)
        os.close(writing)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
