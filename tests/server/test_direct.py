"""Selections that are over soon run on the thread that serves; the others, and all that waits, do not hold it up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from tests.e2e import raw
from tests.server.harness import eventually
from topkd.server import _direct, _execute, _logging, _stream_rpc
from topkd.server._memory_host import HostBackend
from topkd.server._queue import Account
from topkd.server._rpc import SelectionService, TokenInterceptor, make_server
from topkd.server._state import Session, SessionTable
from topkd.server.config import ServerLimits
from topkd.server.errors import KernelFailedError
from topkd.server.metrics import ServerMetrics
from topkd.v1 import selection_pb2, selection_pb2_grpc

POOL = "topkd-rpc"
TOKEN = (("topkd-token", "t"),)


class Server:
    """A worker's endpoint in this process, with one session that has one region.

    Attributes:
        request: a selection that lies in the region.
        threads: names of the threads that ran batches.
    """

    def __init__(self, folder: Path, **limits: int) -> None:
        self.limits = ServerLimits(**limits)
        metrics, backend = ServerMetrics(CollectorRegistry()), HostBackend(1)
        log = _logging.configure("critical", "json", process="test")
        self.service = SelectionService(backend, self.limits, metrics, log)
        self.session = Session("s", self.limits, metrics, remote=False)
        sessions = SessionTable()
        sessions.add("t", self.session)
        address = f"unix:{folder}/w.sock"
        self.server = make_server(self.service, TokenInterceptor(sessions, metrics), self.limits, address, shared=False)
        self.server.start()
        self.channel = grpc.insecure_channel(address, raw.OPTIONS)
        self.stub = selection_pb2_grpc.SelectionServiceStub(self.channel)
        self.threads: list[str] = []
        self.before: Callable[[], object] = lambda: None
        backend.run = self._run  # type: ignore[method-assign]
        fd = raw.memfd(4096)
        region = self.session.add_region(4096, lambda: backend.open_memfd(fd, 4096), "size")
        os.close(fd)
        selection = selection_pb2.Selection(
            input=raw.placed(region, 0, (1, 4)), k=1, out_indices=raw.placed(region, 1024, (1, 1), "INT32")
        )
        self.request = raw.batch(selection)

    def _run(self, calls: Any) -> list[int]:
        self.threads.append(threading.current_thread().name)
        self.before()
        return [int(call() is None) for call in calls]

    def select(self, timeout: float = 20.0) -> Any:
        return self.stub.SelectTopK(self.request, timeout=timeout, metadata=TOKEN)

    def warm(self) -> None:
        """Makes the batch one that comes again."""
        while not (self.session.batches and next(iter(self.session.batches.values())).quick):
            self.select()
        self.threads.clear()

    def ran_directly(self) -> list[bool]:
        """Says of each batch that ran whether the serving thread ran it."""
        return [not name.startswith(POOL) for name in self.threads]

    def stream(self, *call_ids: int) -> Any:
        """Opens a stream, sends requests, and ends it."""
        messages = [selection_pb2.SelectTopKStreamRequest(call_id=one, request=self.request) for one in call_ids]
        return self.stub.SelectTopKStream(iter(messages), metadata=TOKEN)


@pytest.fixture(autouse=True)
def long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine every run may take long."""
    monkeypatch.setattr(_execute, "_QUICK_NS", 60 * 10**9)


@pytest.fixture
def server(short_dir: Path) -> Iterator[Server]:
    made = Server(short_dir)
    yield made
    made.channel.close()
    assert made.server.stop(0).wait(10), "something keeps the server"
    assert made.service.queue.depth == 0
    assert made.session.account.pending == 0


def test_known_selections_run_on_the_serving_thread(server: Server) -> None:
    for _ in range(4):
        server.select()
    assert server.ran_directly() == [False] * 3 + [True]
    assert [answer.call_id for answer in server.stream(7, 8, 9)] == [7, 8, 9]
    assert server.ran_directly()[4:] == [True] * 3
    assert server.session.account.pending == 0


