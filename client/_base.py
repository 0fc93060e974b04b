"""What both clients share: their options, and the parts of them that never wait."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Literal

from topkd._codec import text
from topkd._core import Core
from topkd._options import Options, check_options, check_security, target_directory
from topkd._types import Selection
from topkd.errors import ArgumentTypeError, ArgumentValueError, RegionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from topkd._plan import PlanState
    from topkd._types import TlsOptions

__all__ = ["ClientBase", "PlanBase", "batch_entries"]


class ClientBase:
    """Options and state of a client."""

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        *,
        device: Any = None,
        name: str | None = None,
        timeout: float = 30.0,
        attach_timeout: float = 20.0,
        ready_timeout: float = 1.0,
        on_unavailable: Literal["raise", "local"] = "raise",
        token: str | None = None,
        tls: TlsOptions | bool | None = None,
    ) -> None:
        """Makes a client. Neither connects nor waits: the first call attaches.

        Args:
            target: A socket directory ("/run/topkd" or "unix:/run/topkd"), or "host:port" for TCP with inline tensors;
                None finds the directory by `$TOPKD_SOCKET_DIR` or the usual places.
            device: The device that the tensors are on: "cuda:0", a torch.device, an ordinal, a UUID or "cpu". A server
                of another device then refuses the session.
            name: What the server's logs call this client.
            timeout: Seconds that a call may take, unless it says otherwise; more than two weeks count as two weeks.
            attach_timeout: Seconds within which a call tries to find a server, at the first call and after a loss.
                A server may take some to start a worker. No call tries for longer than its own time-out.
            ready_timeout: Seconds that a CUDA stream may take to come to a selection that is ordered on it, from the
                moment at which the server has accepted it or has ended the one before. Later than that it is given up;
                `check` and the next call raise then.
            on_unavailable: What calls do while no server is there: "raise", or "local": select by `topkd.kernels` in
                this process (needs torch).
            token: The server's attach token, for TCP.
            tls: TLS for TCP; True for the system's certificates.

        Raises:
            ArgumentTypeError: An option of a wrong type.
            ArgumentValueError: An option that cannot be.
            RegionError: CUDA shows no such device to this process, or cuda-bindings is not installed.
        """
        timeouts = {"timeout": timeout, "attach_timeout": attach_timeout, "ready_timeout": ready_timeout}
        seconds = check_options(target, on_unavailable, **timeouts)
        options = Options(
            target=target,
            device_uuid=text("device", _device_uuid(device)),
            name=text("name", f"pid {os.getpid()}" if name in (None, "") else name),
            local=on_unavailable == "local",
            token=token,
            tls=check_security(target, token, tls),
            **seconds,
        )
        self._core = Core(options)
        self._finalizer = weakref.finalize(self, self._core.close)

    @property
    def target(self) -> str:
        """What the client attaches to."""
        directory = target_directory(self._core.options.target)
        return str(self._core.options.target) if directory is None else str(directory)

    @property
    def attached(self) -> bool:
        """Whether a session is open as far as the client knows."""
        session = self._core.session
        return session is not None and not session.lost

    def check(self) -> None:
        """Raises if a selection that was ordered on a CUDA stream has failed after it was accepted. Does not wait.

        Looks at those that are over: synchronise the stream first. A failure is raised once, here or by the next call.

        Raises:
            DeadlineExceededError: The stream did not come to it within `ready_timeout`; outputs are untouched.
            KernelError: The kernel failed.
            SessionLostError: The session ended first; outputs are unspecified.
        """
        self._core.raise_ordered()

    def __repr__(self) -> str:
        return f"<topkd.{type(self).__name__} of {self.target}, {'attached' if self.attached else 'not attached'}>"


def _device_uuid(device: Any) -> str:
    if device is None:
        return ""
    text = f"cuda:{device}" if isinstance(device, int) and not isinstance(device, bool) else str(device)
    if text == "cpu":
        return "CPU"
    if text.startswith(("GPU-", "MIG-", "CPU")):
        return text
    kind, _, ordinal = text.partition(":")
    if kind != "cuda" or not (ordinal or "0").isdecimal():
        raise ArgumentValueError(
            f"device is {device!r}; allowed are 'cpu', 'cuda', 'cuda:N', a torch.device, an ordinal or a UUID",
            argument="device",
        )
    from topkd import _cuda

    try:
        return _cuda.device_uuid(int(ordinal) if ordinal else _cuda.current_device())
    except RegionError as error:
        raise RegionError(f"device is {device!r}, which this process cannot ask for its UUID: {error}") from None


class PlanBase:
    """What both kinds of plan share."""

    def __init__(self, core: Core, state: PlanState) -> None:
        self._core = core
        self._state = state

    @property
    def kernel(self) -> str:
        """The kernel family that the server chose."""
        return self._state.kernel

    @property
    def reason(self) -> str:
        """Why the server chose it."""
        return self._state.reason

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._state.closed

    def close(self) -> None:
        """Gives the plan up; the server releases it in the background. Idempotent, does not wait."""
        self._state.close()

    def __repr__(self) -> str:
        return f"<topkd.{type(self).__name__}: {'closed' if self.closed else self.kernel}>"


def batch_entries(core: Core, selections: Iterable[object]) -> list[Selection | PlanState]:
    """Returns the entries of a client's batch.

    Raises:
        ArgumentTypeError: One is neither a selection nor a plan, or they are not several.
        ArgumentValueError: A plan of another client, whose sessions are not this one's.
    """
    entries: list[Selection | PlanState] = []
    try:
        several = enumerate(selections)
    except TypeError:
        message = f"selections must be a list or another iterable, not {type(selections).__name__}"
        raise ArgumentTypeError(message, argument="selections") from None
    for place, entry in several:
        if isinstance(entry, PlanBase):
            if entry._core is not core:
                text = f"selections[{place}] is a plan of another client; allowed are selections and plans of this one"
                raise ArgumentValueError(text, argument="selections", selection=place)
            entries.append(entry._state)
        elif isinstance(entry, Selection):
            entries.append(entry)
        else:
            kind = type(entry).__name__
            text = f"selections[{place}] must be a Selection or a plan of this client, not {kind}"
            raise ArgumentTypeError(text, argument="selections", selection=place)
    return entries
