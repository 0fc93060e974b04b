"""Device memory that has no CUDA IPC handle, shared by POSIX descriptors of its allocations.

That is memory which its owner has mapped itself (CUDA Driver API, "Virtual Memory Management"): torch's expandable
segments, which map more allocations behind the first as they grow, and pools of engines that can sleep. A tensor may
lie in several allocations. Imports `cuda.bindings` when memory is looked at.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from topkd._cuda import allocation_of, checked, device_uuid, on_device
from topkd._side import close_all
from topkd.errors import RegionError
from topkd.v1 import side_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["VmmMemory", "is_vmm"]

_MOST: Final = 250
"""Allocations of one region: Linux passes 253 descriptors in one message."""

_NO_TYPE: Final = (
    "an allocation behind the tensor was made without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ({found}): it cannot "
    "be shared. A pool of your own: ask for that type in cuMemCreate. torch's expandable segments have it unless "
    "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0 is set, or the driver offers fabric handles. vLLM's pool of the sleep mode "
    "has none. What is allocated with client.empty can be shared always"
)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def is_vmm(address: int, ordinal: int) -> bool:
    """Says whether an address is one that its owner has mapped an allocation to."""
    driver = _driver()
    with on_device(ordinal):
        error, handle = driver.cuMemRetainAllocationHandle(address)
        if int(error):
            return False
        checked("cuMemRelease", driver.cuMemRelease(handle))
    return True


class VmmMemory:
    """The allocations that hold a CUDA tensor, whole; the tensor keeps them mapped.

    Attributes:
        device: CUDA ordinal.
        address: First byte of the first allocation.
        size: Bytes of all of them.
        tensor: The tensor.
    """

    __slots__ = ("_range", "_sizes", "address", "device", "size", "tensor")

    def __init__(self, tensor: Any, nbytes: int) -> None:
        """Finds the allocations and tries whether they can be exported.

        Args:
            tensor: With at least one element.
            nbytes: From its first byte to the end of its last.

        Raises:
            RegionError: They cannot; the message says why and what to do.
        """
        self.tensor = tensor
        self.device = int(tensor.device.index)
        driver, first = _driver(), tensor.data_ptr()
        with on_device(self.device):
            self.address, size = allocation_of(driver, first)
            self._sizes = [size]
            end = self.address + size
            while end < first + nbytes:
                _, size = allocation_of(driver, end)
                self._sizes.append(size)
                end += size
            self._range = _range(first)
        self.size = end - self.address
        if len(self._sizes) > _MOST:
            raise RegionError(
                f"the tensor lies in {len(self._sizes)} allocations, at most {_MOST} can be shared as one region: "
                "share parts of it, or allocate it with client.empty"
            )
        with self.exported():
            pass

    @contextlib.contextmanager
    def exported(self) -> Iterator[tuple[side_pb2.SideRequest, list[int]]]:
        """Gives the request that shares the memory, and the descriptors beside it, which are closed at the end.

        They are not kept: an open descriptor keeps memory that its owner gives back.
        """
        fds: list[int] = []
        try:
            with on_device(self.device):
                address = self.address
                for size in self._sizes:
                    fds.append(_export(address))
                    address += size
            message = side_pb2.RegisterVmm(
                device_uuid=device_uuid(self.device),
                address=self.address,
                range_address=self._range[0],
                range_size=self._range[1],
                sizes=self._sizes,
            )
            yield side_pb2.SideRequest(register_vmm=message), fds
        finally:
            close_all(fds)


def _range(address: int) -> tuple[int, int]:
    """Returns address and bytes of the range that is reserved around an address."""
    driver, known = _driver(), []
    for name in ("RANGE_START_ADDR", "RANGE_SIZE"):
        which = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        known.append(int(checked(name, driver.cuPointerGetAttribute(which, address))))
    return known[0], known[1]


def _export(address: int) -> int:
    driver = _driver()
    handle = checked("cuMemRetainAllocationHandle", driver.cuMemRetainAllocationHandle(address))
    try:
        posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        found = checked("properties", driver.cuMemGetAllocationPropertiesFromHandle(handle)).requestedHandleTypes
        if not int(found) & int(posix):
            raise RegionError(_NO_TYPE.format(found=f"its handle types are {int(found):#x}"))
        return int(checked("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle(handle, posix, 0)))
    finally:
        driver.cuMemRelease(handle)
