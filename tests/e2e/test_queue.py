"""Bounds: of requests that wait, of sessions, of what a session holds; and requests that nobody waits for any more."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Self

import grpc
import numpy as np
import pytest

import topkd
from tests.e2e import answers, engine, processes, raw, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.calls import start_call
from tests.e2e.conftest import Launch
from tests.e2e.raw import RawSession, Refusal, refusal
from tests.e2e.servers import Running
from topkd.v1 import selection_pb2, side_pb2

pytestmark = pytest.mark.timeout(120)
LIMITS = {"sessions": 2, "queue": 4, "regions": 8, "plans": 3, "batch": 16, "rows": 1 << 20, "region_bytes": 1 << 24}
EXHAUSTED = "RESOURCE_EXHAUSTED"
LONG = 4.0
"""Seconds of a call beside which others wait."""

STILL = "the long call was to be running still: make it longer"


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch(limits={**LIMITS, "session_bytes": 1 << 25})


@pytest.fixture(scope="module")
def session(own: Running) -> Iterator[RawSession]:
    with raw.attached(own.socket_dir) as opened:
        own.settle()
        yield opened


class Busy:
    """A worker that is kept busy by one call, and what came of calls beside it."""

    def __init__(self, session: RawSession, seconds: float) -> None:
        """Starts the call and waits until it runs."""
        region, memory = session.register(4 * engine.WIDTH)
        memory[:] = 0
        self.session = session
        self.region = region
        probe = min(self._call(512).result().results[0].device_time_ns for _ in range(3)) * 1e-9
        self.long = self._call(int(512 * seconds / probe))
        processes.wait_until_busy(processes.listener(session.worker_socket), 0.2)

    def _call(self, rows: int) -> Any:
        scores = raw.placed(self.region, 0, (rows, engine.WIDTH))
        scores.strides.extend([0, 1])
        request = raw.batch(selection_pb2.Selection(input=scores, k=8))
        return self.session.stub.SelectTopK.future(request, metadata=self.session.metadata, timeout=60)

    def short(self, timeout: float = 60.0) -> Any:
        """Starts a call that would take no time."""
        request = raw.batch(selection_pb2.Selection(input=raw.inline(np.ones((1, 4), np.float32)), k=3000))
        return self.session.stub.SelectTopK.future(request, metadata=self.session.metadata, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the long call and gives the memory back, unless the test has done so."""
        outcome(self.long)
        request = selection_pb2.ReleaseRegionRequest(region_id=self.region)
        with contextlib.suppress(grpc.RpcError):
            self.session.stub.ReleaseRegion(request, metadata=self.session.metadata, timeout=60)


def outcome(call: Any) -> Refusal | None:
    """Returns how a call failed; None if it succeeded."""
    try:
        call.result(timeout=60)
    except grpc.RpcError as error:
        return refusal(error)
    except grpc.FutureCancelledError:
        return Refusal("CANCELLED", "", "", (), None)
    return None


def ran(own: Running) -> float:
    """Returns how many of `Busy.short` ran: kernel calls of their class of k."""
    return scrape.total(own.metrics(), "topkd_kernel_seconds_count", k="<=4096")


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(own: Running, session: RawSession) -> None:
    before = ran(own)
    with Busy(session, LONG) as busy:
        calls = [busy.short() for _ in range(30)]
        processes.wait_until(lambda: sum(call.done() for call in calls) >= 27, 2.0, "all but three are refused")
        scrape.wait_for(own.metrics_port, {"topkd_queued_requests": 4}, 2.0)
        assert not busy.long.done(), STILL
    outcomes = [outcome(call) for call in calls]
    refusals = [one for one in outcomes if one is not None]
    assert len(refusals) == 27
    for one in refusals:
        assert (one.code, one.reason) == (EXHAUSTED, "QUEUE_FULL")
        assert one.retry_seconds is not None
        assert 0 < one.retry_seconds < 10
    scrape.wait_for(own.metrics_port, {"topkd_kernel_seconds_count": before + 3}, k="<=4096")
    scrape.wait_for(own.metrics_port, {"topkd_queued_requests": 0})


