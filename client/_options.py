"""A client's options, checked, and the two small helpers of time that everything uses."""

from __future__ import annotations

import numbers
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from topkd._paths import device_directories, find_socket_dir, stranger_of
from topkd._types import TlsOptions
from topkd.errors import ArgumentTypeError, ArgumentValueError, PermissionDeniedError

__all__ = [
    "Deadline",
    "Options",
    "backoff",
    "check_options",
    "check_seconds",
    "check_security",
    "check_wait",
    "directory_of_device",
    "target_directory",
]

_LONGEST_S: Final = 14 * 86400
"""What longer time-outs count as, endless ones too: locks, sockets and gRPC each overflow somewhere beyond."""


class Deadline:
    """A point in time until which a call may last."""

    __slots__ = ("at",)

    def __init__(self, timeout: float) -> None:
        self.at = time.monotonic() + timeout

    def remaining(self) -> float:
        """Returns the seconds left, at least 0."""
        return max(self.at - time.monotonic(), 0.0)


def backoff(attempt: int, first: float = 0.02, most: float = 1.0) -> float:
    """Returns the seconds to wait after the n-th failed attempt: doubling, jittered, bounded."""
    return float(min(first * 2.0**attempt, most) * random.uniform(0.5, 1.0))


@dataclass(slots=True, frozen=True)
class Options:
    """The options of a client, checked."""

    target: str | os.PathLike[str] | None
    device_uuid: str
    name: str
    timeout: float
    attach_timeout: float
    local: bool
    ready_timeout: float
    token: str | None = field(repr=False)
    tls: TlsOptions | None = field(repr=False)

    def deadline(self, timeout: object) -> Deadline:
        """Returns the end of a call that begins now, by its own time-out or, if None, the client's."""
        if timeout is None:
            return Deadline(self.timeout)
        return Deadline(check_seconds("timeout", timeout))


def target_directory(target: str | os.PathLike[str] | None) -> Path | None:
    """Returns the socket directory that a target names, None if it is a host and port.

    Raises:
        PermissionDeniedError: There is no target, and the default directory in /tmp is another user's.
    """
    if target is None:
        directory = find_socket_dir()
        owner = stranger_of(directory)
        if owner is not None:
            text = f"{directory} belongs to uid {owner}, not to this user: a server there may be anybody's"
            raise PermissionDeniedError(f"{text}. Name the server's directory (target, or TOPKD_SOCKET_DIR)")
        return directory
    text = os.fspath(target)
    if text.startswith("unix:"):
        return Path(text.removeprefix("unix:"))
    if "/" not in text and text.rpartition(":")[2].isdecimal():
        return None
    return Path(text)


def directory_of_device(directory: Path, device_uuid: str) -> Path:
    """Returns where a device's server is: the directory itself, or a folder of it where one serves several devices.

    Args:
        directory: What the target names.
        device_uuid: The device's name, "" if the client named none.

    Raises:
        ArgumentValueError: There are several, and the client named none or another.
    """
    folders = device_directories(directory)
    if not folders:
        return directory
    named = "cpu-" if device_uuid == "CPU" else device_uuid
    fitting = [path for name, path in folders.items() if name.startswith(named)]
    if len(fitting) == 1:
        return fitting[0]
    which = "has servers of several devices" if fitting else f"has no server of {device_uuid!r}"
    raise ArgumentValueError(
        f"{directory} {which}; there are {', '.join(folders)}: name one (device=...), or its folder as the target",
        argument="device",
    )


def check_wait(wait: object) -> bool:
    """Says whether a call is to be complete on return; raises for another word than the two."""
    if wait not in ("stream", "host"):
        raise ArgumentValueError(f"wait is {wait!r}; allowed are 'stream', 'host'", argument="wait")
    return wait == "host"


def check_seconds(name: str, value: object) -> float:
    """Returns a time-out in seconds, the longest that there is for longer ones.

    Raises:
        ArgumentTypeError: It is no number.
        ArgumentValueError: It is no time-out: negative, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be seconds, not {value!r}", argument=name)
    seconds: Any = value
    if not seconds >= 0:
        raise ArgumentValueError(f"{name} is {value}; it must be at least 0 seconds", argument=name)
    return float(min(seconds, _LONGEST_S))


def check_options(target: object, on_unavailable: object, **timeouts: object) -> dict[str, float]:
    """Raises for options of a client that cannot be; returns the time-outs in seconds."""
    if target is not None and not isinstance(target, (str, os.PathLike)):
        raise ArgumentTypeError(f"target must be a path or str, not {type(target).__name__}", argument="target")
    seconds = {name: check_seconds(name, value) for name, value in timeouts.items()}
    for name, value in seconds.items():
        if not value:
            raise ArgumentValueError(f"{name} is 0; it must be above 0 seconds", argument=name)
    if on_unavailable not in ("raise", "local"):
        raise ArgumentValueError(
            f"on_unavailable is {on_unavailable!r}; allowed are 'raise', 'local'", argument="on_unavailable"
        )
    return seconds


def check_security(target: str | os.PathLike[str] | None, token: str | None, tls: object) -> TlsOptions | None:
    """Returns the TLS options to use; raises for what makes no sense with the target."""
    if tls is not None and not isinstance(tls, (TlsOptions, bool)):
        raise ArgumentTypeError(f"tls must be TlsOptions or a bool, not {type(tls).__name__}", argument="tls")
    if token is not None and not isinstance(token, str):
        raise ArgumentTypeError(f"token must be a str, not {type(token).__name__}", argument="token")
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ArgumentValueError(
            "token holds what no attach token does: allowed are printable ASCII characters, no blank at either end",
            argument="token",
        )
    if (token is not None or tls) and target_directory(target) is not None:
        raise ArgumentValueError(f"token and tls are for TCP; the target is {target!r}", argument="target")
    return TlsOptions() if tls is True else (tls or None)
