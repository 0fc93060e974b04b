"""Every error that the client library raises, and the one table from the server's answers to them.

    TopkdError
     +-- ArgumentError                 .argument, .selection
     |    +-- ArgumentTypeError        (also a TypeError)
     |    +-- ArgumentValueError       (also a ValueError)
     +-- ServerError                   .reason, .code: the server refused or failed
     |    +-- AuthenticationError
     |    +-- PermissionDeniedError
     |    +-- NotFoundError
     |    +-- ResourceExhaustedError   .retry_after
     |    +-- DeadlineExceededError    (also a TimeoutError)
     |    +-- KernelError
     |    +-- ProtocolError            an answer that this client cannot make sense of
     |    +-- UnavailableError         .retry_after; no server is there, or it takes no work now
     |         +-- SessionLostError    the server or the session's worker went away during the call
     +-- RegionError                   memory that cannot be shared
     +-- CaptureError                  (also a RuntimeError) an RPC during CUDA graph capture
     +-- ClientClosedError             (also a RuntimeError)
     +-- ForkError                     (also a RuntimeError) a client used in a forked child

`RegionError` carries `.reason` and `.code` too where the server raised it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AuthenticationError",
    "CaptureError",
    "ClientClosedError",
    "DeadlineExceededError",
    "ForkError",
    "KernelError",
    "NotFoundError",
    "PermissionDeniedError",
    "ProtocolError",
    "RegionError",
    "ResourceExhaustedError",
    "ServerError",
    "SessionLostError",
    "TopkdError",
    "UnavailableError",
]


class TopkdError(Exception):
    """Base of all errors of the client library.

    Attributes:
        reason: The server's reason (`QUEUE_FULL`, ...) where it gave one, else "".
        code: The name of the gRPC status code (`RESOURCE_EXHAUSTED`, ...) where the server answered, else "".
    """

    def __init__(self, message: str, *, reason: str = "", code: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code


class ArgumentError(TopkdError):
    """An argument was refused before anything ran; outputs are untouched.

    Attributes:
        argument: The argument's name, "" if the server named none.
        selection: The place of the selection in its batch (0 in calls of one).
    """

    def __init__(
        self, message: str, *, argument: str = "", selection: int = 0, reason: str = "", code: str = ""
    ) -> None:
        super().__init__(message, reason=reason, code=code)
        self.argument = argument
        self.selection = selection


class ArgumentTypeError(ArgumentError, TypeError):
    """A wrong Python type or dtype."""


class ArgumentValueError(ArgumentError, ValueError):
    """Any other argument that the contract refuses."""


class ServerError(TopkdError):
    """The server refused or failed the call."""


class AuthenticationError(ServerError):
    """The token is unknown to the server."""


class PermissionDeniedError(ServerError):
    """The server's allow list admits neither this user nor its groups."""


class NotFoundError(ServerError):
    """A region or plan that the session does not have."""


class ResourceExhaustedError(ServerError):
    """A limit of the server is reached: see `Client.info().limits`.

    Attributes:
        retry_after: Seconds after which a later try can succeed, None if the server gave none.
    """

    def __init__(self, message: str, *, reason: str = "", code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, reason=reason, code=code)
        self.retry_after = retry_after


class DeadlineExceededError(ServerError, TimeoutError):
    """The call's time-out passed. The server may still write the outputs until the client's next call returns."""


class KernelError(ServerError):
    """The kernel failed on the device, or the server has a defect."""


class ProtocolError(ServerError):
    """The server's answer makes no sense to this client: mismatched versions, or no topkd server at all."""


class UnavailableError(ServerError):
    """No server is there, or it starts or drains and takes no work.

    Attributes:
        retry_after: Seconds after which a later try can succeed, None if not known.
    """

    def __init__(self, message: str, *, reason: str = "", code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, reason=reason, code=code)
        self.retry_after = retry_after


class SessionLostError(UnavailableError):
    """The server, or the session's worker, went away during the call. The next call attaches anew."""


class RegionError(TopkdError):
    """Memory that cannot be shared with the server; the message says why."""


class CaptureError(TopkdError, RuntimeError):
    """A remote call during CUDA graph capture. Nothing was sent."""


class ClientClosedError(TopkdError, RuntimeError):
    """The client, plan or region is closed."""


class ForkError(TopkdError, RuntimeError):
    """A client was used in a forked child. Make a client of its own there."""


BY_REASON: Final[Mapping[str, type[TopkdError]]] = {
    "ARGUMENT_TYPE": ArgumentTypeError,
    "ARGUMENT_VALUE": ArgumentValueError,
    "TOKEN_INVALID": AuthenticationError,
    "PEER_NOT_ALLOWED": PermissionDeniedError,
    "REGION_NOT_FOUND": NotFoundError,
    "PLAN_NOT_FOUND": NotFoundError,
    "QUEUE_FULL": ResourceExhaustedError,
    "SESSION_LIMIT": ResourceExhaustedError,
    "REGION_LIMIT": ResourceExhaustedError,
    "PLAN_LIMIT": ResourceExhaustedError,
    "DRAINING": UnavailableError,
    "STARTING": UnavailableError,
    "WORKER_LOST": SessionLostError,
    "KERNEL_FAILED": KernelError,
    "IPC_OPEN_FAILED": RegionError,
    "DEVICE_MISMATCH": RegionError,
    "MEMFD_NOT_SEALED": RegionError,
}
"""The reasons of domain `topkd.v1`, as docs/architecture.md lists them."""

BY_CODE: Final[Mapping[str, type[TopkdError]]] = {
    "INVALID_ARGUMENT": ArgumentValueError,
    "OUT_OF_RANGE": ArgumentValueError,
    "UNAUTHENTICATED": AuthenticationError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "NOT_FOUND": NotFoundError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": SessionLostError,
    "UNAVAILABLE": SessionLostError,
    "FAILED_PRECONDITION": RegionError,
    "INTERNAL": KernelError,
    "UNIMPLEMENTED": ProtocolError,
}
"""Status codes that came without a known reason: what gRPC itself raises, and reasons of newer servers."""


def error_class(code: str, reason: str = "") -> type[TopkdError]:
    """Returns the class for a status code's name and a reason.

    Example:
        >>> error_class("RESOURCE_EXHAUSTED", "QUEUE_FULL").__name__
        'ResourceExhaustedError'
        >>> error_class("UNAVAILABLE").__name__
        'SessionLostError'
    """
    return BY_REASON.get(reason) or BY_CODE.get(code, ServerError)