def test_expired_and_cancelled_requests_are_not_run(own: Running, session: RawSession) -> None:
    before = ran(own)
    with Busy(session, LONG) as busy:
        expired, cancelled = busy.short(timeout=0.4), busy.short()
        kept = busy.short()
        processes.wait_until(expired.done, 1.5, "the deadline passes at the client")
        cancelled.cancel()
        scrape.wait_for(own.metrics_port, {"topkd_queued_requests": 2}, 2.0)  # their places are free at once
        assert not busy.long.done(), STILL
    outcomes = [outcome(call) for call in (expired, cancelled, kept)]
    assert [one.code if one else "OK" for one in outcomes] == ["DEADLINE_EXCEEDED", "CANCELLED", "OK"]
    scrape.wait_for(own.metrics_port, {"topkd_kernel_seconds_count": before + 1}, k="<=4096")


def test_waiting_requests_of_a_client_that_ends_are_not_run(own: Running, session: RawSession) -> None:
    own.settle()
    before = ran(own)
    with raw.attached(own.socket_dir) as leaving:
        busy = Busy(leaving, LONG)
        waiting = [busy.short() for _ in range(3)]
        scrape.wait_for(own.metrics_port, {"topkd_queued_requests": 4}, 2.0)
        assert not busy.long.done(), STILL
        worker = processes.listener(leaving.worker_socket)
    processes.wait_until(lambda: not processes.alive(worker), 2.0, "the worker ends with its session")
    assert all(outcome(call) is not None for call in (busy.long, *waiting))
    time.sleep(0.3)
    assert ran(own) == before
    scrape.wait_for(own.metrics_port, {"topkd_queued_requests": 0, "topkd_sessions": 1})


def test_a_region_that_is_released_during_a_call(session: RawSession) -> None:
    with Busy(session, 2.0) as busy:
        request = selection_pb2.ReleaseRegionRequest(region_id=busy.region)
        release = session.stub.ReleaseRegion.future(request, metadata=session.metadata, timeout=60)
        time.sleep(0.3)
        assert not release.done(), "the release was acknowledged while the memory was in use"
        assert not busy.long.done(), STILL
        assert outcome(busy.long) is None
        assert outcome(release) is None
    selection = selection_pb2.Selection(input=raw.placed(busy.region, 0, (1, 8)), k=1)
    got = raw.refused(session.stub.SelectTopK, raw.batch(selection), metadata=session.metadata)
    assert (got.code, got.reason) == ("NOT_FOUND", "REGION_NOT_FOUND")


def test_the_client_waits_for_a_place_in_the_queue(own: Running, session: RawSession) -> None:
    """Twelve threads share four places; none of their calls fails."""
    own.settle()
    with topkd.Client(own.socket_dir) as client:
        client.connect()
        inputs = [answers.rows(seed, 8, 2000) for seed in range(12)]
        calls = [start_call(client.select_topk, scores, 100, **UNIQUE) for scores in inputs]
        for scores, call in zip(inputs, calls, strict=True):
            call.wait(60)
            assert call.error is None, repr(call)
            assert np.array_equal(call.result.indices, best(scores, 100))


def test_a_deadline_during_a_call(own: Running, session: RawSession) -> None:
    own.settle()
    with topkd.Client(own.socket_dir) as client:
        scores, k = engine.long_call(client, 2.0)
        started = time.monotonic()
        with pytest.raises(topkd.DeadlineExceededError) as raised:
            client.select_topk(scores, k, timeout=0.3)
        assert time.monotonic() - started < 1.3
        assert isinstance(raised.value, TimeoutError)
        kept = answers.rows(1, 2, 300)
        assert np.array_equal(client.select_topk(kept, 20, **UNIQUE).indices, best(kept, 20))


