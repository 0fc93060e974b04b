"""Ordered calls by the words of a session, on the CPU backend: states, time-outs, refusals, ends."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.server.harness import (
    Memory,
    ServerProcess,
    Session,
    SideRefusedError,
    details,
    eventually,
    inline,
    select,
)
from tests.server.test_tcp import attached
from topkd._words import CLIENT_BELL, POISON, Words
from topkd.v1 import selection_pb2, selection_pb2_grpc

ROWS, WIDTH, K = 2, 64, 4
UNTOUCHED = -7


class Caller:
    """A session, its words, and selections whose scores and outputs lie in a region.

    The scores of the n-th piece ask for the columns n, n + 1, ...: what was written tells which call wrote it. Values
    of timelines are counted from `base`, which grows from test to test.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.session = Session(server)
        self.words = Words(self.session.words)
        self.base = 0
        self.renew()

    def renew(self) -> None:
        """Begins anew: other memory, values above those used so far."""
        self.session.clean()
        self.base += 1000
        self.failures = [self.words.failure(slot).total for slot in range(8)]
        self.pieces: list[tuple[selection_pb2.BatchItem, np.ndarray[Any, Any]]] = []
        self.memory = self.session.register(1 << 16)
        for number in range(8):
            self.pieces.append(self._piece(self.memory, number))

    def _piece(self, memory: Memory, number: int) -> tuple[selection_pb2.BatchItem, np.ndarray[Any, Any]]:
        at = number * 4096
        scores = memory.array("float32", (ROWS, WIDTH), at)
        scores[:] = 0
        scores[:, number : number + K] = np.arange(K, 0, -1)
        out = memory.array("int32", (ROWS, K), at + 2048)
        out[:] = UNTOUCHED
        item = select(
            input=memory.tensor("float32", (ROWS, WIDTH), at),
            k=K,
            order=selection_pb2.ORDER_INDEX,
            out_indices=memory.tensor("int32", (ROWS, K), at + 2048),
        )
        return item, out

    def send(self, number: int, slot: int, ready: int, done: int, timeout_ms: int = 0, **more: Any) -> Any:
        ordering = selection_pb2.Ordering(
            slot=slot, ready=self.base + ready, done=self.base + done, ready_timeout_ms=timeout_ms
        )
        item = more.get("item") or self.pieces[number][0]
        request = selection_pb2.SelectTopKRequest(items=[item], ordering=ordering)
        return self.session.stub.SelectTopK(request, timeout=30, metadata=self.session.metadata)

    def let(self, slot: int, ready: int, ring: bool = True) -> None:
        self.words.set_ready(slot, self.base + ready)
        if ring:
            self.words.ring(CLIENT_BELL)

    def came(self, slot: int, done: int, timeout: float = 5) -> bool:
        return self.words.wait_done(slot, self.base + done, timeout)

    def done(self, slot: int) -> int:
        return max(self.words.done(slot) - self.base, 0)

    def failure(self, slot: int) -> tuple[int, int, int, int]:
        """Returns first, last, code and number of a slot's failures in this test."""
        found = self.words.failure(slot)
        return found.first - self.base, found.last - self.base, found.code, found.total - self.failures[slot]

    def wrote(self, number: int) -> bool:
        out = self.pieces[number][1]
        if bool((out == UNTOUCHED).all()):
            return False
        assert out.tolist() == [list(range(number, number + K))] * ROWS
        return True

    def close(self) -> None:
        self.session.close()


@pytest.fixture(scope="module")
def shared(front: ServerProcess) -> Iterator[Caller]:
    made = Caller(front)
    yield made
    made.close()
    front.wait_event("session_ended", session=made.session.info.session_id)


@pytest.fixture
def caller(shared: Caller) -> Caller:
    """A caller on whose slots nothing is under way."""
    shared.renew()
    return shared


