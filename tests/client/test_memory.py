from __future__ import annotations

import fcntl
import gc
import mmap
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from topkd import _arrays
from topkd._arena import SMALL, Arena, NeedMemory, Slot, size_class, tensor_over
from topkd._memory import HostMemory
from topkd._placer import tensor_key
from topkd._regions import Record, RegionIndex

FLOAT32 = _arrays.CODES["float32"]


def mapped(address: int) -> bool:
    return any(
        int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_host_memory_cannot_change_its_size() -> None:
    memory = HostMemory(8192)
    seals = fcntl.fcntl(memory.fd, 1034)  # F_GET_SEALS
    assert seals & 0b111 == 0b111, "seal, shrink, grow"
    assert not seals & 0b11000, "not against writing"
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with mmap.mmap(memory.fd, 8192) as second:
        second[5] = 7
    slot = Slot(Record(memory), 0, 8192, lambda slot: None)
    assert tensor_over(slot, FLOAT32, (2048,), "numpy").view(np.uint8)[5] == 7


def test_host_memory_is_closed_on_exec_and_freed_with_its_last_array() -> None:
    memory = HostMemory(1 << 16)
    fd, address = memory.fd, memory.address
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    view = tensor_over(Slot(Record(memory), 0, 1 << 16, lambda slot: None), FLOAT32, (100,), "numpy")[7:]
    del memory
    gc.collect()
    assert mapped(address)
    view[:] = 1
    del view
    gc.collect()
    assert not mapped(address)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: whole,
        lambda whole: whole[2:, 3:],
        lambda whole: whole[:, ::2],
        lambda whole: whole.T,
        lambda whole: whole[::-1],
        lambda whole: whole[:0],
        lambda whole: whole[1:2, 5:6].reshape(()),
        lambda whole: np.broadcast_to(whole[0], (3, 8)),
        lambda whole: whole.view(np.float16),
        lambda whole: whole.view(ml_dtypes.bfloat16),
    ],
)
@pytest.mark.parametrize("writeable", [True, False])
def test_arrays_are_known_by_where_they_begin(make: Any, writeable: bool) -> None:
    array = make(np.zeros((4, 8), np.float32)).view()
    array.flags.writeable = array.flags.writeable and writeable
    address, *rest = tensor_key(array)
    assert address == array.__array_interface__["data"][0]
    assert rest == [array.shape, array.strides, array.dtype]
    assert sys.getrefcount(array) == 2, "nothing holds it"


@pytest.mark.parametrize("nbytes", [0, 1, 256, 257, 4096, SMALL - 1, SMALL, SMALL + 1, 5_000_000, (1 << 30) + 1])
def test_size_classes_fit_and_waste_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size_class(size) == size
    assert size % 256 == 0
    if nbytes > SMALL:
        assert size <= nbytes * 1.25 + 256


def grown(nbytes: int) -> Arena:
    arena = Arena()
    size = size_class(nbytes)
    arena.add(Record(HostMemory(arena.chunk_bytes(size))), size)
    return arena


def test_an_arena_reuses_a_slot_only_after_the_last_view_is_gone() -> None:
    arena = grown(4000)
    first = tensor_over(arena.take(4000), FLOAT32, (1000,), "numpy")
    address = first.ctypes.data
    view = first.reshape(10, 100)[3:, ::2]
    tensor = torch.from_numpy(view)
    del first, view
    second = tensor_over(arena.take(4000), FLOAT32, (1000,), "numpy")
    assert second.ctypes.data != address
    del tensor
    third = tensor_over(arena.take(4000), FLOAT32, (1000,), "numpy")
    assert third.ctypes.data == address


def test_torch_tensors_own_their_slot_too() -> None:
    arena = grown(4000)
    tensor = tensor_over(arena.take(4000), _arrays.CODES["bfloat16"], (20, 100), "torch")
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (20, 100))
    address = tensor.data_ptr()
    row = tensor[3]
    del tensor
    assert arena.take(4000).address != address
    del row
    assert arena.take(4000).address == address


def test_an_arena_without_an_idle_slot_says_what_it_needs() -> None:
    arena = grown(SMALL)
    taken = [arena.take(SMALL) for _ in range(4)]
    assert len({slot.address for slot in taken}) == 4
    with pytest.raises(NeedMemory) as caught:
        arena.take(SMALL)
    assert caught.value.size == SMALL
    assert arena.chunk_bytes(SMALL) == 8 << 20, "the next chunk is twice as large"


def test_idle_large_slots_are_given_up_above_the_bound() -> None:
    arena = Arena()
    for _ in range(3):
        arena.add(Record(HostMemory(2 << 20)), 2 << 20)
    assert arena.trim(4 << 20) != []
    assert len(arena.trim(0)) == 2
    assert arena.trim(0) == []
    with pytest.raises(NeedMemory):
        arena.take(2 << 20)


def test_regions_are_found_by_address_range() -> None:
    records = [Record(HostMemory(4096 * n)) for n in (1, 2, 3)]
    index = RegionIndex({record: 100 + place for place, record in enumerate(records)})
    for place, record in enumerate(records):
        start, size = record.memory.address, record.memory.size
        assert index.find(start, size) == (100 + place, 0)
        assert index.find(start + 40, 4) == (100 + place, 40)
        assert index.find(start + size - 4, 4) == (100 + place, size - 4)
        assert index.find(start + size - 4, 5) is None
    assert index.find(1, 4) is None
    assert index.without(records[1]).find(records[1].memory.address, 4) is None
    assert index.find(records[1].memory.address, 4) is not None, "an index never changes"


def test_tensors_in_regions_become_references() -> None:
    record = Record(HostMemory(1 << 16))
    index = RegionIndex({record: 7})
    slots: deque[Slot] = deque()
    array = tensor_over(Slot(record, 4096, 4096, slots.append), FLOAT32, (16, 64), "numpy")
    part = array[2:5, 1:9]
    found = index.locate("key", _arrays.describe("input", part))
    assert found is not None
    assert (found.region.region_id, found.region.offset) == (7, 4096 + (2 * 64 + 1) * 4)
    assert (list(found.shape), list(found.strides)) == ([3, 8], [64, 1])
    assert index.cache["key"] is found
    assert index.locate("other", _arrays.describe("input", np.zeros(4, np.float32))) is None
    assert index.locate("reversed", _arrays.describe("input", array[::-1])) is None
