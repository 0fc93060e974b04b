"""Session memory for default outputs and staged arguments.

Slots of fixed size classes: small ones are cut from chunks, large ones are records of their own. A slot returns when
the last array or tensor over it is gone, noticed by the collection of a `Lease`, the owner of an array's memory.
Taking and returning a slot are each one atomic operation of a deque: no lock on the way of a call, and none that a
finaliser could wait for.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from topkd import _arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from topkd._regions import Record
    from topkd._session import Session

__all__ = ["Arena", "Lease", "NeedMemory", "Slot", "Stale", "size_class", "take_over", "tensor_over"]

SMALL: Final = 1 << 20
"""Largest slot that is cut from a chunk, in bytes."""

_SMALLEST: Final = 256
_CHUNK: Final = 4 << 20
_SLOTS: Final = 256
"""Slots of a first chunk at most: each is an object, and small ones would be many."""

_DOUBLINGS: Final = 4
_KEPT: Final = 256 << 20
"""Bytes of idle large slots that are kept for reuse."""


class Stale(Exception):  # noqa: N818 - a signal inside the library, no error
    """The session's regions or plans changed while a request was being built: build it again."""


class NeedMemory(Stale):
    """The arena has no idle slot of the size: grow it and build the request again."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Slot:
    """A piece of a record.

    Attributes:
        give_back: Where it goes when its lease is gone.
        stream: The CUDA stream for which it was taken last: work on it may still use the memory. None on the host.
    """

    __slots__ = ("address", "give_back", "record", "size", "stream")

    def __init__(self, record: Record, offset: int, size: int, give_back: Callable[[Slot], None]) -> None:
        self.record = record
        self.address = record.memory.address + offset
        self.size = size
        self.give_back = give_back
        self.stream: Any = None


def take_over(slot: Slot, stream: Any, session: Session) -> None:
    """Makes a stream wait for what may still use a slot of device memory: its stream of before, and accepted calls."""
    if slot.stream is not None and slot.stream != stream:
        stream.wait_stream(slot.stream)
    slot.stream = stream
    if session.timeline is not None:
        session.timeline.join(stream)


class Lease:
    """Owner of one array's memory: returns the slot when the array and all its views are gone."""

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "__weakref__", "slot")

    __array_interface__: dict[str, Any]
    __cuda_array_interface__: dict[str, Any]

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __del__(self) -> None:
        self.slot.give_back(self.slot)


def tensor_over(slot: Slot, code: int, shape: tuple[int, ...], library: str) -> Any:
    """Returns a contiguous array or tensor in a slot's memory; it and its views own the slot until they are gone.

    Device memory gives a torch tensor on its device, whatever the library.
    """
    lease = Lease(slot)
    carrier = _arrays.bits_dtype(code)
    interface = {"version": 3, "data": (slot.address, False), "shape": shape, "typestr": carrier.str, "strides": None}
    if slot.record.memory.device == _arrays.HOST:
        lease.__array_interface__ = interface
        return _arrays.wrap_bits(np.asarray(lease), code, library)
    import torch

    lease.__cuda_array_interface__ = interface
    tensor = torch.as_tensor(lease, device=torch.device("cuda", slot.record.memory.device))
    return tensor.view(getattr(torch, _arrays.dtype_name(code)))


def size_class(nbytes: int) -> int:
    """Returns the slot size that serves `nbytes`.

    Example:
        >>> size_class(0), size_class(300), size_class(3 << 20), size_class((4 << 20) + 1) >> 20
        (256, 512, 3145728, 5)
    """
    if nbytes <= _SMALLEST:
        return _SMALLEST
    bits = (nbytes - 1).bit_length()
    if nbytes <= SMALL:
        return 1 << bits
    step = 1 << (bits - 3)
    return -(-nbytes // step) * step


class Arena:
    """Idle slots by size. Growing is the owner's: it makes the records and registers them."""

    __slots__ = ("_chunks", "_idle")

    def __init__(self) -> None:
        self._idle: dict[int, deque[Slot]] = {}
        self._chunks: dict[int, int] = {}

    def take(self, nbytes: int) -> Slot:
        """Takes the slot that was returned last.

        Raises:
            NeedMemory: None is idle.
        """
        size = size_class(nbytes)
        try:
            return self._idle[size].pop()
        except (KeyError, IndexError):
            raise NeedMemory(size) from None

    def has_idle(self, size: int) -> bool:
        """Says whether a slot of a size is idle."""
        return bool(self._idle.get(size))

    def chunk_bytes(self, size: int, limit: int = 0) -> int:
        """Returns the bytes of the record to add for slots of a size, at most `limit` if that is enough."""
        if size > SMALL:
            return size
        chunk = min(_CHUNK, size * _SLOTS) << min(self._chunks.get(size, 0), _DOUBLINGS)
        return max(min(chunk, limit or chunk), size)

    def add(self, record: Record, size: int) -> None:
        """Cuts a new record into idle slots of a size. One caller at a time."""
        self._chunks[size] = self._chunks.get(size, 0) + 1
        idle = self._idle.setdefault(size, deque())
        for offset in range(0, record.memory.size - size + 1, size):
            idle.append(Slot(record, offset, size, idle.append))

    def trim(self, keep: int = _KEPT) -> list[Record]:
        """Gives up idle large slots until at most `keep` bytes of them are left, the largest first."""
        idle = [(size, slots) for size, slots in sorted(self._idle.items()) if size > SMALL]
        total = sum(size * len(slots) for size, slots in idle)
        records = []
        while total > keep and idle:
            size, slots = idle[-1]
            try:
                records.append(slots.popleft().record)
                total -= size
            except IndexError:
                idle.pop()
        return records
