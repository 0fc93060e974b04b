"""Without a session's token no method does anything: every one of the protocol, at every endpoint of a host."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.e2e import access, processes, raw, scrape
from tests.e2e.access import METHODS, REFLECTION, Method
from tests.e2e.raw import RawSession, Refusal, attached
from tests.e2e.servers import Running, health
from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2, tensor_pb2

pytestmark = pytest.mark.timeout(60)
KINDS = list(access.wrong_credentials("x", "y"))


@pytest.fixture(scope="module")
def sessions(cpu: Running) -> Iterator[tuple[RawSession, RawSession]]:
    """Two sessions, each a stranger to the other's worker."""
    with attached(cpu.socket_dir) as own, attached(cpu.socket_dir) as other:
        yield own, other


@pytest.fixture(scope="module")
def front(cpu: Running) -> Iterator[grpc.Channel]:
    with raw.front(cpu.socket_dir) as channel:
        yield channel


def test_the_protocol_has_the_methods_that_are_known() -> None:
    assert {"SelectTopK", "MergeTopK", "CreatePlan", "RegisterRegion", "GetServerInfo", "Attach"} <= {
        method.name for method in METHODS
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [*METHODS, REFLECTION], ids=lambda method: method.name)
@pytest.mark.parametrize("endpoint", ["front", "worker"])
def test_no_method_without_the_token(
    sessions: tuple[RawSession, RawSession], front: grpc.Channel, endpoint: str, method: Method, kind: str
) -> None:
    own, other = sessions
    foreign = other.session.token if endpoint == "worker" else other.session.session_id
    metadata = access.wrong_credentials(own.session.token, foreign)[kind]
    got = method.call(front if endpoint == "front" else own.channel, metadata)
    assert isinstance(got, Refusal), f"{method.path} answered a stranger"
    assert (got.code, got.reason) == ("UNAUTHENTICATED", "TOKEN_INVALID"), got
    assert own.session.token not in got.message


def test_bytes_that_are_no_message_tell_a_stranger_nothing(sessions: tuple[RawSession, RawSession]) -> None:
    for method in METHODS:
        got = method.call(sessions[0].channel, (), b"\xff" * 16)
        assert isinstance(got, Refusal)
        assert got.code == "UNAUTHENTICATED", got


def test_the_front_answers_bytes_that_are_no_message(
    sessions: tuple[RawSession, RawSession], front: grpc.Channel
) -> None:
    method = next(method for method in METHODS if method.name == "GetServerInfo")
    got = method.call(front, sessions[0].metadata, b"\xff" * 16)
    assert isinstance(got, Refusal)
    assert got.code == "INVALID_ARGUMENT", got


def test_the_token_opens_the_front(sessions: tuple[RawSession, RawSession], front: grpc.Channel, cpu: Running) -> None:
    request = control_pb2.GetServerInfoRequest()
    stub = control_pb2_grpc.ControlServiceStub(front)
    info = stub.GetServerInfo(request, metadata=sessions[0].metadata, timeout=raw.TIMEOUT).info
    assert info.epoch == sessions[0].session.info.epoch
    assert info.sessions == 2
    assert info.device.backend == control_pb2.BACKEND_CPU
    assert [family.name for family in info.kernels] == [family.name for family in sessions[0].session.info.kernels]
    assert info.limits.max_queue > 0


def test_health_needs_no_token(front: grpc.Channel) -> None:
    assert health(front) == "SERVING"


def test_reflection_shows_the_services_to_a_session(
    sessions: tuple[RawSession, RawSession], front: grpc.Channel
) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(front)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    replies = stub.ServerReflectionInfo(requests, metadata=sessions[0].metadata, timeout=raw.TIMEOUT)
    names = {service.name for service in next(replies).list_services_response.service}
    assert {method.service for method in METHODS} | {"grpc.health.v1.Health"} <= names


def test_a_token_dies_with_its_session(cpu: Running, front: grpc.Channel) -> None:
    with attached(cpu.socket_dir) as session:
        metadata = session.metadata
        worker = processes.listener(session.worker_socket)
        session.select(selection_pb2.Selection(input=_row(), k=1))
    processes.wait_until(lambda: not processes.alive(worker), 5, "the worker ends with its session")
    got = raw.refused(
        control_pb2_grpc.ControlServiceStub(front).GetServerInfo, control_pb2.GetServerInfoRequest(), metadata=metadata
    )
    assert got.code == "UNAUTHENTICATED"
    assert not session.worker_socket.exists()
    scrape.wait_for(cpu.metrics_port, {"topkd_sessions": 2})


def _row() -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FLOAT32, shape=(1, 2), inline_data=bytes(8))


def test_modes_of_the_sockets(cpu: Running, sessions: tuple[RawSession, RawSession]) -> None:
    assert cpu.socket_dir.stat().st_mode & 0o777 == 0o750
    sockets = [path for path in cpu.socket_dir.iterdir() if path.is_socket()]
    assert {"attach.sock", "grpc.sock", sessions[0].worker_socket.name} <= {path.name for path in sockets}
    for path in sockets:
        assert path.stat().st_mode & 0o777 == 0o660, path
