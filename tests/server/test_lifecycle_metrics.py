"""What the metrics say of sessions' ends, of worse kernels, and of how many series there may be."""

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from tests.server.harness import ServerProcess, Session, eventually, inline, select
from topkd import kernels
from topkd.server._execute import FALLBACK_REASONS, fallback_reason
from topkd.server.metrics import K_CLASSES, LATENCY_BUCKETS
from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2, side_pb2

PLANS = 1000
WIDTH = 4096


def ended(front: ServerProcess, cause: str) -> float:
    return front.metrics()[f'topkd_sessions_ended_total{{cause="{cause}",transport="unix"}}']


@pytest.fixture(autouse=True)
def _all_ends_are_counted(front: ServerProcess) -> None:
    """An end is counted a moment after the session is closed: once its cause is known."""

    def settled() -> bool:
        page = front.metrics()
        ends = sum(value for name, value in page.items() if name.startswith("topkd_sessions_ended_total"))
        begun = sum(value for name, value in page.items() if name.startswith('topkd_attaches_total{outcome="attached"'))
        return begun - ends == sum(value for name, value in page.items() if name.startswith("topkd_sessions{"))

    eventually(settled, 30)


@pytest.mark.parametrize("cause", ["detached", "client_gone", "worker_lost"])
def test_the_ends_of_sessions_are_told_apart(front: ServerProcess, cause: str) -> None:
    before = {each: ended(front, each) for each in ("detached", "client_gone", "worker_lost", "drained")}
    crashes = front.metrics()["topkd_worker_crashes_total"]
    session = Session(front)
    if cause == "detached":
        session.sock.send(side_pb2.SideRequest(detach=side_pb2.Detach()).SerializeToString())
    elif cause == "worker_lost":
        pid = front.wait_event("attached", session=session.info.session_id)["worker"]
        os.kill(pid, signal.SIGKILL)
        assert session.sock.recv(1) == b""
    session.close()
    eventually(lambda: ended(front, cause) == before[cause] + 1, 5)
    assert {each: ended(front, each) for each in before} == {**before, cause: before[cause] + 1}
    assert front.metrics()["topkd_worker_crashes_total"] == crashes + (cause == "worker_lost")


def test_a_client_that_waits_for_a_worker_is_no_open_session(roomy: ServerProcess) -> None:
    front = roomy  # with one spare
    gauge = 'topkd_sessions{transport="unix"}'
    eventually(lambda: front.metrics()[gauge] == 0, 30)
    eventually(lambda: front.metrics()['topkd_workers{state="spare"}'] == 1, 60)
    first = Session(front)  # takes the spare
    before = sum(value for name, value in front.metrics().items() if name.startswith("topkd_sessions_ended_total"))
    waiting = side_connection(front)
    page = front.metrics()
    assert page['topkd_workers{state="spare"}'] == 0, "no worker was ready"
    assert page[gauge] == 1
    with grpc.insecure_channel(f"unix:{front.socket_dir}/grpc.sock") as channel:
        request = control_pb2.GetServerInfoRequest()
        info = control_pb2_grpc.ControlServiceStub(channel).GetServerInfo(request, metadata=first.metadata, timeout=10)
    assert info.info.sessions == 1
    waiting.close()  # before it was attached: nothing has ended
    eventually(lambda: front.metrics()['topkd_workers{state="spare"}'] >= 1, 60)
    page = front.metrics()
    assert page[gauge] == 1
    assert sum(value for name, value in page.items() if name.startswith("topkd_sessions_ended_total")) == before
    first.close()


