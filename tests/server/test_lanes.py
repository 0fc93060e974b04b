"""Lanes by words, on the CPU backend: tables, data that is wrong, ends."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.server.harness import ServerProcess, Session, eventually, inline, refused, select
from tests.server.test_tcp import attached
from topkd._words import CLIENT_BELL, FIRST_LANE, Words
from topkd.kernels import validate_select
from topkd.server import _logging
from topkd.server._memory_host import HostBackend
from topkd.server._rpc import SelectionService
from topkd.server._state import Plan
from topkd.server._state import Session as OwnSession
from topkd.server.config import ServerLimits
from topkd.server.errors import CallCancelledError
from topkd.server.metrics import ServerMetrics
from topkd.v1 import selection_pb2, selection_pb2_grpc

ROWS, WIDTH, K = 2, 64, 4
UNTOUCHED = -7


class Caller:
    """A session with plans; the n-th one's answer is n, n + 1, ... in each row."""

    def __init__(self, server: ServerProcess, plans: int = 3) -> None:
        self.session = Session(server)
        self.words = Words(self.session.words)
        self.memory = self.session.register(1 << 15)
        self.outs, self.plans = [], []
        for number in range(plans):
            at = number * 4096
            scores = self.memory.array("float32", (ROWS, WIDTH), at)
            scores[:] = 0
            scores[:, number : number + K] = 1
            out = self.memory.array("int32", (ROWS, K), at + 2048)
            out[:] = UNTOUCHED
            item = select(
                input=self.memory.tensor("float32", (ROWS, WIDTH), at),
                k=K,
                order=selection_pb2.ORDER_INDEX,
                out_indices=self.memory.tensor("int32", (ROWS, K), at + 2048),
            )
            request = selection_pb2.CreatePlanRequest(selection=item.selection)
            reply = self.session.stub.CreatePlan(request, timeout=30, metadata=self.session.metadata)
            self.plans.append(reply.plan_id)
            self.outs.append(out)

    def open(self, *plans: int) -> int:
        request = selection_pb2.OpenLaneRequest(plan_ids=plans)
        reply = self.session.stub.OpenLane(request, timeout=30, metadata=self.session.metadata)
        assert reply.mode == selection_pb2.LANE_MODE_POLLED
        assert reply.reason
        return int(reply.lane)

    def close_lane(self, lane: int) -> None:
        request = selection_pb2.CloseLaneRequest(lane=lane)
        self.session.stub.CloseLane(request, timeout=30, metadata=self.session.metadata)

    def call(self, lane: int, number: int, ring: bool = True, timeout: float = 5) -> bool:
        line = FIRST_LANE + lane
        self.words.set_done(line, 0)
        self.words.set_ready(line, number)
        if ring:
            self.words.ring(CLIENT_BELL)
        return self.words.wait_done(line, 1, timeout)

    def wrote(self, number: int) -> bool:
        out = self.outs[number]
        right = out.tolist() == [list(range(number, number + K))] * ROWS
        assert right or bool((out == UNTOUCHED).all())
        out[:] = UNTOUCHED
        return right

    def failure(self, lane: int) -> tuple[int, int]:
        found = self.words.failure(FIRST_LANE + lane)
        return found.code, found.total

    def close(self) -> None:
        self.session.close()


@pytest.fixture(scope="module")
def caller(front: ServerProcess) -> Iterator[Caller]:
    made = Caller(front)
    yield made
    made.close()


@pytest.fixture
def lane(caller: Caller) -> Iterator[int]:
    opened = caller.open(*caller.plans)
    yield opened
    caller.close_lane(opened)


def test_a_word_calls_a_plan(caller: Caller, lane: int) -> None:
    for turn in range(60):
        number = turn % 3
        assert caller.call(lane, number + 1, ring=turn % 10 != 0)
        assert [caller.wrote(one) for one in range(3)] == [one == number for one in range(3)], turn
    assert caller.failure(lane)[1] == 0


