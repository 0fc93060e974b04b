"""Regions by descriptors of allocations: what is mapped where and how often, what is refused. On a fake driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_driver import UNIT, Device, FakeDriver
from topkd.server._memory_vmm import MOST_ALLOCATIONS, VmmMapping, VmmSpace
from topkd.server.errors import DeviceMismatchError, FieldError, IpcOpenFailedError
from topkd.v1 import side_pb2

SIZES = [UNIT, 10 * UNIT, 10 * UNIT]


class Client:
    """A process that shares."""

    def __init__(self, device: Device) -> None:
        self.driver = FakeDriver(device, 1 << 30)
        self.fds: list[int] = []

    def export(self, address: int, sizes: list[int]) -> tuple[side_pb2.RegisterVmm, list[int]]:
        """What a client sends for allocations that begin at an address."""
        fds, at = [], address
        for size in sizes:
            _, handle = self.driver.cuMemRetainAllocationHandle(at)
            fds.append(self.driver.cuMemExportToShareableHandle(handle, 1, 0)[1])
            self.driver.cuMemRelease(handle)
            at += size
        self.fds += fds
        [(start, whole)] = [
            (base, size) for base, size in self.driver.reserved.items() if base <= address < base + size
        ]
        message = side_pb2.RegisterVmm(address=address, range_address=start, range_size=whole, sizes=sizes)
        return message, fds


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    made = Client(device)
    yield made
    for fd in made.fds:
        os.close(fd)


@pytest.fixture
def driver(device: Device) -> Iterator[FakeDriver]:
    made = FakeDriver(device)
    yield made
    assert not made.handles  # whatever happened, none is left over
    assert made.accessible == set(made.mapped)


def test_the_allocations_of_a_tensor_are_mapped_one_behind_the_other(client: Client, driver: FakeDriver) -> None:
    base = client.driver.segment(SIZES)
    space = VmmSpace(driver, 0)
    mapping = space.open(*client.export(base, SIZES))
    assert mapping.size == sum(SIZES)
    assert [(at - mapping.address, size) for at, (size, _) in sorted(driver.mapped.items())] == [
        (0, UNIT),
        (UNIT, 10 * UNIT),
        (11 * UNIT, 10 * UNIT),
    ]
    ours = [allocation for _, (_, allocation) in sorted(driver.mapped.items())]
    assert ours == [allocation for _, (_, allocation) in sorted(client.driver.mapped.items())]
    space.close(mapping)
    assert not driver.mapped
    assert not driver.reserved


def test_regions_of_a_segment_lie_as_in_the_client_and_share(client: Client, driver: FakeDriver) -> None:
    base = client.driver.segment(SIZES)
    space = VmmSpace(driver, 0)
    later = space.open(*client.export(base + UNIT, SIZES[1:]))
    whole = space.open(*client.export(base, SIZES))
    middle = space.open(*client.export(base + UNIT, SIZES[1:2]))
    assert later.address - whole.address == middle.address - whole.address == UNIT
    assert len(driver.mapped) == 3
    assert len(driver.reserved) == 1
    space.close(whole)
    assert sorted(at - later.address for at in driver.mapped) == [0, 10 * UNIT]
    space.close(later)
    assert list(driver.mapped) == [middle.address]
    space.close(middle)
    assert not driver.mapped
    assert not driver.reserved


def test_segments_are_apart(client: Client, driver: FakeDriver) -> None:
    space = VmmSpace(driver, 0)
    mappings = [space.open(*client.export(client.driver.segment([UNIT]), [UNIT])) for _ in range(3)]
    assert len(driver.reserved) == 3
    for mapping in mappings:
        space.close(mapping)
    assert not driver.reserved


def refused(space: VmmSpace, message: side_pb2.RegisterVmm, fds: list[int], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        space.open(message, fds)


def changed(message: side_pb2.RegisterVmm, **fields: Any) -> side_pb2.RegisterVmm:
    other = side_pb2.RegisterVmm()
    other.CopyFrom(message)
    for name, value in fields.items():
        if name == "sizes":
            other.sizes[:] = value
        else:
            setattr(other, name, value)
    return other


def test_what_cannot_be_is_refused_and_leaves_nothing(client: Client, driver: FakeDriver) -> None:
    base = client.driver.segment(SIZES)
    message, fds = client.export(base, SIZES)
    space = VmmSpace(driver, 0)
    top = 1 << 64
    for fields, text in (
        ({"sizes": []}, "0 sizes; there must be 1"),
        ({"sizes": [UNIT] * (MOST_ALLOCATIONS + 1)}, "251 sizes"),
        ({"sizes": [UNIT]}, "3 descriptors .* for 1 sizes"),
        ({"sizes": [UNIT, 0, UNIT]}, "multiples"),
        ({"sizes": [UNIT, 4096, UNIT]}, "multiples"),
        ({"sizes": [UNIT, top - UNIT, UNIT]}, "not all in the range"),
        ({"address": base + 1}, "address is 0x.*multiple"),
        ({"range_address": base + 4096}, "range_address is 0x.*multiple"),
        ({"range_size": UNIT + 1}, "range_size is 0x.*multiple"),
        ({"range_size": 0}, "range_size is 0"),
        ({"range_size": 1 << 48}, "range_size is 281"),
        ({"range_size": 20 * UNIT}, "not all in the range"),
        ({"address": base - UNIT}, "not all in the range"),
        ({"address": top - UNIT}, "not all in the range"),
    ):
        refused(space, changed(message, **fields), fds, FieldError, text)
    refused(
        space, changed(message, sizes=[2 * UNIT, 9 * UNIT, UNIT]), fds, IpcOpenFailedError, "cannot be mapped as one of"
    )
    client.fds.append(os.open("/dev/null", os.O_RDONLY))
    refused(space, message, [*fds[:2], client.fds[-1]], IpcOpenFailedError, "no allocation")
    assert not driver.mapped
    assert not driver.reserved


def test_allocations_of_another_device_or_of_the_host_are_refused(client: Client, driver: FakeDriver) -> None:
    base = client.driver.segment([UNIT], ordinal=1)
    refused(VmmSpace(driver, 0), *client.export(base, [UNIT]), DeviceMismatchError, "not this server's device's")
    assert not driver.mapped
    assert not driver.reserved


@pytest.mark.parametrize("call", ["reserve", "map", "access"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failure_on_the_way_leaves_what_was_there(client: Client, driver: FakeDriver, call: str, nth: int) -> None:
    base = client.driver.segment(SIZES)
    space = VmmSpace(driver, 0)
    message, fds = client.export(base, SIZES)
    driver.fail = {call: nth}
    if call == "reserve" and nth > 1:
        space.close(space.open(message, fds))
        return
    refused(space, message, fds, IpcOpenFailedError, "CUDA_ERROR")
    assert not driver.mapped
    assert not driver.reserved
    first = space.open(*client.export(base, SIZES[:1]))
    driver.fail = {call: min(nth, 2)}
    if call != "reserve":
        refused(space, message, fds, IpcOpenFailedError, "CUDA_ERROR")
        assert list(driver.mapped) == [first.address]
    driver.fail = {}
    whole = space.open(message, fds)
    assert whole.address == first.address
    space.close(first)
    assert len(driver.mapped) == 3
    space.close(whole)
    assert not driver.reserved


def test_what_contradicts_a_region_is_refused(client: Client, driver: FakeDriver) -> None:
    base = client.driver.segment(SIZES)
    space = VmmSpace(driver, 0)
    message, fds = client.export(base, SIZES)
    mapping: VmmMapping = space.open(message, fds)
    other, more = client.export(client.driver.segment([21 * UNIT]), [21 * UNIT])
    for fields in ({"sizes": [21 * UNIT]}, {"sizes": [UNIT], "address": base + 2 * UNIT}):
        moved = changed(other, address=base, range_address=message.range_address, range_size=message.range_size)
        refused(space, changed(moved, **fields), more, FieldError, "another allocation was mapped there")
    bigger = changed(message, range_size=message.range_size + UNIT)
    refused(space, bigger, fds, FieldError, "overlaps another one")
    assert len(driver.mapped) == 3
    space.close(mapping)
    assert not driver.reserved