def test_the_number_of_sessions_is_bounded(own: Running, session: RawSession) -> None:
    own.settle()
    with raw.attached(own.socket_dir):
        with topkd.Client(own.socket_dir, attach_timeout=0.2) as third:
            with pytest.raises(topkd.ResourceExhaustedError) as raised:
                third.connect()
            assert raised.value.reason == "SESSION_LIMIT"
            assert raised.value.retry_after
        scrape.wait_for(own.metrics_port, {"topkd_sessions": 2})
    scrape.wait_for(own.metrics_port, {"topkd_sessions": 1})
    with raw.attached(own.socket_dir):
        scrape.wait_for(own.metrics_port, {"topkd_sessions": 2})


def test_regions_are_bounded_in_number_and_size(session: RawSession) -> None:
    assert _registered(session, (1 << 24) + 1) == (3, "ARGUMENT_VALUE")
    ids = []
    while isinstance(answer := _registered(session, 4096), int):
        ids.append(answer)
    assert answer == (8, "REGION_LIMIT")
    assert len(ids) == LIMITS["regions"]
    _release(session, ids)
    large = [_registered(session, 1 << 24) for _ in range(3)]
    assert large[2] == (8, "REGION_LIMIT"), "the sum of the regions' sizes is bounded"
    _release(session, large[:2])


def _registered(session: RawSession, size: int) -> int | tuple[int, str]:
    """Registers memory; returns its id, or the code and reason of the refusal."""
    fd = raw.memfd(size)
    try:
        request = side_pb2.SideRequest(register_memfd=side_pb2.RegisterMemfd(size=size))
        reply = session.side.ask(request, [fd])
    finally:
        os.close(fd)
    assert reply is not None
    if reply.WhichOneof("reply") == "error":
        return reply.error.code, reply.error.reason
    return int(reply.registered_memfd.region_id)


def _release(session: RawSession, ids: list[Any]) -> None:
    for region in ids:
        request = selection_pb2.ReleaseRegionRequest(region_id=region)
        session.stub.ReleaseRegion(request, metadata=session.metadata, timeout=raw.TIMEOUT)


def test_plans_batches_and_rows_are_bounded(session: RawSession) -> None:
    region, _ = session.register(1 << 16)
    selection = selection_pb2.Selection(
        input=raw.placed(region, 0, (4, 64)), k=4, out_indices=raw.placed(region, 4096, (4, 4), "INT32")
    )
    request = selection_pb2.CreatePlanRequest(selection=selection)
    call: dict[str, Any] = {"metadata": session.metadata, "timeout": raw.TIMEOUT}
    plans = [session.stub.CreatePlan(request, **call).plan_id for _ in range(LIMITS["plans"])]
    got = raw.refused(session.stub.CreatePlan, request, metadata=session.metadata)
    assert (got.code, got.reason) == (EXHAUSTED, "PLAN_LIMIT")
    for plan in plans:
        session.stub.ReleasePlan(selection_pb2.ReleasePlanRequest(plan_id=plan), **call)
    plan = session.stub.CreatePlan(request, **call).plan_id
    session.stub.ReleasePlan(selection_pb2.ReleasePlanRequest(plan_id=plan), **call)
    selection.ClearField("out_indices")
    got = raw.refused(session.stub.SelectTopK, raw.batch(*[selection] * 17), metadata=session.metadata)
    assert (got.code, got.fields) == ("INVALID_ARGUMENT", ("items",))
    assert len(session.stub.SelectTopK(raw.batch(*[selection] * 16), **call).results) == 16
    selection.input.CopyFrom(raw.placed(region, 0, ((1 << 20) + 1, 4)))
    selection.input.strides.extend([0, 1])
    got = raw.refused(session.stub.SelectTopK, raw.batch(selection), metadata=session.metadata)
    assert (got.code, got.fields) == ("INVALID_ARGUMENT", ("items[0].selection.input",))
    _release(session, [region])


def test_the_limits_are_reported(session: RawSession) -> None:
    for name, value in LIMITS.items():
        assert getattr(session.session.info.limits, f"max_{name}") == value
