"""The CUDA backend: regions are allocations of other processes, opened by their IPC handles or by descriptors.

- A handle stands for a whole allocation. Opening it again in one context gives the same address and raises the driver's
  count, so it is opened and closed once a region, and one `_Allocation` counts the regions over it. It is found by
  address, never by handle: a freed address can come back with the same handle (NVIDIA, CUDA Runtime API,
  "cudaIpcOpenMemHandle").
- `cudaIpcCloseMemHandle` synchronises the device: a reaper thread calls it, after the work that used the memory; the
  caller waits for it. `_memory_vmm` says how memory without such a handle is mapped; it goes the same way.
- The process sees exactly one device, number 0 (`select_device` in `topkd.server._device`).
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from topkd import _mps, kernels
from topkd._words import LINE, SIGNALS_SIZE, Words
from topkd.v1 import control_pb2, selection_pb2, side_pb2

from ._memory import DTYPES, Held, Signals
from ._memory_vmm import VmmMapping, VmmSpace
from ._replay_cuda import Replays
from ._views import View
from .errors import DeviceMismatchError, FieldError, IpcOpenFailedError, KernelFailedError

if TYPE_CHECKING:
    from ._execute import Batch, Executor
    from ._lanes import Dispatch
    from ._logging import Logger
    from ._queue import TurnQueue
    from ._record import Recorder
    from ._slot_cuda import CudaSlot, MappedWords
    from .metrics import ServerMetrics

__all__ = ["CudaBackend", "CudaRegion"]

_HANDLE_BYTES = 64
_MOST_ARMED = 8
_OTHER_QUEUES = 20
"""Hardware queues that armed lanes leave to ordered calls (16 slots), the worker's own stream and torch. With 32 in all
24 blocked streams were right and 40 hung (one H200, 2026, MPS and not)."""


class _Bytes:
    """Device memory as `__cuda_array_interface__` describes it; torch keeps the object alive, not the memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Allocation:
    """An opened allocation and the number of regions over it, for each of which its handle was opened."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.users = 0


class CudaRegion:
    """Mapped memory of a client, and what closes it."""

    def __init__(self, kind: str, address: int, size: int, device: torch.device, close: Callable[[], None]) -> None:
        self.kind = kind
        self.size = size
        self.address = address
        self._device = device
        self._close: Callable[[], None] | None = close
        self._typed: dict[int, torch.Tensor] = {}

    def tensor(self, view: View) -> torch.Tensor:
        """Returns a view that `check_region_view` has passed."""
        dtype = DTYPES[view.dtype]
        if view.elements == 0:
            return torch.empty(view.shape, dtype=dtype, device=self._device)
        typed = self._typed.get(view.dtype)
        if typed is None:
            whole = self.size // dtype.itemsize * dtype.itemsize
            typed = torch.as_tensor(_Bytes(self.address, whole), device=self._device).view(dtype)
            self._typed[view.dtype] = typed
        return typed.as_strided(view.shape, view.strides, view.offset)

    def close(self) -> None:
        """Closes the mapping where no other region uses it; blocks until the device has let go of it."""
        self._typed.clear()
        close, self._close = self._close, None
        if close is not None:
            close()


class CudaBackend:
    """torch on one GPU, on one stream of the worker's own."""

    def __init__(self) -> None:
        from cuda.bindings import driver, runtime  # type: ignore[import-not-found, unused-ignore]  # only where there is a GPU

        self._driver, self._runtime = driver, runtime
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._local = threading.local()
        self._lock = threading.Lock()
        self._allocations: dict[int, _Allocation] = {}
        self._vmm = VmmSpace(driver, 0)
        self._events: list[tuple[Any, Any]] = []
        self._replays = Replays(self.device)
        self._latch: kernels.Latch | None = None
        self._answer: kernels.Answer | None = None
        self._call: kernels.CallCode | None = None
        self._no_call_because = "the server has no kernels that wait"
        self._signals: tuple[bytes, CudaRegion] | None = None  # of the one session that the worker has
        self._mapped: MappedWords | None = None  # of the one session that the worker has
        self._reaper = ThreadPoolExecutor(1, thread_name_prefix="topkd-reaper")
        properties = torch.cuda.get_device_properties(0)
        self.info = control_pb2.Device(
            backend=control_pb2.BACKEND_CUDA,
            uuid=f"GPU-{properties.uuid}",
            name=properties.name,
            memory_bytes=properties.total_memory,
            compute_capability=f"{properties.major}.{properties.minor}",
        )

    def enter_thread(self) -> None:
        """Makes the device and the worker's stream the calling thread's current ones."""
        if not getattr(self._local, "ready", False):
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)
            self._local.ready = True

    def open_memfd(self, fd: int, size: int) -> CudaRegion:
        """Refuses: selections on a GPU read device memory."""
        raise DeviceMismatchError(
            "this server runs on a GPU; register CUDA memory (RegisterRegion)", field="register_memfd"
        )

    def open_cuda_ipc(self, memory: selection_pb2.CudaIpcMemory, held: Held, request: str = "cuda_ipc") -> CudaRegion:
        """Opens an allocation of another process and checks the region against its real size.

        Args:
            memory: what the client shares.
            held: keeps the lanes disarmed where memory is let go of.
            request: the request's field that it stands in, for errors.
        """
        self._check_device(memory.device_uuid, request)
        if len(memory.handle) != _HANDLE_BYTES:
            text = f"handle has {len(memory.handle)} bytes; it must have {_HANDLE_BYTES}"
            raise FieldError(text, field=f"{request}.handle")
        if memory.size < 1:
            raise FieldError("size is 0; it must be at least 1", field=f"{request}.size")
        with self._lock:
            allocation = self._open(memory.handle, held, f"{request}.handle")
            allocation.users += 1
        if memory.offset + memory.size > allocation.size:
            with held():
                self.release(allocation)
            text = f"offset {memory.offset} and size {memory.size} end beyond the allocation of {allocation.size} bytes"
            raise FieldError(text, field=f"{request}.{'offset' if memory.offset > allocation.size else 'size'}")
        address, release = allocation.base + memory.offset, partial(self.release, allocation)
        return CudaRegion("cuda_ipc", address, memory.size, self.device, release)

    def open_vmm(self, message: side_pb2.RegisterVmm, fds: Sequence[int]) -> CudaRegion:
        """Maps allocations of another process that come by descriptors; those stay the caller's."""
        self._check_device(message.device_uuid, "register_vmm")
        with self._lock:
            self._runtime.cudaSetDevice(0)
            mapping = self._vmm.open(message, fds)
        return CudaRegion("vmm", mapping.address, mapping.size, self.device, partial(self._release_vmm, mapping))

    def _check_device(self, uuid: str, request: str) -> None:
        """Raises DeviceMismatchError if memory is said to be another device's."""
        if uuid != self.info.uuid:
            text = f"device_uuid is {uuid!r}; this server runs on {self.info.uuid!r}"
            raise DeviceMismatchError(text, field=f"{request}.device_uuid")

    def _open(self, handle_bytes: bytes, held: Held, field: str) -> _Allocation:
        """Opens a handle, or finds the allocation that it leads to; the lock is held."""
        runtime = self._runtime
        runtime.cudaSetDevice(0)
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), handle_bytes, _HANDLE_BYTES)
        error, pointer = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        if error != runtime.cudaError_t.cudaSuccess:
            runtime.cudaGetLastError()
            raise IpcOpenFailedError(
                f"the CUDA IPC handle cannot be opened: {error.name}. It must come from another process (with another "
                "PID number, even across containers) that still holds the allocation, made by cudaMalloc",
                field=field,
            )
        base = int(pointer)
        known = self._allocations.get(base)
        if known is not None:
            return known
        result, start, size = self._driver.cuMemGetAddressRange(self._driver.CUdeviceptr(base))
        if result != self._driver.CUresult.CUDA_SUCCESS:
            with held():
                runtime.cudaIpcCloseMemHandle(base)
            raise IpcOpenFailedError(f"the allocation's size is not known: {result.name}", field=field)
        allocation = _Allocation(base, int(size) - (base - int(start)))
        self._allocations[base] = allocation
        return allocation

    def release(self, allocation: _Allocation) -> None:
        """Closes a user's handle, in the reaper's thread, and waits; the last one's closes the mapping."""
        with self._lock:
            allocation.users -= 1
            if not allocation.users:
                del self._allocations[allocation.base]
            closing = self._reaper.submit(self._close, allocation.base)
            closing.result()  # under the lock: a handle that is opened meanwhile must not meet a mapping that goes away

    def _release_vmm(self, mapping: VmmMapping) -> None:
        """Takes one user off allocations, and unmaps those that have none left, in the reaper's thread; waits."""
        with self._lock:
            self._reaper.submit(self._close_vmm, mapping).result()

    def _close_vmm(self, mapping: VmmMapping) -> None:
        self._runtime.cudaSetDevice(0)
        torch.cuda.synchronize(self.device)  # closing an IPC handle does, unmapping does not
        self._vmm.close(mapping)

    def _close(self, base: int) -> None:
        self._runtime.cudaSetDevice(0)
        self._stream.synchronize()
        (error,) = self._runtime.cudaIpcCloseMemHandle(base)
        if error != self._runtime.cudaError_t.cudaSuccess:
            self._runtime.cudaGetLastError()
            raise KernelFailedError(f"the mapping cannot be closed: {error.name}")

    def run(self, calls: Sequence[Callable[[], object]]) -> list[int]:
        """Enqueues calls, waits for the last, returns the nanoseconds between the events around each."""
        while len(self._events) < len(calls):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events.append((before, after))
        pairs = self._events[: len(calls)]
        try:
            for call, (before, after) in zip(calls, pairs, strict=True):
                before.record(self._stream)
                call()
                after.record(self._stream)
        finally:
            self._stream.synchronize()  # after a failure too: nothing of the batch may run when it is answered
        return [int(before.elapsed_time(after) * 1e6) for before, after in pairs]

    def capture(self, runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Makes a graph of runs on the worker's stream."""
        return self._replays.capture(runs)

    def warm(self) -> None:
        """Loads or compiles what lets calls be given up; without it the CPU launches ordered and lane calls."""
        latch, answer = kernels.Latch(), kernels.Answer()
        latch.warm(self.device)
        answer.warm(self.device)
        self._latch, self._answer = latch, answer
        if not _mps.active(self._driver, 0):
            self._no_call_because = "the server is not under MPS: a kernel that waits would take turns with its own"
            return
        try:
            self._call = kernels.LaneCall().code(self.device)
        except (kernels.KernelUnavailableError, ValueError) as error:
            self._no_call_because = str(error)[:500]

    def open_slots(self, words: Words, numbers: range, executor: "Executor", recorder: "Recorder") -> list["CudaSlot"]:
        """Makes slots of a session, by their numbers, and maps its words for the device."""
        from ._slot_cuda import CudaSlot

        mapped = self.map_words(words)
        return [CudaSlot(number, words, mapped, self._latch, recorder) for number in numbers]

    def map_words(self, words: Words) -> "MappedWords":
        """Maps a session's words for the device, once."""
        from ._slot_cuda import MappedWords

        with self._lock:
            if self._mapped is None or self._mapped.words is not words:
                self._mapped = MappedWords(self._driver, words)
            return self._mapped

    def open_dispatches(
        self, words: Words, fallback: "Dispatch", queue: "TurnQueue", metrics: "ServerMetrics", log: "Logger"
    ) -> list["Dispatch"]:
        """Arms lanes, as many as may wait in the device's queues beside a session's ordered calls."""
        from ._lanes_armed import Armed
        from ._rounds_cuda import CudaRounds

        connections = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
        most = max(0, min(_MOST_ARMED, connections - _OTHER_QUEUES))
        answer = self._answer
        if answer is None:
            return []

        def open_rounds(line: int, signals: int, batch: "Batch") -> CudaRounds:
            return CudaRounds(self.map_words(words), line, batch, answer, signals=signals)

        return [Armed(open_rounds, most, fallback, queue, metrics, log)]

    def open_signals(self, memory: selection_pb2.CudaIpcMemory, held: Held) -> Signals:
        """Opens the client's memory, which stays open as long as the process: answers store there."""
        if self._call is None:
            return Signals(0, b"", "", self._no_call_because)
        asked = memory.SerializeToString(deterministic=True)
        if self._signals is None:
            region = self.open_cuda_ipc(memory, held, "signals")
            if region.size < SIGNALS_SIZE or region.address % LINE:
                with held():
                    region.close()
                text = f"{memory.size} bytes at offset {memory.offset}; {SIGNALS_SIZE}, in whole lines, are needed"
                raise FieldError(text, field="signals.size")
            self._signals = asked, region
        if self._signals[0] != asked:
            return Signals(0, b"", "", "the session's lanes have other memory for tickets and echoes")
        address = self._signals[1].address
        return Signals(address, *self._call, "under MPS the client's kernels and the server's run side by side")

    def from_bytes(self, data: bytes, view: View) -> torch.Tensor:
        """Copies inline data to the device, on the worker's stream."""
        dtype = DTYPES[view.dtype]
        if not data:
            return torch.empty(view.shape, dtype=dtype, device=self.device)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(view.shape).to(self.device)
