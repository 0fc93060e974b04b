"""What the kernel says of processes (/proc), and waiting for things to become so."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_FIRST_PORT, _SLICE, _SLICES = 16_000, 400, 40
_ports = itertools.count()


def wait_until(probe: Callable[[], _T], timeout: float, what: str) -> _T:
    """Returns the first true value of `probe`; AssertionError with its last value after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what} (last: {value!r})")
        time.sleep(0.01)


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; none if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def alive(pid: int) -> bool:
    """Says whether a process runs; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def children(pid: int) -> set[int]:
    """Returns the live direct children of a process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = _stat(int(entry.name))
            if fields and fields[0] not in "ZX" and int(fields[1]) == pid:
                found.add(int(entry.name))
    return found


def arguments(pid: int) -> list[str]:
    """Returns the command line of a process; nothing if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that all threads of a process have used."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _TICK if fields else 0.0


def memory_bytes(pid: int) -> int:
    """Returns the resident memory of a process, shared pages included; 0 if it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def descriptors(pid: int) -> int:
    """Returns the number of open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def listener(path: Path) -> int:
    """Returns the process that listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        probe.connect(str(path))
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def kill(pid: int) -> float:
    """Sends SIGKILL and returns the time of it (monotonic)."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def resume(pid: int) -> None:
    """Sends SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def wait_until_busy(pid: int, seconds: float = 0.2, timeout: float = 10.0) -> None:
    """Waits until a process has used more processor time."""
    before = cpu_seconds(pid)
    wait_until(lambda: cpu_seconds(pid) - before >= seconds, timeout, f"process {pid} computes")


def free_port() -> int:
    """Returns a TCP port that nobody listens on, and that no other process of this test run returns.

    It is below the range from which the system takes the ports of outgoing connections (32768 and up).
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for place in _ports:
        port = _FIRST_PORT + process % _SLICES * _SLICE + place % _SLICE
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the ports are counted for ever")
