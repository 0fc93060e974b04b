"""Device memory of a client that comes by descriptors of its allocations: expandable segments, pools with a sleep mode.

Such memory has no CUDA IPC handle. Its owner has reserved a *range* of addresses and mapped allocations, *pieces*, into
it. `VmmSpace` reserves a range of the same size here for every range that regions lie in, and maps a piece where it is
mapped there, once for all regions that hold it. So memory that overlaps for the client overlaps here, which the checks
of outputs need, and two regions of a segment share what they have in common.

Everything that a client says is checked: the driver maps an allocation in its real size only, and knows which device
holds it. Calls are made one at a time (the backend's lock). None of them waits for a stream, so that unmapping comes
after the work that used the memory only if the caller waits for that (driver 580 on an H200, 2026-12-01: 30 to 150 us
an allocation, a blocked stream beside it or not).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from topkd.v1 import side_pb2

from .errors import DeviceMismatchError, FieldError, IpcOpenFailedError, KernelFailedError

__all__ = ["MOST_ALLOCATIONS", "VmmMapping", "VmmSpace"]

MOST_ALLOCATIONS = 250
"""Of one region: Linux passes 253 descriptors in one message."""

_MOST_RANGE = 1 << 47
"""Bytes of the largest range: all that a process on x86-64 can address."""


@dataclass(slots=True)
class _Piece:
    """One allocation that is mapped, and the number of regions that hold it."""

    size: int
    users: int = 0


@dataclass(slots=True)
class _Range:
    """A range of the client's and its counterpart here; pieces by their offset."""

    address: int
    size: int
    base: int
    pieces: dict[int, _Piece] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VmmMapping:
    """What one region holds: consecutive pieces of a range."""

    range: _Range
    offsets: tuple[int, ...]
    size: int

    @property
    def address(self) -> int:
        """Where it begins here."""
        return self.range.base + self.offsets[0]


