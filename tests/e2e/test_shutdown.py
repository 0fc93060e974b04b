"""SIGTERM: no new work, what runs is finished, nothing stays behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest

import topkd
from tests.e2e import answers, engine, processes, raw
from tests.e2e.answers import UNIQUE, best
from tests.e2e.calls import start_call
from tests.e2e.conftest import Launch
from tests.e2e.servers import Running, health
from topkd.v1 import selection_pb2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def own(launch: Launch) -> Iterator[Running]:
    server = launch(drain_seconds=60)  # beside others' work a call of seconds may take many
    yield server
    server.stop()


def test_work_is_finished_and_new_work_refused(own: Running) -> None:
    with (
        raw.attached(own.socket_dir) as session,
        topkd.Client(own.socket_dir, attach_timeout=0.5) as other,
        raw.front(own.socket_dir) as channel,
    ):
        own.settle()
        other.connect()
        own.settle()
        _drain(own, session, other, channel)
    assert [path.name for path in own.socket_dir.iterdir() if path.is_socket()] == []
    assert "Traceback" not in own.log.read_text()


def _drain(own: Running, session: raw.RawSession, other: topkd.Client, channel: grpc.Channel) -> None:
    row = answers.rows(1, 1, engine.WIDTH)
    region, memory = session.register(1 << 20)
    memory[: row.nbytes] = row.view(np.uint8).ravel()
    count = _rows_for(session, region, 5.0)
    workers = own.workers()
    assert health(channel) == "SERVING"
    call = start_call(session.stub.SelectTopK, _long(region, count), metadata=session.metadata, timeout=60)
    processes.wait_until_busy(processes.listener(session.worker_socket), 0.3)
    assert own.process is not None
    own.process.send_signal(signal.SIGTERM)
    processes.wait_until(lambda: health(channel) != "SERVING", 2.0, "health says that it ends")
    assert health(channel) == "NOT_SERVING"
    _refuses(own, session, other)
    assert call.thread.is_alive(), "the call ended before the test was done: make it longer"
    assert own.process.poll() is None
    call.wait(60)
    assert call.error is None, repr(call)
    got = raw.numbers(call.result.results[0].indices)
    assert got.shape == (count, 8)
    assert bool((got == best(row, 8)).all())
    ended_at = time.monotonic()
    assert own.process.wait(15) == 0, own.tail()
    assert time.monotonic() - ended_at < 6.0, "the server lingers after its last call"
    assert not any(map(processes.alive, workers))


def _long(region: int, count: int) -> selection_pb2.SelectTopKRequest:
    scores = raw.placed(region, 0, (count, engine.WIDTH))
    scores.strides.extend([0, 1])
    options: dict[str, Any] = {"order": selection_pb2.ORDER_INDEX, "ties": selection_pb2.TIES_LOWEST}
    return raw.batch(selection_pb2.Selection(input=scores, k=8, **options))


def _rows_for(session: raw.RawSession, region: int, seconds: float) -> int:
    """Returns how many rows take about so long."""
    call: dict[str, Any] = {"metadata": session.metadata, "timeout": raw.TIMEOUT}
    replies = [session.stub.SelectTopK(_long(region, 512), **call) for _ in range(3)]
    return int(512 * seconds / (min(reply.results[0].device_time_ns for reply in replies) * 1e-9))


def _refuses(own: Running, session: raw.RawSession, other: topkd.Client) -> None:
    """New work in the session that computes, from another client, and from a new one, is refused by name."""
    got = raw.refused(session.stub.SelectTopK, _long(1, 1), metadata=session.metadata, timeout=5)
    assert (got.code, got.reason) == ("UNAVAILABLE", "DRAINING"), got
    scores = np.ones((1, 8), np.float32)
    with pytest.raises(topkd.UnavailableError) as raised:
        _until_refused(other, scores)
    assert raised.value.reason == "DRAINING", repr(raised.value)
    with closing(raw.Side(own.socket_dir, timeout=5)) as side:
        reply = side.ask(raw.attach_request())
    assert reply is not None
    assert (reply.error.code, reply.error.reason) == (grpc.StatusCode.UNAVAILABLE.value[0], "DRAINING")


def _until_refused(client: topkd.Client, scores: np.ndarray) -> None:
    """Calls until the server refuses; a session whose idle worker ends at this moment is lost first."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            client.select_topk(scores, 2, **UNIQUE)
        except topkd.SessionLostError as error:
            if error.reason == "DRAINING":
                raise


def test_an_idle_server_ends_quickly_and_starts_again_in_place(own: Running) -> None:
    with topkd.Client(own.socket_dir) as client:
        client.connect()
        started = time.monotonic()
        assert own.stop() == 0
        assert time.monotonic() - started < 5.0
        processes.wait_until(lambda: not client.attached, 1.0, "the client notices")


def test_a_call_beyond_the_grace_does_not_keep_the_server(launch: Launch) -> None:
    own = launch(drain_seconds=1)
    worker = own.spare()
    with topkd.Client(own.socket_dir) as client:
        scores, k = engine.long_call(client, 20.0)
        call = start_call(client.select_topk, scores, k)
        processes.wait_until_busy(worker, 0.3)
        started = time.monotonic()
        assert own.stop() == 0
        assert time.monotonic() - started < 8.0
        call.wait()
        assert isinstance(call.error, topkd.UnavailableError), repr(call)