def test_those_that_took_long_run_on_another(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.warm()
    monkeypatch.setattr(_execute, "_QUICK_NS", 0)
    server.select()
    server.select()
    assert [answer.call_id for answer in server.stream(1, 2)] == [1, 2]
    assert server.ran_directly() == [True, False, False, False]


def test_lanes_keep_selections_off_the_serving_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.warm()
    monkeypatch.setattr(server.session, "lanes", SimpleNamespace(held=lambda: None))
    server.select()
    assert server.ran_directly() == [False]


def test_where_grpcio_is_built_otherwise_pools_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.warm()
    opened: list[Any] = []

    def open_messages(context: Any, direct: Any) -> Any:
        opened.append(_direct.open_messages(context, direct))
        return opened[-1]

    monkeypatch.setattr(_stream_rpc, "open_messages", open_messages)
    monkeypatch.setattr(_direct, "_KNOWN", False)
    server.select()
    assert [answer.call_id for answer in server.stream(7, 8)] == [7, 8]
    assert opened == [None]
    assert server.ran_directly() == [False] * 3


def test_a_pool_runs_what_else_it_is_given() -> None:
    with _direct.DirectPool(1) as pool:
        assert pool.submit(pow, 2, 5).result() == 32


def test_while_another_has_the_turn_calls_wait_elsewhere(server: Server) -> None:
    server.warm()
    other = Account(1)
    server.service.queue.enter(other)
    waiting = server.stub.SelectTopK.future(server.request, timeout=20.0, metadata=TOKEN)
    streamed = server.stream(5)
    eventually(lambda: server.session.account.pending == 2)
    with pytest.raises(grpc.RpcError) as caught:
        server.select(timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: server.session.account.pending == 2)
    server.service.queue.leave(other)
    assert waiting.result().results[0].kernel == "torch"
    assert next(streamed).response.results[0].kernel == "torch"
    eventually(lambda: server.service.queue.depth == 0)
    server.select()
    assert server.ran_directly() == [False, False, True]


def test_a_kernel_that_fails_there_fails_its_call_only(server: Server) -> None:
    server.warm()

    def fail() -> None:
        raise KernelFailedError("broken")

    server.before = fail
    with pytest.raises(grpc.RpcError) as caught:
        server.select()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert [answer.error.message for answer in server.stream(1, 2)] == ["broken", "broken"]
    assert server.ran_directly() == [True] * 3
    server.before = lambda: None
    assert server.select().results[0].kernel == "torch"


def test_a_drain_refuses_known_selections_too(server: Server) -> None:
    server.warm()
    server.service.draining = True
    with pytest.raises(grpc.RpcError) as caught:
        server.select()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.threads == []


def test_a_released_region_is_not_found_by_a_selection_that_was_known(server: Server) -> None:
    server.warm()
    (region_id,) = server.session.regions
    server.session.take_region(region_id)
    with pytest.raises(grpc.RpcError) as caught:
        server.select()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_calls_without_a_message_end(server: Server) -> None:
    method = server.channel.stream_unary("/topkd.v1.SelectionService/SelectTopK")
    with pytest.raises(grpc.RpcError) as caught:
        method(iter(()), timeout=20.0, metadata=TOKEN)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    never = threading.Event()
    silent = method.future(iter(never.wait, True), metadata=TOKEN)
    server.warm()
    silent.cancel()
    never.set()
    assert next(iter(server.stream(1))).call_id == 1


def test_callers_that_go_leave_nothing(server: Server) -> None:
    server.warm()
    never = threading.Event()
    for _ in range(2 * server.limits.max_streams):
        stream = server.stub.SelectTopKStream(iter(never.wait, True), metadata=TOKEN)
        stream.cancel()
    never.set()

    def answers() -> bool:
        try:
            return [answer.call_id for answer in server.stream(1, 2)] == [1, 2]
        except grpc.RpcError:  # those that were cancelled count until their threads have seen it
            return False

    eventually(answers)