class VmmSpace:
    """The ranges of one session on one device."""

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self._type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._ranges: list[_Range] = []
        self._granularity = 0

    def open(self, message: side_pb2.RegisterVmm, fds: Sequence[int]) -> VmmMapping:
        """Maps what is not mapped yet, and counts the region in. The descriptors stay the caller's.

        Raises:
            FieldError: sizes or addresses cannot be, or contradict what is mapped.
            IpcOpenFailedError: a descriptor is none of an allocation, or of a smaller one.
            DeviceMismatchError: an allocation is another device's.
        """
        offsets = self._check(message, fds)
        found = self._range(message, dict(zip(offsets, message.sizes, strict=True)))
        opened: list[int] = []
        try:
            for offset, size, fd in zip(offsets, message.sizes, fds, strict=True):
                if offset not in found.pieces:
                    self._map(found, offset, size, fd)
                    opened.append(offset)
                    self._allow(found.base + offset, size)
        except BaseException:
            for offset in opened:
                self._unmap(found, offset)
            self._give_back(found)
            raise
        for offset in offsets:
            found.pieces[offset].users += 1
        return VmmMapping(found, offsets, sum(message.sizes))

    def close(self, mapping: VmmMapping) -> None:
        """Counts a region out, unmaps what no other one holds. Nothing may use it any more."""
        for offset in mapping.offsets:
            piece = mapping.range.pieces[offset]
            piece.users -= 1
            if not piece.users:
                self._unmap(mapping.range, offset)
        self._give_back(mapping.range)

    def _check(self, message: side_pb2.RegisterVmm, fds: Sequence[int]) -> tuple[int, ...]:
        """Returns the pieces' offsets in their range."""
        count = len(message.sizes)
        if not 1 <= count <= MOST_ALLOCATIONS:
            text = f"there are {count} sizes; there must be 1 .. {MOST_ALLOCATIONS}"
            raise FieldError(text, field="register_vmm.sizes")
        if len(fds) != count:
            text = f"{len(fds)} descriptors came beside the request for {count} sizes"
            raise FieldError(text, field="register_vmm.sizes")
        unit = self._unit()
        for name in ("address", "range_address", "range_size"):
            if getattr(message, name) % unit:
                text = f"{name} is {getattr(message, name):#x}; it must be a multiple of {unit}"
                raise FieldError(text, field=f"register_vmm.{name}")
        if any(size % unit or not size for size in message.sizes):
            raise FieldError(f"sizes must be multiples of {unit} and not 0", field="register_vmm.sizes")
        if not 0 < message.range_size <= _MOST_RANGE:
            text = f"range_size is {message.range_size}; it must be 1 .. {_MOST_RANGE}"
            raise FieldError(text, field="register_vmm.range_size")
        offset = message.address - message.range_address
        if offset < 0 or offset + sum(message.sizes) > message.range_size:
            raise FieldError("the allocations are not all in the range", field="register_vmm.address")
        offsets = []
        for size in message.sizes:
            offsets.append(offset)
            offset += size
        return tuple(offsets)

    def _range(self, message: side_pb2.RegisterVmm, wanted: dict[int, int]) -> _Range:
        """Returns the range, new if need be, once it is sure that what is mapped in it agrees with the request."""
        low, high = message.range_address, message.range_address + message.range_size
        for known in self._ranges:
            if known.address == low and known.size == message.range_size:
                _check_pieces(known, wanted)
                return known
            if known.address < high and low < known.address + known.size:
                text = "the range overlaps another one that regions lie in; release them first"
                raise FieldError(text, field="register_vmm.range_address")
        base = self._done(
            f"{message.range_size} bytes of addresses cannot be reserved",
            self._driver.cuMemAddressReserve(message.range_size, self._unit(), 0, 0),
        )
        made = _Range(low, message.range_size, int(base))
        self._ranges.append(made)
        return made

    def _map(self, into: _Range, offset: int, size: int, fd: int) -> None:
        driver = self._driver
        handle = self._done(
            "a descriptor is of no allocation of device memory", driver.cuMemImportFromShareableHandle(fd, self._type)
        )
        try:
            properties = self._done("", driver.cuMemGetAllocationPropertiesFromHandle(handle))
            where = properties.location
            if (
                int(where.type) != int(driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
                or where.id != self._ordinal
            ):
                raise DeviceMismatchError("an allocation is not this server's device's", field="register_vmm.sizes")
            mapped = driver.cuMemMap(into.base + offset, size, 0, handle, 0)
            self._done(f"an allocation cannot be mapped as one of {size} bytes", mapped)
        finally:
            driver.cuMemRelease(handle)  # the mapping holds it
        into.pieces[offset] = _Piece(size)

    def _allow(self, address: int, size: int) -> None:
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._ordinal
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._done("access to an allocation is refused", self._driver.cuMemSetAccess(address, size, [access], 1))

    def _unmap(self, of: _Range, offset: int) -> None:
        piece = of.pieces.pop(offset)
        (error,) = self._driver.cuMemUnmap(of.base + offset, piece.size)
        if int(error):
            raise KernelFailedError(f"the mapping cannot be taken back: {error.name}")

    def _give_back(self, empty: _Range) -> None:
        """Frees a range that nothing is mapped in."""
        if not empty.pieces:
            self._ranges.remove(empty)
            self._driver.cuMemAddressFree(empty.base, empty.size)

    def _unit(self) -> int:
        """Returns what sizes and addresses are multiples of."""
        if not self._granularity:
            driver = self._driver
            wanted = driver.CUmemAllocationProp()
            wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            wanted.location.id = self._ordinal
            wanted.requestedHandleTypes = self._type
            least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            found = self._done("", driver.cuMemGetAllocationGranularity(wanted, least))
            self._granularity = int(found)
        return self._granularity

    @staticmethod
    def _done(text: str, result: tuple[Any, ...]) -> Any:
        """Returns a driver call's value, or raises."""
        error, *values = result
        if int(error):
            raise IpcOpenFailedError(f"{text or 'the driver refuses'}: {error.name}", field="register_vmm.sizes")
        return values[0] if values else None


def _check_pieces(known: _Range, wanted: dict[int, int]) -> None:
    """Raises FieldError if a piece that is mapped lies where another one is wanted."""
    start = min(wanted)
    end = start + sum(wanted.values())
    for offset, piece in known.pieces.items():
        if offset < end and start < offset + piece.size and wanted.get(offset) != piece.size:
            text = "another allocation was mapped there when a region was registered; release that region first"
            raise FieldError(text, field="register_vmm.sizes")
