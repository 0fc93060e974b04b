"""From a gRPC status, or a refusal of the side socket, to an exception of `topkd.errors`.

May import grpc and google.rpc; knows nothing of sessions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from topkd.errors import (
    ArgumentError,
    ResourceExhaustedError,
    TopkdError,
    UnavailableError,
    error_class,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from topkd.v1 import side_pb2

__all__ = ["CallFailedError", "Failure", "from_rpc", "from_side", "to_error"]

DOMAIN = "topkd.v1"
_PATH = re.compile(r"(?:^|\.)items\[(\d+)\]")
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class Failure:
    """What a server said of a failed call.

    Attributes:
        code: The status code's name.
        message: For people.
        reason: ErrorInfo reason of the domain `topkd.v1`, or "".
        path: Field path of the first violation, or "".
        retry_after: Seconds, or None.
    """

    code: str
    message: str
    reason: str = ""
    path: str = ""
    retry_after: float | None = field(default=None)


class CallFailedError(Exception):
    """What a server said of a call on a stream; `Session.error_of` makes the public error of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def from_rpc(error: Any) -> Failure:
    """Reads a `grpc.RpcError`, its rich details included."""
    failure = Failure(error.code().name, error.details() or "")
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            _read_details(failure, value)
    return failure


def _read_details(failure: Failure, data: bytes) -> None:
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    try:
        details = status_pb2.Status.FromString(data).details
        _read_each(failure, details, error_details_pb2)
    except DecodeError:
        return  # The code and the message stand without it.


def _read_each(failure: Failure, details: Iterable[Any], pb: Any) -> None:
    info, bad_request, retry = pb.ErrorInfo(), pb.BadRequest(), pb.RetryInfo()
    for detail in details:
        if detail.Unpack(info):
            failure.reason = info.reason if info.domain == DOMAIN else failure.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            failure.path = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            failure.retry_after = retry.retry_delay.ToTimedelta().total_seconds()


def from_side(error: side_pb2.SideError) -> Failure:
    """Reads a refusal of the side socket."""
    code = _CODE_NAMES.get(error.code, "UNKNOWN")
    retry_after = error.retry_after_ms / 1000 if error.retry_after_ms else None
    return Failure(code, error.message, error.reason, error.field, retry_after)


def to_error(failure: Failure) -> TopkdError:
    """Makes the exception."""
    kind = error_class(failure.code, failure.reason)
    message = failure.message or failure.reason or failure.code
    if failure.code == "DEADLINE_EXCEEDED" and not failure.reason:  # gRPC's own, whose words are "Stream removed"
        message = "the call's time-out passed before the server answered"
    if issubclass(kind, ArgumentError):
        selection, argument = _place(failure.path)
        return kind(message, argument=argument, selection=selection, reason=failure.reason, code=failure.code)
    if issubclass(kind, (ResourceExhaustedError, UnavailableError)):
        return kind(message, reason=failure.reason, code=failure.code, retry_after=failure.retry_after)
    return kind(message, reason=failure.reason, code=failure.code)


def _place(path: str) -> tuple[int, str]:
    """Splits `items[3].selection.lengths` into (3, "lengths"); a violation inside a tensor names the argument."""
    match = _PATH.search(path)
    selection = int(match[1]) if match else 0
    rest = path[match.end() :] if match else path
    names = [name for name in rest.split(".") if name and name not in ("selection", "plan")]
    return selection, (names[0].partition("[")[0] if names else "")
