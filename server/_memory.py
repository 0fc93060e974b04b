"""What the workers know of memory: dtypes, regions, and the interface that both backends keep."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from topkd.v1 import control_pb2, selection_pb2, side_pb2, tensor_pb2

from ._views import View

if TYPE_CHECKING:
    from topkd._words import Words

    from ._execute import Executor
    from ._lanes import Dispatch
    from ._logging import Logger
    from ._queue import TurnQueue
    from ._record import Recorder
    from ._slots import Slot
    from .metrics import ServerMetrics

__all__ = ["DTYPES", "DTYPE_LABELS", "PROTO_DTYPES", "Backend", "Held", "Region"]

Held = Callable[[], AbstractContextManager[None]]
"""Keeps the session's lanes out of the device's streams meanwhile: closing a mapping waits for those."""

DTYPES: Mapping[int, torch.dtype] = {
    tensor_pb2.D_TYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.D_TYPE_FLOAT16: torch.float16,
    tensor_pb2.D_TYPE_FLOAT32: torch.float32,
    tensor_pb2.D_TYPE_INT32: torch.int32,
    tensor_pb2.D_TYPE_INT64: torch.int64,
}
PROTO_DTYPES: Mapping[torch.dtype, tensor_pb2.DType] = {value: key for key, value in DTYPES.items()}  # type: ignore[misc]
DTYPE_LABELS: Mapping[torch.dtype, str] = {dtype: str(dtype).removeprefix("torch.") for dtype in PROTO_DTYPES}


class Region(Protocol):
    """Memory of a client that is mapped here.

    Attributes:
        size: bytes.
        address: where it begins here, as far as alignment goes.
        kind: "memfd", "cuda_ipc" or "vmm".
    """

    size: int
    address: int
    kind: str

    def tensor(self, view: View) -> torch.Tensor:
        """Returns a view that `check_region_view` has passed."""

    def close(self) -> None:
        """Drops the mapping. Nothing may use it any more; may block until the device is idle."""


class Signals(NamedTuple):
    """What lets a client's kernel wait for calls of armed lanes."""

    address: int  # of the client's tickets and echoes; 0: it cannot
    code: bytes  # of the kernel, for the GPU
    kernel: str  # its name in the code
    reason: str  # why it can, or cannot


class Backend(Protocol):
    """A device as the worker uses it.

    Attributes:
        device: torch's name of it.
        info: how the server reports it.
    """

    device: torch.device
    info: control_pb2.Device

    def enter_thread(self) -> None:
        """Prepares the calling thread; must be called before it touches tensors. Cheap when done before."""

    def open_memfd(self, fd: int, size: int) -> Region:
        """Maps host memory; the descriptor stays the caller's. Raises ServerError."""

    def open_cuda_ipc(self, memory: selection_pb2.CudaIpcMemory, held: Held) -> Region:
        """Opens device memory of another process; with lanes held, closes it if it is refused. Raises ServerError."""

    def open_vmm(self, message: side_pb2.RegisterVmm, fds: Sequence[int]) -> Region:
        """Maps allocations of another process by their descriptors, which stay the caller's. Raises ServerError."""

    def run(self, calls: Sequence[Callable[[], object]]) -> list[int]:
        """Runs calls in order, waits for the device, returns the nanoseconds of each, measured on the device."""

    def capture(self, runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Returns what does independent runs, which only enqueue, as a whole, for `run`.

        Runs nothing. No stream of the process waits for a word meanwhile. Raises RuntimeError if that cannot be.
        """

    def warm(self) -> None:
        """Makes ready what ordered calls and lanes need besides the kernels; polled and unordered ones work without."""

    def open_slots(
        self, words: "Words", numbers: range, executor: "Executor", recorder: "Recorder"
    ) -> Sequence["Slot"]:
        """Makes slots of a session, by their numbers."""

    def open_dispatches(
        self, words: "Words", fallback: "Dispatch", queue: "TurnQueue", metrics: "ServerMetrics", log: "Logger"
    ) -> Sequence["Dispatch"]:
        """Makes the ways to serve lanes that are better than `fallback`, the best first."""

    def open_signals(self, memory: selection_pb2.CudaIpcMemory, held: Held) -> Signals:
        """Opens, once a worker, device memory where kernels of its client wait for lanes. Raises as `open_cuda_ipc`."""

    def from_bytes(self, data: bytes, view: View) -> torch.Tensor:
        """Copies inline data to the device."""
