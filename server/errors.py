"""The one table from exceptions to gRPC statuses, and the server's exceptions.

    ServerError
      FieldError            a field of a request that is wrong
        FieldTypeError      ... by its type
      TokenInvalidError          PeerNotAllowedError
      RegionNotFoundError        PlanNotFoundError
      QueueFullError             SessionLimitError   RegionLimitError   PlanLimitError   LaneLimitError
      DrainingError              StartingError       WorkerLostError
      KernelFailedError
      IpcOpenFailedError         DeviceMismatchError MemfdNotSealedError
      DeadlinePassedError        CallCancelledError

`ArgumentTypeError` and `ArgumentValueError` of `topkd.kernels` are known by their base class and their `argument`, so
that nothing here imports torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from topkd.v1 import selection_pb2, side_pb2

__all__ = [
    "DOMAIN",
    "CallCancelledError",
    "DeadlinePassedError",
    "DeviceMismatchError",
    "DrainingError",
    "FieldError",
    "FieldTypeError",
    "IpcOpenFailedError",
    "KernelFailedError",
    "LaneLimitError",
    "MemfdNotSealedError",
    "Outcome",
    "PeerNotAllowedError",
    "PlanLimitError",
    "PlanNotFoundError",
    "QueueFullError",
    "RegionLimitError",
    "RegionNotFoundError",
    "ServerError",
    "SessionLimitError",
    "StartingError",
    "TokenInvalidError",
    "WorkerLostError",
    "outcome_of",
    "to_call_error",
    "to_side_error",
    "to_status",
]

DOMAIN = "topkd.v1"
_LONGEST_MESSAGE = 1000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class ServerError(Exception):
    """What the server says to a caller.

    Attributes:
        field: path of the request's field at fault, or "".
        retry_after_ms: when a later try can succeed, or 0.
    """

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.field = field
        self.retry_after_ms = retry_after_ms


class FieldError(ServerError):
    """A field whose value is wrong."""


class FieldTypeError(FieldError):
    """A field whose type is wrong."""


class TokenInvalidError(ServerError):
    """No token, or one of no open session."""

    def __init__(self, message: str = "topkd-token is absent or belongs to no open session") -> None:
        super().__init__(message)


class PeerNotAllowedError(ServerError):
    """A peer that is not on the allow list."""


class RegionNotFoundError(ServerError):
    """An id of no region of the session."""

    def __init__(self, region_id: int, field: str = "region_id") -> None:
        super().__init__(f"no region {region_id:#018x}", field=field)


class PlanNotFoundError(ServerError):
    """An id of no plan of the session."""

    def __init__(self, plan_id: int, field: str = "plan_id") -> None:
        super().__init__(f"no plan {plan_id:#018x}", field=field)


class QueueFullError(ServerError):
    """As many requests of the session as may wait or run do already."""


class SessionLimitError(ServerError):
    """As many sessions as may be open are."""


class RegionLimitError(ServerError):
    """A bound on the regions of a session is reached."""


class PlanLimitError(ServerError):
    """A session has as many plans as it may."""


class LaneLimitError(ServerError):
    """A session has as many lanes as it may."""


class DrainingError(ServerError):
    """The server takes no new work and will end."""

    def __init__(self, message: str = "the server is draining and takes no new work") -> None:
        super().__init__(message)


class StartingError(ServerError):
    """The server is not warm yet."""


class WorkerLostError(ServerError):
    """The process that served the session is gone."""


class KernelFailedError(ServerError):
    """A kernel raised or its launch failed."""


class IpcOpenFailedError(ServerError):
    """Shared memory that cannot be opened."""


class DeviceMismatchError(ServerError):
    """Memory of another device, or of a kind that the backend does not take."""


class MemfdNotSealedError(ServerError):
    """A descriptor without the seals that host memory needs."""


class DeadlinePassedError(ServerError):
    """The deadline passed before the request ran; nothing was run."""


class CallCancelledError(ServerError):
    """The caller gave up before the request ran; nothing was run."""


@dataclass(frozen=True)
class Outcome:
    """How an exception is answered.

    Attributes:
        code: number of a google.rpc.Code.
        reason: ErrorInfo's reason.
    """

    code: int
    reason: str

    @property
    def name(self) -> str:
        """Name of the code."""
        return str(code_pb2.Code.Name(self.code))


TABLE: Mapping[type[Exception], Outcome] = {
    FieldTypeError: Outcome(code_pb2.INVALID_ARGUMENT, "ARGUMENT_TYPE"),
    FieldError: Outcome(code_pb2.INVALID_ARGUMENT, "ARGUMENT_VALUE"),
    TokenInvalidError: Outcome(code_pb2.UNAUTHENTICATED, "TOKEN_INVALID"),
    PeerNotAllowedError: Outcome(code_pb2.PERMISSION_DENIED, "PEER_NOT_ALLOWED"),
    RegionNotFoundError: Outcome(code_pb2.NOT_FOUND, "REGION_NOT_FOUND"),
    PlanNotFoundError: Outcome(code_pb2.NOT_FOUND, "PLAN_NOT_FOUND"),
    QueueFullError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    SessionLimitError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "SESSION_LIMIT"),
    RegionLimitError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "REGION_LIMIT"),
    PlanLimitError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "PLAN_LIMIT"),
    LaneLimitError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "LANE_LIMIT"),
    DrainingError: Outcome(code_pb2.UNAVAILABLE, "DRAINING"),
    StartingError: Outcome(code_pb2.UNAVAILABLE, "STARTING"),
    WorkerLostError: Outcome(code_pb2.UNAVAILABLE, "WORKER_LOST"),
    KernelFailedError: Outcome(code_pb2.INTERNAL, "KERNEL_FAILED"),
    IpcOpenFailedError: Outcome(code_pb2.FAILED_PRECONDITION, "IPC_OPEN_FAILED"),
    DeviceMismatchError: Outcome(code_pb2.FAILED_PRECONDITION, "DEVICE_MISMATCH"),
    MemfdNotSealedError: Outcome(code_pb2.FAILED_PRECONDITION, "MEMFD_NOT_SEALED"),
    DeadlinePassedError: Outcome(code_pb2.DEADLINE_EXCEEDED, "DEADLINE"),
    CallCancelledError: Outcome(code_pb2.CANCELLED, "CANCELLED"),
}
_UNKNOWN = Outcome(code_pb2.INTERNAL, "INTERNAL")


def outcome_of(error: Exception) -> Outcome:
    """Looks an exception up in the table; what is not in it is INTERNAL."""
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    if hasattr(error, "argument"):
        return TABLE[FieldTypeError if isinstance(error, TypeError) else FieldError]
    return _UNKNOWN


def message_of(error: Exception, request_id: str = "") -> str:
    """Words an exception for the caller: bounded, without addresses; of unknown ones nothing but the request id."""
    if outcome_of(error) is _UNKNOWN:
        return f"internal error; the server's log has it under request id {request_id or 'unknown'}"
    text = _ADDRESS.sub("", str(error))
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."


def _field_of(error: Exception) -> str:
    return str(getattr(error, "field", "") or getattr(error, "argument", ""))


def to_status(error: Exception, request_id: str = "") -> status_pb2.Status:
    """Builds the status of an exception, with ErrorInfo and, where they apply, BadRequest and RetryInfo."""
    outcome, message, field = outcome_of(error), message_of(error, request_id), _field_of(error)
    metadata = {"request_id": request_id} if request_id else {}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=outcome.reason, domain=DOMAIN, metadata=metadata)]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message, reason=outcome.reason)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry := getattr(error, "retry_after_ms", 0):
        delay = duration_pb2.Duration(seconds=retry // 1000, nanos=retry % 1000 * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=outcome.code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def to_call_error(error: Exception, request_id: str = "") -> selection_pb2.CallError:
    """Builds the form of an exception that answers a call on a stream."""
    outcome = outcome_of(error)
    return selection_pb2.CallError(
        code=outcome.code,
        reason=outcome.reason,
        message=message_of(error, request_id),
        field=_field_of(error),
        retry_after_ms=getattr(error, "retry_after_ms", 0),
    )


def to_side_error(error: Exception) -> side_pb2.SideError:
    """Builds the side socket's form of an exception."""
    outcome = outcome_of(error)
    return side_pb2.SideError(
        code=outcome.code,
        reason=outcome.reason,
        message=message_of(error),
        field=_field_of(error),
        retry_after_ms=getattr(error, "retry_after_ms", 0),
    )