@pytest.mark.parametrize("number", [4, 1000, (1 << 64) - 1])
def test_a_number_outside_the_table_runs_nothing(caller: Caller, lane: int, number: int) -> None:
    before = caller.failure(lane)[1]
    assert caller.call(lane, number)
    assert caller.failure(lane) == (selection_pb2.LANE_FAILURE_NO_PLAN, before + 1)
    assert not any(caller.wrote(one) for one in range(3))
    assert caller.call(lane, 1)
    assert caller.wrote(0)


def test_lanes_are_independent_and_a_closed_ones_calls_fail(front: ServerProcess, caller: Caller, lane: int) -> None:
    name = 'topkd_lane_released_total{cause="closed"}'
    released = front.metrics().get(name, 0.0)
    other = caller.open(caller.plans[2])
    assert other != lane
    assert caller.call(other, 1)
    assert caller.wrote(2)
    caller.close_lane(other)
    before = caller.failure(other)[1]
    for failures in range(1, 65):  # as many as a graph holds that was captured before
        assert caller.call(other, 1, timeout=2)
        assert caller.failure(other) == (selection_pb2.LANE_FAILURE_NO_PLAN, before + failures)
    assert not caller.wrote(2)
    eventually(lambda: front.metrics()[name] == released + 64)
    assert caller.call(lane, 2)
    assert caller.wrote(1)
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
        caller.close_lane(other)
    assert found[1] == "lane"
    again = caller.open(caller.plans[0])
    assert again == other
    assert not caller.wrote(0)  # what was asked for while it was closed is forgotten
    caller.close_lane(again)


def test_only_so_many_lanes_may_be_open(caller: Caller) -> None:
    most = caller.session.info.info.limits.max_lanes
    opened = [caller.open(caller.plans[0]) for _ in range(most)]
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as found:
        caller.open(caller.plans[0])
    assert found[0] == "LANE_LIMIT"
    for one in opened:
        caller.close_lane(one)


def test_a_lane_is_over_plans_that_are_there_and_have_outputs(caller: Caller) -> None:
    for plans, code in (((), grpc.StatusCode.INVALID_ARGUMENT), ((1,), grpc.StatusCode.NOT_FOUND)):
        with refused(code) as found:
            caller.open(*plans)
        assert found[1].startswith("plan_ids")
    item = select(input=caller.memory.tensor("float32", (ROWS, WIDTH)), k=K)
    request = selection_pb2.CreatePlanRequest(selection=item.selection)
    spare = caller.plans.pop()  # as many plans as may be are there
    caller.session.stub.ReleasePlan(selection_pb2.ReleasePlanRequest(plan_id=spare), metadata=caller.session.metadata)
    answered = caller.session.stub.CreatePlan(request, metadata=caller.session.metadata).plan_id
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
        caller.open(caller.plans[0], answered)
    assert found[1] == "plan_ids[1]"
    caller.session.stub.ReleasePlan(
        selection_pb2.ReleasePlanRequest(plan_id=answered), metadata=caller.session.metadata
    )


def test_a_table_has_no_more_plans_than_there_can_be(caller: Caller) -> None:
    most = caller.session.info.info.limits.max_plans
    caller.close_lane(caller.open(*[caller.plans[0]] * most))
    for count in (most + 1, 100_000):
        started = time.monotonic()
        with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
            caller.open(*[caller.plans[0]] * count)
        assert found[1] == "plan_ids"
        assert time.monotonic() - started < 5.0


