"""The front's sessions: which are open, under which token, and how many may be."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from topkd.v1 import control_pb2

from ._control import Message
from ._tokens import digest, new_token
from .config import ServerLimits
from .errors import DeviceMismatchError, SessionLimitError
from .metrics import ServerMetrics

__all__ = ["PIDFD_REVISION", "FrontSession", "FrontSessions", "check_attach", "device_for_logs", "server_info"]

PROTOCOL_REVISION = 5
PIDFD_REVISION = 3
"""From which on a client takes a pidfd of its worker beside the page."""
_RETRY_AFTER_MS = 1000


@dataclass(eq=False)
class FrontSession:
    """One session, from its admission on.

    Attributes:
        transport: "unix" or "tcp".
        attached: it has a worker, and its client knows; before, the client waits.
        ended: set when the session has; `cause` says why.
    """

    transport: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = field(default_factory=new_token, repr=False)
    attached: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""


class FrontSessions:
    """All sessions that are open, or wait for a worker: those have their place in the bound too."""

    def __init__(self, limits: ServerLimits, metrics: ServerMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._by_token: dict[bytes, FrontSession] = {}
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def attached(self) -> int:
        """How many are open."""
        return sum(session.attached for session in self._by_token.values())

    def open(self, transport: str) -> FrontSession:
        """Admits a session.

        Raises:
            SessionLimitError: as many as may be are open.
        """
        if len(self) >= self._limits.max_sessions:
            text = f"{len(self)} sessions are open, as many as may be (max_sessions)"
            raise SessionLimitError(text, retry_after_ms=_RETRY_AFTER_MS)
        session = FrontSession(transport)
        self._by_token[digest(session.token)] = session
        return session

    def attach(self, session: FrontSession) -> None:
        """Counts a session as open, unless it has ended meanwhile."""
        if not session.ended.is_set():
            session.attached = True
            self._metrics.sessions.labels(session.transport).inc()
            self._metrics.attaches.labels(session.transport, "attached").inc()

    def close(self, session: FrontSession, cause: str) -> bool:
        """Ends a session; says whether it was open."""
        if self._by_token.pop(digest(session.token), None) is None:
            return False
        session.cause = cause
        session.ended.set()
        if session.attached:
            self._metrics.sessions.labels(session.transport).dec()
        self.on_change()
        return True

    def count_end(self, session: FrontSession) -> None:
        """Counts a session that has ended, by its cause; not one that never was attached."""
        if session.attached:
            self._metrics.sessions_ended.labels(session.transport, session.cause).inc()

    def find(self, token: str | None) -> FrontSession | None:
        """Returns the session of a token, or None."""
        return None if token is None else self._by_token.get(digest(token))

    def all(self) -> list[FrontSession]:
        """Returns the open sessions."""
        return list(self._by_token.values())


def server_info(
    facts: Message | None, limits: control_pb2.Limits, version: str, epoch: str, sessions: int
) -> control_pb2.ServerInfo:
    """Builds what the server says of itself."""
    info = control_pb2.ServerInfo(
        version=version, protocol_revision=PROTOCOL_REVISION, epoch=epoch, limits=limits, sessions=sessions
    )
    if facts is not None:
        info.device.CopyFrom(control_pb2.Device(**facts["device"]))
        info.kernels.extend(control_pb2.KernelFamily(**family) for family in facts["kernels"])
    return info


def device_for_logs(facts: Message | None) -> dict[str, Any]:
    """Returns the device of a ready message, its backend by name."""
    if facts is None:
        return {}
    device = facts["device"]
    return {**device, "backend": control_pb2.Backend.Name(device["backend"]).removeprefix("BACKEND_").lower()}


def check_attach(request: control_pb2.AttachRequest, facts: Message) -> None:
    """Raises DeviceMismatchError if the client's tensors are on another device."""
    ours = facts["device"]["uuid"]
    if request.device_uuid and request.device_uuid != ours:
        text = f"device_uuid is {request.device_uuid[:80]!r}; this server runs on {ours!r}"
        raise DeviceMismatchError(text, field="device_uuid")
