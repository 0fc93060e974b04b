"""The socket directory: modes, ownership, the lock, stale sockets."""

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from topkd._closing import Closing
from topkd._paths import ATTACH_SOCKET, GRPC_SOCKET

__all__ = [
    "ATTACH_SOCKET",
    "GRPC_SOCKET",
    "DirectoryError",
    "SocketDirectory",
    "make_directory",
    "worker_socket_name",
]

DIRECTORY_MODE = 0o750
SOCKET_MODE = 0o660
_WORKER_PREFIX = "w-"


class DirectoryError(RuntimeError):
    """A socket directory that cannot be used; the message names the rule and the remedy."""


def worker_socket_name() -> str:
    """Returns a new name for a worker's socket."""
    return f"{_WORKER_PREFIX}{secrets.token_hex(8)}.sock"


class SocketDirectory(Closing):
    """A checked and locked socket directory. A context manager: leaving it removes the sockets and the lock's hold."""

    def __init__(self, path: Path, group: int | None = None) -> None:
        """Makes the directory if it is absent, checks it, takes the lock and removes stale sockets.

        Args:
            path: the directory.
            group: group of a directory that is made here; sockets made in it are the group's too.

        Raises:
            DirectoryError: unsafe owner or mode, or another server holds the lock.
        """
        self.path = Path(path)
        make_directory(self.path, group)
        _check(self.path)
        self._lock_fd = _lock(self.path)
        self.remove_sockets()

    def socket_path(self, name: str) -> str:
        """Returns the path of a socket in the directory."""
        return str(self.path / name)

    def publish(self, name: str) -> None:
        """Gives a socket that was just bound its mode."""
        (self.path / name).chmod(SOCKET_MODE)

    def remove_sockets(self) -> None:
        """Removes every socket of a server; leaves other files alone."""
        for entry in list(os.scandir(self.path)):
            ours = entry.name in (ATTACH_SOCKET, GRPC_SOCKET) or entry.name.startswith(_WORKER_PREFIX)
            if ours and stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                with suppress(FileNotFoundError):
                    Path(entry.path).unlink()

    def close(self) -> None:
        """Removes the sockets and releases the lock. Closing twice does nothing."""
        if self._lock_fd >= 0:
            with suppress(FileNotFoundError):
                self.remove_sockets()
            os.close(self._lock_fd)
            self._lock_fd = -1


def make_directory(path: Path, group: int | None) -> None:
    """Makes a directory, the group's if one is given; one that is there is left as it is. Raises DirectoryError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        return
    except OSError as error:
        raise DirectoryError(f"socket directory {path} cannot be made: {error.strerror}; choose another") from error
    if group is not None:
        try:
            os.chown(path, -1, group)
        except OSError as error:
            raise DirectoryError(
                f"socket directory {path} cannot be given to group {group}: {error.strerror}"
            ) from error
    path.chmod(DIRECTORY_MODE | (stat.S_ISGID if group is not None else 0))


def _check(path: Path) -> None:
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise DirectoryError(f"socket directory {path} is not a directory (symbolic links are not followed)")
    if info.st_uid != os.geteuid():
        raise DirectoryError(
            f"socket directory {path} belongs to uid {info.st_uid}, not to this server's {os.geteuid()}: its "
            "owner could replace the sockets. Choose a directory of your own"
        )
    if info.st_mode & 0o022:
        raise DirectoryError(
            f"socket directory {path} has mode {stat.S_IMODE(info.st_mode):04o}: others can write to it and could "
            f"replace the sockets. Make it {DIRECTORY_MODE:04o} (chmod), or name a directory inside it"
        )
    if info.st_mode & 0o007:
        path.chmod(stat.S_IMODE(info.st_mode) & ~0o007)


def _lock(path: Path) -> int:
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DirectoryError(f"{path / 'lock'} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise DirectoryError(
            f"another server (pid {holder or 'unknown'}) serves {path}; stop it or choose another directory"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
