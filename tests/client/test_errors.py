from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from topkd import _status, errors
from topkd.v1 import side_pb2

REASONS = [
    ("INVALID_ARGUMENT", "ARGUMENT_TYPE", "ArgumentTypeError"),
    ("INVALID_ARGUMENT", "ARGUMENT_VALUE", "ArgumentValueError"),
    ("UNAUTHENTICATED", "TOKEN_INVALID", "AuthenticationError"),
    ("PERMISSION_DENIED", "PEER_NOT_ALLOWED", "PermissionDeniedError"),
    ("NOT_FOUND", "REGION_NOT_FOUND", "NotFoundError"),
    ("NOT_FOUND", "PLAN_NOT_FOUND", "NotFoundError"),
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "ResourceExhaustedError"),
    ("RESOURCE_EXHAUSTED", "SESSION_LIMIT", "ResourceExhaustedError"),
    ("RESOURCE_EXHAUSTED", "REGION_LIMIT", "ResourceExhaustedError"),
    ("RESOURCE_EXHAUSTED", "PLAN_LIMIT", "ResourceExhaustedError"),
    ("UNAVAILABLE", "DRAINING", "UnavailableError"),
    ("UNAVAILABLE", "STARTING", "UnavailableError"),
    ("UNAVAILABLE", "WORKER_LOST", "SessionLostError"),
    ("UNAVAILABLE", "", "SessionLostError"),
    ("INTERNAL", "KERNEL_FAILED", "KernelError"),
    ("FAILED_PRECONDITION", "IPC_OPEN_FAILED", "RegionError"),
    ("FAILED_PRECONDITION", "DEVICE_MISMATCH", "RegionError"),
    ("FAILED_PRECONDITION", "MEMFD_NOT_SEALED", "RegionError"),
    ("DEADLINE_EXCEEDED", "DEADLINE", "DeadlineExceededError"),
    ("DATA_LOSS", "", "ServerError"),
    ("UNIMPLEMENTED", "", "ProtocolError"),
]


class FakeRpcError(grpc.RpcError):
    """What grpc raises, as far as it is read."""

    def __init__(self, code: str, message: str, details: bytes | None) -> None:
        self._code, self._message, self._details = code, message, details

    def code(self) -> Any:
        return grpc.StatusCode[self._code]

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> Any:
        return () if self._details is None else (("grpc-status-details-bin", self._details),)


def rich(*details: Any) -> bytes:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return bytes(status_pb2.Status(details=packed).SerializeToString())


def raised(code: str, message: str = "text", *details: Any) -> errors.TopkdError:
    data = rich(*details) if details else None
    return _status.to_error(_status.from_rpc(FakeRpcError(code, message, data)))


@pytest.mark.parametrize(("code", "reason", "name"), REASONS)
def test_each_reason_has_its_class(code: str, reason: str, name: str) -> None:
    error = raised(code, "text", error_details_pb2.ErrorInfo(reason=reason, domain="topkd.v1"))
    assert type(error).__name__ == name
    assert (str(error), error.reason, error.code) == ("text", reason, code)


def test_reasons_of_other_domains_are_not_ours() -> None:
    error = raised("UNAVAILABLE", "x", error_details_pb2.ErrorInfo(reason="DRAINING", domain="elsewhere"))
    assert isinstance(error, errors.SessionLostError)


@pytest.mark.parametrize(
    ("path", "selection", "argument"),
    [
        ("items[3].selection.lengths", 3, "lengths"),
        ("items[12].selection.input.strides[1]", 12, "input"),
        ("selection.k", 0, "k"),
        ("items[2].plan.plan_id", 2, "plan_id"),
        ("items[1]", 1, ""),
        ("items[1].k", 1, "k"),
        ("memory.size", 0, "memory"),
        ("", 0, ""),
    ],
)
def test_field_paths_become_the_argument_and_its_place(path: str, selection: int, argument: str) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field=path)
    info = error_details_pb2.ErrorInfo(reason="ARGUMENT_VALUE", domain="topkd.v1")
    error = raised("INVALID_ARGUMENT", "bad", info, error_details_pb2.BadRequest(field_violations=[violation]))
    assert isinstance(error, errors.ArgumentValueError)
    assert (error.selection, error.argument) == (selection, argument)


def test_retry_info_becomes_seconds() -> None:
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="topkd.v1")
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=250_000_000))
    error = raised("RESOURCE_EXHAUSTED", "full", info, retry)
    assert isinstance(error, errors.ResourceExhaustedError)
    assert error.retry_after == 0.25


def test_words_of_grpc_on_a_deadline_are_not_passed_on() -> None:
    assert str(raised("DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)")) == (
        "the call's time-out passed before the server answered"
    )
    info = error_details_pb2.ErrorInfo(reason="DEADLINE", domain="topkd.v1")
    assert str(raised("DEADLINE_EXCEEDED", "it was not run", info)) == "it was not run"


def test_broken_details_leave_code_and_message() -> None:
    error = _status.to_error(_status.from_rpc(FakeRpcError("NOT_FOUND", "gone", b"\xff\xff\xff")))
    assert isinstance(error, errors.NotFoundError)
    assert str(error) == "gone"


def test_refusals_of_the_side_socket() -> None:
    side = side_pb2.SideError(code=8, reason="SESSION_LIMIT", message="16 sessions", retry_after_ms=500)
    error = _status.to_error(_status.from_side(side))
    assert isinstance(error, errors.ResourceExhaustedError)
    assert (error.retry_after, error.code, str(error)) == (0.5, "RESOURCE_EXHAUSTED", "16 sessions")
    assert type(_status.to_error(_status.from_side(side_pb2.SideError(code=99)))) is errors.ServerError


def test_builtin_bases() -> None:
    assert issubclass(errors.ArgumentTypeError, TypeError)
    assert issubclass(errors.ArgumentValueError, ValueError)
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert issubclass(errors.CaptureError, RuntimeError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.TopkdError)
