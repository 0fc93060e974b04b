"""Tensors over allocations without a CUDA IPC handle: what is found, exported and refused; with a driver in Python."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_driver import UNIT, Device, FakeDriver
from topkd import _cuda_vmm
from topkd._cuda_vmm import VmmMemory, is_vmm
from topkd._regions import Record, RegionIndex
from topkd.errors import RegionError
from topkd.server._memory_vmm import VmmSpace

SIZES = [UNIT, 10 * UNIT, 10 * UNIT]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, device: Device) -> FakeDriver:
    made = FakeDriver(device)
    monkeypatch.setattr(_cuda_vmm, "_driver", lambda: made)
    monkeypatch.setattr(_cuda_vmm, "on_device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(_cuda_vmm, "device_uuid", lambda ordinal: f"GPU-{ordinal}")
    return made


def tensor(address: int) -> Any:
    return SimpleNamespace(device=SimpleNamespace(index=0), data_ptr=lambda: address)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_that_was_not_mapped_is_none(driver: FakeDriver) -> None:
    base = driver.segment([UNIT])
    assert is_vmm(base + 5, 0)
    assert not is_vmm(base + UNIT, 0)
    assert not is_vmm(4096, 0)
    assert not driver.handles


@pytest.mark.parametrize(
    ("at", "nbytes", "first", "sizes"),
    [
        (0, 1, 0, SIZES[:1]),
        (512, UNIT - 512, 0, SIZES[:1]),
        (512, UNIT, 0, SIZES[:2]),
        (UNIT, 10 * UNIT, UNIT, SIZES[1:2]),
        (11 * UNIT - 4, 8, UNIT, SIZES[1:]),
        (UNIT - 4, 10 * UNIT + 8, 0, SIZES),
    ],
)
def test_the_allocations_of_a_tensor(
    driver: FakeDriver, device: Device, at: int, nbytes: int, first: int, sizes: list[int]
) -> None:
    base = driver.segment(SIZES)
    before = open_descriptors()
    memory = VmmMemory(tensor(base + at), nbytes)
    assert (memory.address, memory.size, memory.device) == (base + first, sum(sizes), 0)
    assert open_descriptors() == before
    with memory.exported() as (message, fds):
        shared = message.register_vmm
        assert list(shared.sizes) == sizes
        assert (shared.device_uuid, shared.address, shared.range_address) == ("GPU-0", base + first, base)
        assert shared.range_size == sum(SIZES) + 8 * UNIT
        assert open_descriptors() == before + len(sizes)
        theirs = FakeDriver(device, 1 << 44)
        mapping = VmmSpace(theirs, 0).open(shared, fds)
        assert mapping.size == memory.size
    assert open_descriptors() == before
    assert not driver.handles
    ours = {allocation for _, allocation in driver.mapped.values()}
    assert {allocation for _, allocation in theirs.mapped.values()} <= ours


def test_no_descriptor_type_is_told_with_the_remedy(driver: FakeDriver) -> None:
    before = open_descriptors()
    for types in (0, 8):
        with pytest.raises(
            RegionError, match=rf"handle types are {types:#x}.*cuMemCreate.*EXPANDABLE_SEGMENTS_IPC.*empty"
        ):
            VmmMemory(tensor(driver.segment([UNIT], types)), 1)
    assert open_descriptors() == before
    assert not driver.handles


def test_an_export_that_fails_closes_what_it_has(driver: FakeDriver) -> None:
    memory = VmmMemory(tensor(driver.segment(SIZES)), sum(SIZES))
    before = open_descriptors()
    driver.fail = {"export": 3}
    with pytest.raises(RegionError, match="cuMemExportToShareableHandle failed"), memory.exported():
        pass
    assert open_descriptors() == before
    assert not driver.handles


def test_memory_that_its_owner_has_unmapped_cannot_be_exported_again(driver: FakeDriver) -> None:
    base = driver.segment(SIZES)
    memory = VmmMemory(tensor(base), sum(SIZES))
    driver.cuMemUnmap(base + UNIT, SIZES[1])
    with pytest.raises(RegionError, match="cuMemRetainAllocationHandle failed"), memory.exported():
        pass


def test_more_allocations_than_a_message_carries_are_refused(driver: FakeDriver) -> None:
    base = driver.segment([UNIT] * 251)
    with pytest.raises(RegionError, match="251 allocations, at most 250"):
        VmmMemory(tensor(base), 251 * UNIT)
    assert VmmMemory(tensor(base), 250 * UNIT).size == 250 * UNIT


def record(address: int, size: int) -> Record:
    return Record(SimpleNamespace(address=address, size=size, device=0), own=False)  # type: ignore[arg-type]


def test_the_index_finds_a_tensor_in_any_of_the_regions_that_overlap() -> None:
    small, large, last = record(200, 100), record(100, 400), record(450, 100)
    for records in ((small, large, last), (last, large, small)):
        index = RegionIndex({one: place for place, one in enumerate(records)})
        numbers = index.ids
        assert index.find(220, 50) in {(numbers[small], 20), (numbers[large], 120)}
        assert index.find(220, 100) == (numbers[large], 120)
        assert index.find(460, 40) in {(numbers[large], 360), (numbers[last], 10)}
        assert index.find(460, 60) == (numbers[last], 10)
        assert index.find(440, 20) == (numbers[large], 340)
        assert index.find(440, 80) is None
        assert index.find(550, 1) is None
        assert index.find(99, 1) is None
