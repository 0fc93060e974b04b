"""GPU top-k selection as a service: the client library.

`Client` and `AsyncClient` attach to a topkd server and select on it from memory that they share with it:

    with topkd.Client() as client:
        scores = client.empty((rows, width), "float32")
        result = client.select_topk(scores, 2048, lengths=lengths)

What lives here: `errors`, modules `_x` whose public names this one re-exports, and `torch_ops`, operators for
`torch.compile`, which alone imports torch when it is imported. May import
`topkd.v1`, and lazily `topkd.kernels` (computing locally), torch (tensors that the caller brought) and cuda-bindings
(device memory). Importing the package loads none of them, and grpc only once a client is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topkd._aclient import AsyncClient, AsyncPlan
    from topkd._client import Client, Plan
    from topkd._lane import Lane
    from topkd._region import Region
    from topkd._stream import Pending, SelectStream
    from topkd._types import (
        Backend,
        Device,
        KernelFamily,
        Limits,
        Selection,
        SelectResult,
        ServerInfo,
        Shared,
        TlsOptions,
    )
    from topkd.errors import (
        ArgumentError,
        ArgumentTypeError,
        ArgumentValueError,
        AuthenticationError,
        CaptureError,
        ClientClosedError,
        DeadlineExceededError,
        ForkError,
        KernelError,
        NotFoundError,
        PermissionDeniedError,
        ProtocolError,
        RegionError,
        ResourceExhaustedError,
        ServerError,
        SessionLostError,
        TopkdError,
        UnavailableError,
    )

    __version__: str

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AsyncClient",
    "AsyncPlan",
    "AuthenticationError",
    "Backend",
    "CaptureError",
    "Client",
    "ClientClosedError",
    "DeadlineExceededError",
    "Device",
    "ForkError",
    "KernelError",
    "KernelFamily",
    "Lane",
    "Limits",
    "NotFoundError",
    "Pending",
    "PermissionDeniedError",
    "Plan",
    "ProtocolError",
    "Region",
    "RegionError",
    "ResourceExhaustedError",
    "SelectResult",
    "SelectStream",
    "Selection",
    "ServerError",
    "ServerInfo",
    "SessionLostError",
    "Shared",
    "TlsOptions",
    "TopkdError",
    "UnavailableError",
    "__version__",
]

_MODULES = {
    "topkd._aclient": ("AsyncClient", "AsyncPlan"),
    "topkd._client": ("Client", "Plan"),
    "topkd._lane": ("Lane",),
    "topkd._region": ("Region",),
    "topkd._stream": ("Pending", "SelectStream"),
    "topkd._types": (
        "Backend",
        "Device",
        "KernelFamily",
        "Limits",
        "SelectResult",
        "Selection",
        "ServerInfo",
        "Shared",
        "TlsOptions",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("topkd")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "topkd.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
