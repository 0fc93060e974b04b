"""The driver's virtual memory management as topkd uses it, in Python: what it refuses, and what is left over.

After NVIDIA, CUDA Driver API, "Virtual Memory Management". Descriptors are real ones, of memfds that stand for
allocations; two processes' drivers are two objects that share `Device`.
"""

from __future__ import annotations

import enum
import itertools
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

UNIT = 2 << 20


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


OK, BAD = (Result.CUDA_SUCCESS,), (Result.CUDA_ERROR_INVALID_VALUE,)


@dataclass(eq=False)
class Allocation:
    """Physical memory."""

    size: int
    ordinal: int
    types: int


@dataclass
class Device:
    """What processes share: the allocations, by the inode of the descriptors that stand for them."""

    exported: dict[int, Allocation] = field(default_factory=dict)


class FakeDriver:
    """One process's driver."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR="start",
        CU_POINTER_ATTRIBUTE_RANGE_SIZE="size",
    )

    def __init__(self, device: Device, base: int = 1 << 40) -> None:
        self.device = device
        self.handles: dict[int, Allocation] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, Allocation]] = {}
        self.accessible: set[int] = set()
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self._next_handle = itertools.count(1)
        self._next_base = base

    def CUmemAllocationProp(self) -> Any:  # noqa: N802 - the driver's name
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _fails(self, name: str) -> bool:
        """Says whether this call is to fail: the n-th from now, of those that a test has named."""
        self.calls.append(name)
        if name in self.fail:
            self.fail[name] -= 1
            return self.fail[name] == 0
        return False

    def _handle(self, allocation: Allocation) -> int:
        number = next(self._next_handle)
        self.handles[number] = allocation
        return number

    def _at(self, address: int) -> tuple[int, int, Allocation] | None:
        for base, (size, allocation) in self.mapped.items():
            if base <= address < base + size:
                return base, size, allocation
        return None

    def cuMemCreate(self, size: int, types: int = 1, ordinal: int = 0) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, self._handle(Allocation(size, ordinal, types))

    def cuMemGetAllocationGranularity(self, prop: Any, option: int) -> tuple[Any, ...]:  # noqa: N802
        assert prop.location.id == 0
        return Result.CUDA_SUCCESS, UNIT

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        if self._fails("reserve") or size % UNIT:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        base, self._next_base = self._next_base, self._next_base + size + UNIT
        self.reserved[base] = size
        return Result.CUDA_SUCCESS, base

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.reserved.pop(address) == size
        assert not any(address <= base < address + size for base in self.mapped), "freed under a mapping"
        return OK

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        allocation = self.handles[handle]
        inside = any(base <= address and address + size <= base + whole for base, whole in self.reserved.items())
        taken = any(base < address + size and address < base + whole for base, (whole, _) in self.mapped.items())
        if self._fails("map") or not inside or taken:
            return BAD
        if size != allocation.size or offset:  # as driver 580 does on an H200
            return (Result.CUDA_ERROR_NOT_SUPPORTED,)
        self.mapped[address] = size, allocation
        return OK

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.mapped.pop(address)[0] == size
        self.accessible.discard(address)
        return OK

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[Any, ...]:  # noqa: N802
        assert (self.mapped[address][0], access[0].location.id, access[0].flags, count) == (size, 0, 3, 1)
        if self._fails("access"):
            return BAD
        self.accessible.add(address)
        return OK

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        del self.handles[handle]
        return OK

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        found = self._at(address)
        return (
            (Result.CUDA_ERROR_INVALID_VALUE, None) if found is None else (Result.CUDA_SUCCESS, self._handle(found[2]))
        )

    def cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        allocation = self.handles[handle]
        location = SimpleNamespace(type=1, id=allocation.ordinal)
        return Result.CUDA_SUCCESS, SimpleNamespace(location=location, requestedHandleTypes=allocation.types)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        allocation = self.handles[handle]
        if self._fails("export") or not allocation.types & kind:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        fd = os.memfd_create("allocation")
        self.device.exported[os.fstat(fd).st_ino] = allocation
        return Result.CUDA_SUCCESS, fd

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[Any, ...]:  # noqa: N802
        allocation = self.device.exported.get(os.fstat(fd).st_ino)
        if allocation is None:
            return Result.CUDA_ERROR_UNKNOWN, None
        return Result.CUDA_SUCCESS, self._handle(allocation)

    def cuPointerGetAttribute(self, which: str, address: int) -> tuple[Any, ...]:  # noqa: N802
        found = self._at(address)
        if found is None:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        [(start, size)] = [(base, size) for base, size in self.reserved.items() if base <= address < base + size]
        return Result.CUDA_SUCCESS, {"start": start, "size": size}[which]

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        found = self._at(address)
        return (Result.CUDA_ERROR_INVALID_VALUE, None, None) if found is None else (Result.CUDA_SUCCESS, *found[:2])

    def segment(self, sizes: list[int], types: int = 1, ordinal: int = 0, behind: int = 8 * UNIT) -> int:
        """Reserves a range and maps allocations into it, as an expandable segment does. Returns its first address."""
        _, base = self.cuMemAddressReserve(sum(sizes) + behind, 0, 0, 0)
        address = base
        for size in sizes:
            _, handle = self.cuMemCreate(size, types, ordinal)
            self.cuMemMap(address, size, 0, handle, 0)
            self.cuMemRelease(handle)
            address += size
        return int(base)
