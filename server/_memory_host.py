"""The CPU backend: regions are sealed memfds that both processes map."""

import fcntl
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from topkd._words import Words
from topkd.v1 import control_pb2, selection_pb2, side_pb2

from ._memory import DTYPES, Held, Signals
from ._views import View
from ._words import REQUIRED_SEALS
from .errors import DeviceMismatchError, FieldError, MemfdNotSealedError

if TYPE_CHECKING:
    from ._execute import Executor
    from ._lanes import Dispatch
    from ._logging import Logger
    from ._queue import TurnQueue
    from ._record import Recorder
    from ._slot_host import HostSlot
    from .metrics import ServerMetrics

__all__ = ["HostBackend", "HostRegion", "check_memfd"]

_F_SEAL_FUTURE_WRITE = 0x10


def check_memfd(fd: int, size: int) -> None:
    """Checks that a descriptor is a memfd whose size is final and that `size` bytes of it can be written.

    Raises:
        MemfdNotSealedError: no memfd, or seals that are missing or too many.
        FieldError: `size` is 0 or more than the file has.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise MemfdNotSealedError(
            "the descriptor is no memfd with seals (memfd_create with MFD_ALLOW_SEALING)"
        ) from None
    if seals & REQUIRED_SEALS != REQUIRED_SEALS:
        raise MemfdNotSealedError("the memfd is not sealed against shrinking and growing (F_SEAL_SHRINK, F_SEAL_GROW)")
    if seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
        raise MemfdNotSealedError("the memfd is sealed against writing; outputs are written in place")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise MemfdNotSealedError("the memfd is not open for reading and writing")
    actual = os.fstat(fd).st_size
    if not 1 <= size <= actual:
        raise FieldError(f"size is {size}; it must be 1 .. {actual}, the file's size", field="register_memfd.size")


class HostRegion:
    """A mapped memfd. The mapping lives until the last tensor over it is gone; its size cannot change."""

    kind = "memfd"
    address = 0  # of a page

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._typed: dict[int, torch.Tensor] = {}

    def tensor(self, view: View) -> torch.Tensor:
        """Returns a view that `check_region_view` has passed."""
        dtype = DTYPES[view.dtype]
        if view.elements == 0:
            return torch.empty(view.shape, dtype=dtype)
        typed = self._typed.get(view.dtype)
        if typed is None:
            typed = self._bytes[: self.size // dtype.itemsize * dtype.itemsize].view(dtype)
            self._typed[view.dtype] = typed
        return typed.as_strided(view.shape, view.strides, view.offset)

    def close(self) -> None:
        """Drops the mapping."""
        self._typed.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)


class HostBackend:
    """torch on the CPU."""

    def __init__(self, threads: int | None) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(threads or min(4, len(os.sched_getaffinity(0))))
        self.info = control_pb2.Device(
            backend=control_pb2.BACKEND_CPU,
            uuid="CPU",
            name=_cpu_name(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def open_memfd(self, fd: int, size: int) -> HostRegion:
        """Maps host memory; the descriptor stays the caller's."""
        check_memfd(fd, size)
        try:
            return HostRegion(fd, size)
        except OSError as error:
            raise MemfdNotSealedError(f"the memfd cannot be mapped: {error.strerror}") from None

    def open_cuda_ipc(self, memory: selection_pb2.CudaIpcMemory, held: Held) -> HostRegion:
        """Refuses: this server has no GPU."""
        raise DeviceMismatchError(
            "this server runs on the CPU; register host memory over the side socket", field="cuda_ipc"
        )

    def open_vmm(self, message: side_pb2.RegisterVmm, fds: Sequence[int]) -> HostRegion:
        """Refuses: this server has no GPU."""
        raise DeviceMismatchError("this server runs on the CPU; register host memory", field="register_vmm")

    def run(self, calls: Sequence[Callable[[], object]]) -> list[int]:
        """Runs calls one after another and returns the nanoseconds of each."""
        times = []
        for call in calls:
            started = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - started)
        return times

    def capture(self, runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Refuses: no kernel of the CPU only enqueues."""
        raise RuntimeError("the CPU has no graphs")

    def warm(self) -> None:
        """Nothing is needed."""

    def open_slots(self, words: Words, numbers: range, executor: "Executor", recorder: "Recorder") -> list["HostSlot"]:
        """Makes slots of a session, by their numbers."""
        from ._slot_host import HostSlot

        return [HostSlot(number, words, executor, recorder) for number in numbers]

    def open_dispatches(
        self, words: Words, fallback: "Dispatch", queue: "TurnQueue", metrics: "ServerMetrics", log: "Logger"
    ) -> list["Dispatch"]:
        """There are none: nothing waits in a stream here."""
        return []

    def open_signals(self, memory: selection_pb2.CudaIpcMemory, held: Held) -> Signals:
        """There are none: nothing waits in a stream here."""
        return Signals(0, b"", "", "this server runs on the CPU")

    def from_bytes(self, data: bytes, view: View) -> torch.Tensor:
        """Copies inline data."""
        dtype = DTYPES[view.dtype]
        if not data:
            return torch.empty(view.shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(view.shape)


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
