"""Which memory a session shares, and where in it a tensor lies.

A `Record` is one piece of shared memory; it outlives sessions. A `RegionIndex` is one session's view of the records:
from an address to a region id. It is replaced whole on every change, so that readers need no lock.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from topkd import _arrays, _codec

if TYPE_CHECKING:
    from topkd._arrays import View
    from topkd._cuda import CudaMemory, ForeignMemory
    from topkd._cuda_vmm import VmmMemory
    from topkd._memory import HostMemory
    from topkd.v1 import selection_pb2, tensor_pb2

__all__ = ["Record", "RegionIndex"]

_CACHED = 4096
"""Encoded tensors, and entries of requests, that an index keeps before it starts anew."""


class Record:
    """Shared memory: a memfd, device memory of the client's own, or allocations that the user registered.

    Attributes:
        memory: What keeps it alive and knows how to share it.
        own: Whether the client made the memory; else a user's tensor is in it.
        holders: Open `Region` objects that name it.
    """

    __slots__ = ("__weakref__", "holders", "memory", "own")

    def __init__(self, memory: HostMemory | CudaMemory | ForeignMemory | VmmMemory, own: bool = True) -> None:
        self.memory = memory
        self.own = own
        self.holders = 0


class RegionIndex:
    """An immutable map from addresses to region ids, with caches that are dropped with it.

    Attributes:
        ids: Region id of each record.
        cache: Encoded tensors by (address, shape, strides, dtype) as numpy or torch give them.
        requests: Requests that name regions and plans only, by everything that they are made from.
    """

    __slots__ = ("_entries", "_kept", "_reach", "_starts", "cache", "ids", "requests")

    def __init__(self, ids: dict[Record, int]) -> None:
        self.ids = ids
        self._entries = sorted((r.memory.address, r.memory.address + r.memory.size, i) for r, i in ids.items())
        self._starts = [start for start, _, _ in self._entries]
        self._reach = list(accumulate((end for _, end, _ in self._entries), max))
        self.cache: dict[Any, tensor_pb2.Tensor] = {}
        self.requests: dict[Any, selection_pb2.SelectTopKRequest] = {}
        self._kept = 0

    def with_record(self, record: Record, region_id: int) -> RegionIndex:
        """Returns an index that knows one record more."""
        return RegionIndex({**self.ids, record: region_id})

    def without(self, record: Record) -> RegionIndex:
        """Returns an index that knows one record fewer."""
        return RegionIndex({r: i for r, i in self.ids.items() if r is not record})

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Returns (region id, offset) of the bytes, None unless one region holds them all."""
        place = bisect_right(self._starts, address) - 1
        while place >= 0 and self._reach[place] > address:
            start, end, region_id = self._entries[place]
            if address + nbytes <= end:
                return region_id, address - start
            place -= 1  # regions of one segment may overlap
        return None

    def locate(self, key: Any, view: View) -> tensor_pb2.Tensor | None:
        """Returns the encoded tensor if it lies in a region, and keeps it under `key`.

        A tensor without elements has no place of its own: any region will do.
        """
        nbytes = _arrays.extent(view)
        if nbytes == 0 and self._entries:
            return _codec.reference(view, self._entries[0][2], 0)
        found = self.find(view.address, nbytes)
        if found is None or found[1] % _arrays.itemsize(view.code) or min(view.strides, default=0) < 0:
            return None
        if len(self.cache) >= _CACHED:
            self.cache.clear()
        tensor = self.cache[key] = _codec.reference(view, *found)
        return tensor

    def keep_request(self, key: Any, request: selection_pb2.SelectTopKRequest) -> None:
        """Keeps a request; it is not changed any more."""
        if self._kept >= _CACHED:
            self.requests.clear()
            self._kept = 0
        self.requests[key] = request
        self._kept += len(request.items)