def refused(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    return error.code(), details(error)[1]


def test_the_page_has_room_for_the_slots_that_the_server_offers(caller: Caller) -> None:
    limits = caller.session.info.info.limits
    assert (limits.max_slots, limits.max_ready_timeout_ms) == (8, 10_000)
    assert caller.session.info.info.protocol_revision == 5
    assert [caller.done(slot) for slot in range(limits.max_slots)] == [0] * 8


def test_a_call_is_answered_before_it_runs_and_runs_when_its_word_comes(caller: Caller) -> None:
    reply = caller.send(0, slot=0, ready=1, done=1)
    assert (reply.results[0].kernel, reply.results[0].device_time_ns) == ("torch", 0)
    assert not reply.results[0].HasField("indices")
    time.sleep(0.1)
    assert not caller.wrote(0)
    assert caller.done(0) == 0
    caller.let(0, 1)
    assert caller.came(0, 1)
    assert caller.wrote(0)
    assert caller.failure(0)[3] == 0


def test_a_word_that_came_before_needs_no_ring(caller: Caller) -> None:
    caller.let(3, 5, ring=False)
    caller.send(1, slot=3, ready=5, done=9)
    assert caller.came(3, 9)
    assert caller.wrote(1)
    caller.send(2, slot=3, ready=6, done=10)
    caller.let(3, 6, ring=False)  # as a GPU would: nobody is rung
    assert caller.came(3, 10)
    assert caller.wrote(2)


def test_calls_of_a_slot_run_in_order_and_slots_do_not_wait_for_each_other(caller: Caller) -> None:
    for number in range(3):
        caller.send(number, slot=0, ready=number + 1, done=number + 1)
    caller.send(3, slot=1, ready=1, done=1)
    caller.let(1, 1)
    assert caller.came(1, 1)
    assert [caller.wrote(number) for number in range(4)] == [False, False, False, True]
    caller.let(0, 2)
    assert caller.came(0, 2)
    time.sleep(0.05)
    assert [caller.wrote(number) for number in range(3)] == [True, True, False]
    assert caller.done(0) == 2
    caller.let(0, 3)
    assert caller.came(0, 3)
    assert caller.wrote(2)


def test_a_word_that_does_not_come_fails_its_call_and_not_the_next(caller: Caller) -> None:
    caller.send(0, slot=2, ready=1, done=1, timeout_ms=100)
    caller.send(1, slot=2, ready=2, done=2, timeout_ms=10_000)
    assert caller.came(2, 1)
    failure = caller.failure(2)
    assert failure == (1, 1, selection_pb2.ORDERED_FAILURE_READY_TIMEOUT, 1)
    caller.let(2, 2)
    assert caller.came(2, 2)
    assert [caller.wrote(0), caller.wrote(1)] == [False, True]
    assert caller.failure(2) == failure


def test_a_run_of_failures_is_told_whole(caller: Caller) -> None:
    for done in (3, 4, 5):
        caller.send(0, slot=0, ready=1, done=done, timeout_ms=50)
    assert caller.came(0, 5)
    assert caller.failure(0) == (3, 5, selection_pb2.ORDERED_FAILURE_READY_TIMEOUT, 3)
    assert not caller.wrote(0)


def test_the_time_out_is_a_second_unless_it_is_given(caller: Caller) -> None:
    started = time.monotonic()
    caller.send(0, slot=0, ready=1, done=1)
    assert caller.came(0, 1)
    assert 0.9 < time.monotonic() - started < 5
    assert not caller.wrote(0)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"slot": 8}, "ordering.slot"),
        ({"ready": 4}, "ordering.ready"),
        ({"ready": 1 << 62}, "ordering.ready"),
        ({"done": 7}, "ordering.done"),
        ({"done": 1 << 62}, "ordering.done"),
        ({"timeout_ms": 10_001}, "ordering.ready_timeout_ms"),
    ],
)
def test_a_wrong_ordering_is_refused(caller: Caller, wrong: dict[str, int], field: str) -> None:
    caller.let(4, 5, ring=False)
    caller.send(0, slot=4, ready=5, done=7)
    assert caller.came(4, 7)
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(1, **{"slot": 4, "ready": 5, "done": 8, **wrong})
    assert refused(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    caller.send(2, slot=4, ready=5, done=9)
    assert caller.came(4, 9)
    assert [caller.wrote(1), caller.wrote(2)] == [False, True]


def test_a_refused_call_owes_nobody_its_done_word(caller: Caller) -> None:
    caller.send(0, slot=5, ready=1, done=1, timeout_ms=10_000)
    bad = selection_pb2.BatchItem()
    bad.CopyFrom(caller.pieces[1][0])
    bad.selection.k = 0
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(1, slot=5, ready=2, done=2, item=bad)
    assert refused(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "items[0].selection.k")
    time.sleep(0.05)
    assert caller.done(5) == 0  # behind the call before it
    caller.let(5, 1)
    assert caller.came(5, 2)
    assert caller.failure(5)[3] == 0  # its status has told it
    assert caller.wrote(0)


def test_tensors_of_an_ordered_call_lie_in_regions(caller: Caller) -> None:
    caller.let(0, 1, ring=False)
    scores = np.ones((ROWS, WIDTH), np.float32)
    copied = select(input=inline(scores), k=K, out_indices=caller.pieces[0][0].selection.out_indices)
    answered = select(input=caller.pieces[0][0].selection.input, k=K)
    for done, item in enumerate((copied, answered), 1):
        with pytest.raises(grpc.RpcError) as caught:
            caller.send(0, slot=0, ready=1, done=done, item=item)
        assert refused(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "ordering")
        assert caller.came(0, done)
    assert not caller.wrote(0)


def test_only_so_many_calls_may_be_under_way(caller: Caller) -> None:
    for done in range(1, 5):
        caller.send(0, slot=0, ready=1, done=done, timeout_ms=10_000)
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(1, slot=1, ready=1, done=1)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(caught.value)[0] == "QUEUE_FULL"
    caller.let(0, 1)
    assert caller.came(0, 4)
    caller.let(1, 1)
    caller.send(1, slot=1, ready=1, done=2)
    assert caller.came(1, 2)
    assert caller.wrote(1)


def test_a_region_is_released_when_the_calls_over_it_are_over(caller: Caller) -> None:
    caller.send(0, slot=0, ready=1, done=1, timeout_ms=400)
    request = selection_pb2.ReleaseRegionRequest(region_id=caller.memory.region_id)
    started = time.monotonic()
    caller.session.stub.ReleaseRegion(request, timeout=20, metadata=caller.session.metadata)
    assert 0.2 < time.monotonic() - started < 10
    assert caller.done(0) == 1
    assert not caller.wrote(0)
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(1, slot=0, ready=1, done=2)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_region_whose_release_ran_out_of_time_counts_until_it_is_unmapped(
    front: ServerProcess, caller: Caller
) -> None:
    def mapped() -> tuple[float, float]:
        page = front.metrics()
        return page['topkd_regions{memory="memfd"}'], page['topkd_region_bytes{memory="memfd"}']

    eventually(lambda: mapped() == (1, 1 << 16))
    large = caller.session.register(1 << 24)
    caller.send(0, slot=0, ready=1, done=1, timeout_ms=10_000)
    request = selection_pb2.ReleaseRegionRequest(region_id=large.region_id)
    with pytest.raises(grpc.RpcError) as caught:
        caller.session.stub.ReleaseRegion(request, timeout=0.3, metadata=caller.session.metadata)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    time.sleep(0.6)  # the worker has told the front
    assert mapped() == (2, (1 << 16) + (1 << 24))
    with pytest.raises(SideRefusedError, match="max_session_bytes"):
        caller.session.register(1 << 24)
    caller.let(0, 1)
    assert caller.came(0, 1)
    eventually(lambda: mapped() == (1, 1 << 16))
    caller.session.register(1 << 24)


def test_a_plan_is_called_in_order(caller: Caller) -> None:
    selection = caller.pieces[0][0].selection
    request = selection_pb2.CreatePlanRequest(selection=selection)
    plan = caller.session.stub.CreatePlan(request, timeout=20, metadata=caller.session.metadata)
    item = selection_pb2.BatchItem(plan=selection_pb2.PlanCall(plan_id=plan.plan_id))
    scores = caller.memory.array("float32", (ROWS, WIDTH))
    for turn in range(1, 6):
        caller.send(0, slot=0, ready=turn, done=turn, item=item)
        scores[:] = 0
        scores[:, turn : turn + K] = 1
        caller.let(0, turn)
        assert caller.came(0, turn)
        assert caller.pieces[0][1].tolist() == [list(range(turn, turn + K))] * ROWS


def test_outcomes_are_counted(front: ServerProcess, caller: Caller) -> None:
    def counts() -> list[float]:
        page = front.metrics()
        names = [f'topkd_ordered_calls_total{{outcome="{outcome}"}}' for outcome in ("finished", "ready_timeout")]
        return [
            *(page.get(name, 0.0) for name in names),
            page.get('topkd_kernel_seconds_count{dtype="float32",k="<=64",kernel="torch"}', 0.0),
        ]

    time.sleep(0.6)
    before = counts()
    caller.let(0, 1, ring=False)
    caller.send(0, slot=0, ready=1, done=1)
    caller.send(0, slot=0, ready=2, done=2, timeout_ms=50)
    assert caller.came(0, 2)
    deadline = time.monotonic() + 10
    while [after - was for after, was in zip(counts(), before, strict=True)] != [1, 1, 1]:
        assert time.monotonic() < deadline, (before, counts())
        time.sleep(0.1)


def test_sessions_over_tcp_have_no_words(front: ServerProcess) -> None:
    with attached(front) as (info, channel, _):
        stub = selection_pb2_grpc.SelectionServiceStub(channel)
        item = select(input=inline(np.ones((1, 4), np.float32)), k=1)
        ordering = selection_pb2.Ordering(slot=0, ready=0, done=1)
        request = selection_pb2.SelectTopKRequest(items=[item], ordering=ordering)
        with pytest.raises(grpc.RpcError) as caught:
            stub.SelectTopK(request, timeout=20, metadata=(("topkd-token", info.token),))
        assert refused(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "ordering")


def test_a_client_that_dies_with_calls_under_way_holds_nothing_up(front: ServerProcess) -> None:
    made = Caller(front)
    made.send(0, slot=0, ready=1, done=1, timeout_ms=10_000)
    worker = front.wait_event("attached", session=made.session.info.session_id)["worker"]
    started = time.monotonic()
    made.close()
    front.wait_event("session_ended", session=made.session.info.session_id)
    assert time.monotonic() - started < 5
    eventually(lambda: not Path(f"/proc/{worker}").exists(), 5)
    assert not made.wrote(0)


def test_a_server_that_drains_lets_calls_finish_or_fails_them(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s", drain_grace_s=1.0).wait_serving()
    try:
        made = Caller(server)
        made.send(0, slot=0, ready=1, done=1, timeout_ms=10_000)
        made.send(1, slot=1, ready=1, done=1, timeout_ms=10_000)
        server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        made.let(1, 1)
        assert made.came(1, 1)
        assert made.words.wait_done(0, POISON, 10)
        assert made.failure(0) == (1, 1, selection_pb2.ORDERED_FAILURE_SESSION_ENDED, 1)
        assert [made.wrote(0), made.wrote(1)] == [False, True]
        made.close()
        assert server.stop() == 0
    finally:
        server.popen.kill()
