"""What the kernel says of a process of the server: processor time, memory, descriptors; and of MPS on its machine."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from topkd import _mps

from ._logging import Logger
from .metrics import ServerMetrics

__all__ = ["Phases", "ProcessFigures", "mps_runs", "tell_of_mps"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_EVERY_S = 1.0


class ProcessFigures:
    """Keeps the metrics of this process up to date. Thread-safe.

    Args:
        metrics: where the figures go.
        process: "front" or "worker".
    """

    def __init__(self, metrics: ServerMetrics, process: str) -> None:
        self._cpu = metrics.process_cpu.labels(process)
        self._memory = metrics.process_memory.labels(process)
        self._descriptors = metrics.process_fds.labels(process)
        self._lock = threading.Lock()
        self._seen = 0.0
        self._next = 0.0

    def refresh(self) -> None:
        """Reads the figures, once a second at most: 0.1 ms."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _EVERY_S
            used = time.process_time()
            self._cpu.inc(used - self._seen)
            self._seen = used
            with suppress(OSError):
                self._memory.set(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES)
                self._descriptors.set(sum(1 for _ in Path("/proc/self/fd").iterdir()))


class Phases:
    """How long each phase of this process's start took, the first one from the process's birth on."""

    def __init__(self) -> None:
        self._since = _birth()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Ends a phase."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.seconds[name] = round(now - self._since, 3)
        self._since = now


def _birth() -> float:
    """Returns when this process was made, in seconds of the boot clock, to a hundredth."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def mps_runs(pipe_directory: str) -> bool:
    """Says whether an MPS daemon that this user may use keeps its control pipe in a directory."""
    try:
        owner = (Path(pipe_directory) / "control").stat().st_uid
    except OSError:
        return False
    return owner in (0, os.geteuid())


def tell_of_mps(log: Logger, pipe_directory: str) -> None:
    """Says in the log what it costs that no MPS daemon runs, or risks that one does."""
    active = mps_runs(pipe_directory)
    log.info("mps", active=active, pipe_directory=pipe_directory, means=_mps.PRESENT if active else _mps.ABSENT)
