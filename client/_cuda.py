"""Device memory that a server can map: allocations of the client's own, and allocations that hold a user's tensor.

Imports `cuda.bindings` when the first of its functions is called. Every function leaves the calling thread's current
device as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from typing import TYPE_CHECKING, Any, Final

from topkd._gpus import uuid_text
from topkd.errors import RegionError
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CudaMemory",
    "ForeignMemory",
    "allocation_of",
    "checked",
    "current_device",
    "device_uuid",
    "on_device",
    "ordinal_of",
]

GRANULE: Final = 2 << 20
"""Only whole multiples of 2 MiB have an allocation, and so a handle, of their own."""

_HANDLE_BYTES: Final = 64
_uuids: dict[int, str] = {}


def _bindings() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RegionError(
            f"sharing device memory needs the package cuda-bindings: pip install topkd[cuda] ({error})"
        ) from None
    return runtime


def checked(doing: str, result: tuple[Any, ...]) -> Any:
    """Returns a runtime call's values, or raises."""
    error, *values = result
    if int(error):
        raise RegionError(f"{doing} failed: {getattr(error, 'name', error)}")
    return values[0] if len(values) == 1 else tuple(values)


@contextlib.contextmanager
def on_device(ordinal: int) -> Iterator[Any]:
    """Makes a device current for the block, in which a capture of another thread is left alone; gives the runtime."""
    runtime = _bindings()
    before = checked("cudaGetDevice", runtime.cudaGetDevice())
    checked(f"cudaSetDevice({ordinal})", runtime.cudaSetDevice(ordinal))
    # torch captures graphs in the mode "global", which a cudaMalloc or cudaFree of any other thread would break.
    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    mode = checked("cudaThreadExchangeStreamCaptureMode", runtime.cudaThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield runtime
    finally:
        runtime.cudaThreadExchangeStreamCaptureMode(mode)
        if before != ordinal:
            checked(f"cudaSetDevice({before})", runtime.cudaSetDevice(before))


def device_uuid(ordinal: int) -> str:
    """Returns the UUID of a device as nvidia-smi writes it, "GPU-..."."""
    if ordinal not in _uuids:
        properties = checked("cudaGetDeviceProperties", _bindings().cudaGetDeviceProperties(ordinal))
        _uuids[ordinal] = uuid_text(bytes(properties.uuid.bytes)[:16])
    return _uuids[ordinal]


def current_device() -> int:
    """Returns the calling thread's current device."""
    return int(checked("cudaGetDevice", _bindings().cudaGetDevice()))


def ordinal_of(uuid: str) -> int:
    """Returns this process's ordinal of a device.

    Raises:
        RegionError: The process does not see it, or cuda-bindings is not installed.
    """
    count = checked("cudaGetDeviceCount", _bindings().cudaGetDeviceCount())
    for ordinal in range(count):
        if device_uuid(ordinal) == uuid:
            return ordinal
    seen = ", ".join(map(device_uuid, range(count))) or "none"
    raise RegionError(f"the server's device {uuid} is not visible here; visible are: {seen} (CUDA_VISIBLE_DEVICES)")


def _ipc_handle(address: int, ordinal: int) -> bytes:
    with on_device(ordinal) as runtime:
        handle = checked("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(address))
    return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)


class _Freer:
    """Frees device memory on a thread of its own: cudaFree may wait for the device, and finalisers run anywhere."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> None:
        with self._lock:
            if not self._started:
                threading.Thread(target=self._run, name="topkd-cuda-free", daemon=True).start()
                self._started = True

    def free(self, address: int, ordinal: int) -> None:
        self._queue.put((address, ordinal))

    def _run(self) -> None:
        while True:
            address, ordinal = self._queue.get()
            with contextlib.suppress(RegionError), on_device(ordinal) as runtime:
                runtime.cudaFree(address)


_freer = _Freer()


class CudaMemory:
    """Device memory from cudaMalloc, in multiples of 2 MiB.

    Attributes:
        device: CUDA ordinal.
        size: Bytes.
        address: Device pointer.
    """

    __slots__ = ("address", "device", "share_message", "size")

    def __init__(self, size: int, ordinal: int) -> None:
        self.address = 0
        self.device = ordinal
        self.size = -(-size // GRANULE) * GRANULE
        _freer.start()
        with on_device(ordinal) as runtime:
            self.address = int(checked(f"cudaMalloc of {self.size:,} bytes", runtime.cudaMalloc(self.size)))
        self.share_message = _share(self.address, self.size, ordinal)

    def __del__(self) -> None:
        if self.address:
            _freer.free(self.address, self.device)


class ForeignMemory:
    """The whole allocation behind a CUDA tensor that the user made; the tensor keeps it alive.

    Attributes:
        device: CUDA ordinal.
        size: Bytes of the allocation.
        address: Its first byte.
    """

    __slots__ = ("address", "device", "share_message", "size", "tensor")

    def __init__(self, tensor: Any) -> None:
        """Finds the allocation and exports it.

        Raises:
            RegionError: It has no handle; the message says why and what to do.
        """
        self.tensor = tensor
        self.device = int(tensor.device.index)
        from cuda.bindings import driver

        with on_device(self.device):
            self.address, self.size = allocation_of(driver, tensor.data_ptr())
        try:
            self.share_message = _share(self.address, self.size, self.device)
        except RegionError as error:
            raise RegionError(
                f"the tensor's memory has no CUDA IPC handle ({error}): it comes from a stream-ordered pool or another "
                "process; allocate it with client.empty"
            ) from None


def allocation_of(driver: Any, address: int) -> tuple[int, int]:
    """Returns address and bytes of the allocation at an address, whose device is current."""
    base, size = checked("cuMemGetAddressRange", driver.cuMemGetAddressRange(address))
    return int(base), int(size)


def _share(address: int, size: int, ordinal: int) -> selection_pb2.CudaIpcMemory:
    handle = _ipc_handle(address, ordinal)
    return selection_pb2.CudaIpcMemory(handle=handle, offset=0, size=size, device_uuid=device_uuid(ordinal))