def side_connection(front: ServerProcess) -> socket.socket:
    """Returns a connection that has asked for a session and not been answered."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(str(front.socket_dir / "attach.sock"))
    made.send(side_pb2.SideRequest(attach=control_pb2.AttachRequest(protocol_revision=2)).SerializeToString())
    time.sleep(0.2)
    return made


@pytest.mark.parametrize("cause", ["detached", "client_gone"])
def test_a_worker_that_sees_its_clients_end_first_has_not_crashed(front: ServerProcess, cause: str) -> None:
    """The front is stopped while a client goes: its worker ends by itself meanwhile."""
    before, crashes = ended(front, cause), front.metrics()["topkd_worker_crashes_total"]
    session = Session(front)
    pid = front.wait_event("attached", session=session.info.session_id)["worker"]
    front.popen.send_signal(signal.SIGSTOP)
    try:
        if cause == "detached":
            session.sock.send(side_pb2.SideRequest(detach=side_pb2.Detach()).SerializeToString())
        session.close()
        eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", 10)
    finally:
        front.popen.send_signal(signal.SIGCONT)
    assert front.wait_event("session_ended", session=session.info.session_id)["cause"] == cause
    eventually(lambda: ended(front, cause) == before + 1, 5)
    assert front.metrics()["topkd_worker_crashes_total"] == crashes


def test_a_worker_that_fails_after_its_client_has_hung_up_has_crashed(front: ServerProcess) -> None:
    """A client hangs up as soon as its worker's sockets close, which is before the process has ended."""
    lost, crashes = ended(front, "worker_lost"), front.metrics()["topkd_worker_crashes_total"]
    session = Session(front)
    pid = front.wait_event("attached", session=session.info.session_id)["worker"]
    os.kill(pid, signal.SIGSTOP)
    session.close()
    eventually(lambda: front.metrics()['topkd_workers{state="ending"}'] == 1, 5)
    os.kill(pid, signal.SIGKILL)
    assert front.wait_event("session_ended", session=session.info.session_id)["cause"] == "worker_lost"
    assert ended(front, "worker_lost") == lost + 1
    assert front.metrics()["topkd_worker_crashes_total"] == crashes + 1


def test_a_worker_that_is_killed_for_being_late_has_not_crashed(front: ServerProcess) -> None:
    gone, page = ended(front, "client_gone"), front.metrics()
    session = Session(front)
    pid = front.wait_event("attached", session=session.info.session_id)["worker"]
    os.kill(pid, signal.SIGSTOP)
    session.close()
    assert front.wait_event("session_ended", session=session.info.session_id)["cause"] == "client_gone"
    eventually(lambda: front.metrics()["topkd_worker_kills_total"] == page["topkd_worker_kills_total"] + 1, 10)
    eventually(lambda: front.metrics()['topkd_workers{state="ending"}'] == 0, 5)
    assert ended(front, "client_gone") == gone + 1
    assert front.metrics()["topkd_worker_crashes_total"] == page["topkd_worker_crashes_total"]


def test_attaches_are_timed_and_those_after_a_loss_counted(front: ServerProcess) -> None:
    names = ('topkd_reattaches_total{transport="unix"}', 'topkd_attach_seconds_count{transport="unix"}')
    before = [front.metrics()[name] for name in names]
    Session(front, reattach=True).close()
    Session(front).close()
    now = front.metrics()
    assert [now[name] for name in names] == [before[0] + 1, before[1] + 2]


def test_the_fill_of_the_queue_is_seen_after_the_fact(front: ServerProcess) -> None:
    with Session(front) as session:
        item = select(input=inline(np.ones((1, 8), dtype=np.float32)), k=1)
        request = selection_pb2.SelectTopKRequest(items=[item])
        for call in [session.stub.SelectTopK.future(request, metadata=session.metadata) for _ in range(4)]:
            call.exception()
        eventually(lambda: front.metrics()["topkd_queue_fill_ratio"] >= 0.25, 5)  # max_queue is 4 here
    assert front.metrics()["topkd_queue_fill_ratio"] <= 1


def on_gpu(request: kernels.SelectRequest) -> Any:
    """A request as the choice sees it, but for its tensor's device."""

    class OnGpu(kernels.SelectRequest):
        input = SimpleNamespace(is_cuda=True)

    copy = object.__new__(OnGpu)
    object.__setattr__(copy, "kernel", request.kernel)
    return copy


