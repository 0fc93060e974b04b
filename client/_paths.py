"""Where the server's sockets are. The one place of the client that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["ATTACH_SOCKET", "GRPC_SOCKET", "default_socket_dir", "device_directories", "find_socket_dir", "stranger_of"]

ATTACH_SOCKET = "attach.sock"
"""File name of the side socket in a socket directory."""

GRPC_SOCKET = "grpc.sock"
"""File name of the front's gRPC socket in a socket directory."""

_SYSTEM_DIR = Path("/run/topkd")
_DEVICES = ("GPU-", "MIG-", "cpu-")


def _personal_dir() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "topkd" if runtime else _public_dir()


def _public_dir() -> Path:
    return Path(f"/tmp/topkd-{os.getuid()}")


def stranger_of(directory: Path) -> int | None:
    """Returns the user who made the directory in /tmp that should be this user's own; None if no other has.

    Anybody can make a directory there, and a server in it would be given this user's memory.
    """
    if directory != _public_dir():
        return None
    try:
        owner = directory.lstat().st_uid
    except OSError:
        return None
    return None if owner == os.getuid() else owner


def default_socket_dir() -> Path:
    """Returns the directory that a server makes its sockets in unless told otherwise.

    `$TOPKD_SOCKET_DIR`, else `/run/topkd` where it exists and is writable, else `$XDG_RUNTIME_DIR/topkd`, else
    `/tmp/topkd-<uid>`. Nothing is created.
    """
    configured = os.environ.get("TOPKD_SOCKET_DIR")
    if configured:
        return Path(configured)
    if _SYSTEM_DIR.is_dir() and os.access(_SYSTEM_DIR, os.W_OK | os.X_OK):
        return _SYSTEM_DIR
    return _personal_dir()


def find_socket_dir() -> Path:
    """Returns the directory in which a client looks for a server unless told otherwise.

    As `default_socket_dir`, but a system-wide server is found by its socket: its directory admits members of its group
    (mode 0750) without being writable to them. A server of one's own comes first.
    """
    if os.environ.get("TOPKD_SOCKET_DIR"):
        return default_socket_dir()
    for directory in (default_socket_dir(), _personal_dir(), _SYSTEM_DIR):
        if os.access(directory / GRPC_SOCKET, os.R_OK | os.W_OK):
            return directory
    return default_socket_dir()


def device_directories(directory: Path) -> dict[str, Path]:
    """Returns the socket directories of a server of several devices, by the device's name; of one device, none.

    They stay while a device's server is started anew, so that a client of it waits and does not take another.
    """
    if (directory / ATTACH_SOCKET).exists() or not os.access(directory, os.R_OK | os.X_OK):
        return {}
    return {path.name: path for path in sorted(directory.iterdir()) if path.name.startswith(_DEVICES) and path.is_dir()}