def test_a_lane_that_nobody_waits_for_is_closed_again(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    switches: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", switches.append)
    limits, metrics = ServerLimits(max_lanes=1), ServerMetrics(CollectorRegistry())
    service = SelectionService(HostBackend(1), limits, metrics, _logging.configure("error", "json", process="test"))
    session = service_session(limits, metrics, page)
    request = validate_select(torch.zeros(1, 8), 1, out_indices=torch.zeros(1, 1, dtype=torch.int32))
    plan = session.add_plan(Plan(request, "torch", "", frozenset()))
    message = selection_pb2.OpenLaneRequest(plan_ids=[plan]).SerializeToString()
    for answers in ([True, False], [False]):  # it goes while the lane is opened, or before
        with pytest.raises(CallCancelledError):
            service.open_lane(session, message, Caring(answers))
    reply = service.open_lane(session, message, Caring([True, True]))
    assert selection_pb2.OpenLaneResponse.FromString(reply).lane == 0
    assert switches, "the threads of lanes must not wait for the interpreter for long"
    assert max(switches) <= 1e-3
    session.close()


class Caring:
    """The context of a call whose caller is there, or not, when asked."""

    def __init__(self, answers: list[bool]) -> None:
        self.is_active = iter(answers).__next__

    def time_remaining(self) -> None:
        return None

    def add_callback(self, call: Any) -> bool:
        return True


def service_session(limits: ServerLimits, metrics: ServerMetrics, page: int) -> OwnSession:
    session = OwnSession("own", limits, metrics, False)
    session.words = Words(page)
    return session


def test_a_released_plan_is_not_run_any_more(front: ServerProcess) -> None:
    made = Caller(front)
    lane = made.open(*made.plans)
    request = selection_pb2.ReleasePlanRequest(plan_id=made.plans[1])
    made.session.stub.ReleasePlan(request, metadata=made.session.metadata)
    assert made.call(lane, 2)
    assert made.failure(lane) == (selection_pb2.LANE_FAILURE_NO_PLAN, 1)
    assert made.call(lane, 1)
    assert [made.wrote(one) for one in range(3)] == [True, False, False]
    release = selection_pb2.ReleaseRegionRequest(region_id=made.memory.region_id)
    made.session.stub.ReleaseRegion(release, metadata=made.session.metadata)
    assert made.call(lane, 1)
    assert made.failure(lane) == (selection_pb2.LANE_FAILURE_NO_PLAN, 2)
    assert not made.wrote(0)
    made.close()


def test_lanes_and_requests_take_turns(caller: Caller, lane: int) -> None:
    done: list[int] = []

    def requests() -> None:
        scores = inline(np.ones((1, 64), np.float32))
        for _ in range(30):
            caller.session.select(select(input=scores, k=1))
            done.append(1)

    thread = threading.Thread(target=requests)
    thread.start()
    while thread.is_alive():
        assert caller.call(lane, 1)
        assert caller.wrote(0)
    thread.join()
    assert len(done) == 30


def test_calls_are_counted(front: ServerProcess, caller: Caller, lane: int) -> None:
    names = [f'topkd_lane_calls_total{{mode="polled",outcome="{outcome}"}}' for outcome in ("finished", "failed")]
    time.sleep(0.6)
    before = [front.metrics().get(name, 0.0) for name in names]
    caller.call(lane, 1)
    caller.call(lane, 9)
    eventually(lambda: [front.metrics().get(name, 0.0) for name in names] == [one + 1 for one in before])
    eventually(lambda: front.metrics().get('topkd_lanes{mode="polled"}', 0) >= 1)
    caller.wrote(0)


def test_sessions_over_tcp_have_no_lanes(front: ServerProcess) -> None:
    with attached(front) as (info, channel, _):
        stub: Any = selection_pb2_grpc.SelectionServiceStub(channel)
        with refused(grpc.StatusCode.FAILED_PRECONDITION) as found:
            request = selection_pb2.OpenLaneRequest(plan_ids=[1])
            stub.OpenLane(request, metadata=(("topkd-token", info.token),))
        assert found[0] == "DEVICE_MISMATCH"


def test_the_end_of_a_session_is_told_to_who_waits(front: ServerProcess) -> None:
    made = Caller(front)
    lane = made.open(made.plans[0])
    assert made.call(lane, 1)
    worker = front.wait_event("attached", session=made.session.info.session_id)["worker"]
    made.session.sock.close()
    eventually(lambda: made.failure(lane) == (selection_pb2.LANE_FAILURE_SESSION_ENDED, 1), 10)
    assert made.words.wait_done(FIRST_LANE + lane, 1, 5)
    eventually(lambda: worker not in front.children(), 10)
    made.session.channel.close()