def test_fallbacks_have_a_reason_and_choices_none(monkeypatch: pytest.MonkeyPatch) -> None:
    request = kernels.validate_select(torch.zeros(2, 64), 4)
    asked = kernels.validate_select(torch.zeros(2, 64), 4, kernel="torch")
    kernel, reason = kernels.choose(request)
    assert fallback_reason(kernel, reason, {}, request) is None  # on the CPU torch is what there is
    assert fallback_reason("torch", reason, {}, on_gpu(request)) == "unsupported"
    assert fallback_reason("torch", "asked for by name", {}, on_gpu(asked)) is None
    assert fallback_reason("radix_wide", "the first family that serves the request", {}, on_gpu(request)) is None


def test_a_family_without_code_is_a_fallback_reason_in_the_words_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from topkd.kernels import _cute_compile, _dispatch

    family = kernels.kernels()[0]
    monkeypatch.setitem(_cute_compile._FAILURES, family, "no compiler")
    monkeypatch.setattr(type(_dispatch._FAMILIES[0]), "unmet", lambda self, request: None)
    request = kernels.validate_select(torch.zeros(2, 64), 4)
    kernel, reason = kernels.choose(request)
    assert kernel != family
    assert fallback_reason(kernel, reason, kernels.failures(), request) == "no_code"


@pytest.fixture(scope="module")
def roomy() -> Iterator[ServerProcess]:
    """A server that takes many plans, with one spare."""
    path = Path(tempfile.mkdtemp(prefix="topkd-"))
    server = ServerProcess(path / "s", max_plans=PLANS, max_sessions=2)
    try:
        yield server.wait_serving()
    finally:
        server.stop()
        shutil.rmtree(path, ignore_errors=True)


def run_plans(session: Session, tensors: Any, numbers: range) -> None:
    """Makes plans that differ in shape, dtype, k and options, and runs each once."""
    for number in numbers:
        rows, dtype = 1 + number % 7, ("float32", "float16")[number % 2]
        scores = tensors(dtype, (rows, WIDTH - number))
        k = (40, 400, 1500, 3000, 5000)[number % 5] + number % 24
        order = selection_pb2.ORDER_VALUE if number % 3 == 0 else selection_pb2.ORDER_INDEX
        selection = selection_pb2.Selection(input=scores, k=k, order=order)
        made = session.stub.CreatePlan(
            selection_pb2.CreatePlanRequest(selection=selection), metadata=session.metadata, timeout=30
        )
        call = selection_pb2.PlanCall(plan_id=made.plan_id)
        session.select(selection_pb2.BatchItem(plan=call))


def test_a_thousand_plans_add_no_series(roomy: ServerProcess) -> None:
    with Session(roomy) as session:
        memory = session.register(8 * WIDTH * 4)
        run_plans(session, memory.tensor, range(40))
        count = 'topkd_kernel_seconds_count{dtype="float32",k="<=64",kernel="torch"}'
        eventually(lambda: roomy.metrics()["topkd_plans"] == 40 and roomy.metrics().get(count, 0) > 0, 5)
        few = set(roomy.metrics())
        run_plans(session, memory.tensor, range(40, PLANS))
        eventually(lambda: roomy.metrics()["topkd_plans"] == PLANS, 5)
        many = set(roomy.metrics())
    assert many == few
    families, dtypes, classes = len(kernels.kernels()) + 1, 3, len(K_CLASSES) + 1  # with "merge"
    measured = [name for name in many if name.startswith("topkd_kernel_seconds_count")]
    assert len(measured) == 2 * classes  # both dtypes, every class of k
    assert len(measured) <= families * dtypes * classes
    assert len(many) < 1000, "the whole page"
    assert families * dtypes * classes * (len(LATENCY_BUCKETS) + 3) < 4000, "the largest that the family can become"


def test_reasons_and_causes_are_closed_lists(roomy: ServerProcess) -> None:
    page = roomy.metrics()
    found = {name for name in page if name.startswith("topkd_fallbacks_total")}
    assert len(found) == len(kernels.kernels()) * len(FALLBACK_REASONS)
    assert not any(page[name] for name in found)
