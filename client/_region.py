"""Regions that the user registers: what they share, and how long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from topkd import _arrays
from topkd._arrays import HOST
from topkd._closing import Closing
from topkd._regions import Record
from topkd._types import Shared
from topkd.errors import RegionError

if TYPE_CHECKING:
    from topkd._arrays import View
    from topkd._core import Core
    from topkd._cuda import ForeignMemory
    from topkd._cuda_vmm import VmmMemory
    from topkd._session import Session

__all__ = ["Region", "register"]

_VMM_REVISION: Final = 4
"""Of the protocol: servers since take descriptors of allocations."""


class Region(Closing):
    """Memory that the server may read and write until the region is closed. Made by `Client.register`.

    Keeps its tensor alive until the server has acknowledged the release. Usable as a context manager.

    Attributes:
        tensor: The registered tensor; None after `close`.
        shared: What the registration makes visible to the server.
    """

    def __init__(self, core: Core, record: Record, tensor: Any, shared: Shared) -> None:
        self.tensor = tensor
        self.shared = shared
        self._core = core
        self._record: Record | None = record
        self._released = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._record is None

    def close(self) -> None:
        """Gives the region up; the server releases it in the background. Idempotent, does not wait.

        The memory stays registered as long as another region or an array of `Client.empty` lies in it.
        """
        record, self._record, self.tensor = self._record, None, None
        if record is not None:
            self._core.reaper.let_go(record, self._released)

    def wait_released(self, timeout: float | None = None) -> bool:
        """Waits until the server can no longer touch the memory. Returns whether that is so."""
        return self._released.wait(timeout)

    def __repr__(self) -> str:
        return f"<topkd.Region: {'closed' if self.closed else self.shared}>"


def register(core: Core, tensor: Any, session: Session) -> Region:
    """Shares the allocation behind a tensor. Blocks.

    Raises:
        RegionError: It cannot be shared; the message says why.
    """
    view = _arrays.describe("tensor", tensor)
    nbytes = _arrays.extent(view)
    device = core.memory_device(session)
    with core.memory_lock:
        record = core.holder_of(view.address, nbytes)
        if record is None:
            _check_shareable(view, device, session.info.device.uuid)
            record = core.share(session, Record(_foreign(tensor, view, nbytes, session), own=False))
        record.holders += 1
    memory = record.memory
    shared = Shared(memory.address, memory.size, view.address - memory.address, nbytes, memory.size - nbytes)
    return Region(core, record, tensor, shared)


def _foreign(tensor: Any, view: View, nbytes: int, session: Session) -> ForeignMemory | VmmMemory:
    """Finds the allocations that hold a tensor.

    Raises:
        RegionError: They cannot be shared; the message says why.
    """
    from topkd._cuda import ForeignMemory
    from topkd._cuda_vmm import VmmMemory, is_vmm

    if not is_vmm(view.address, view.device):
        return ForeignMemory(tensor)
    if session.info.protocol_revision < _VMM_REVISION:
        raise RegionError(
            "the tensor's memory has no CUDA IPC handle, and the server is too old to take it by descriptors: "
            "allocate it with client.empty"
        )
    return VmmMemory(tensor, nbytes)


def _check_shareable(view: View, device: int, uuid: str) -> None:
    """Raises for memory that is of no kind that the server could map."""
    if view.device == HOST:
        also = "" if device == HOST else f"; besides, the server's device is {uuid}"
        raise RegionError(
            f"ordinary host memory cannot be shared with another process: allocate it with client.empty{also}"
        )
    if device == HOST:
        raise RegionError(f"the tensor is on {view.array.device}, the server computes on the CPU")
    if device != view.device:
        raise RegionError(f"the tensor is on {view.array.device}, the server's device {uuid} is cuda:{device} here")
