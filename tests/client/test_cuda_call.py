"""Calls of lanes by a kernel, on a driver in Python: what is loaded, and what a launch is given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import topkd
from topkd import _cuda_call, _mps
from topkd._cuda_call import CallKernel
from topkd._words import FIRST_LANE, LINE, MOST_LANES, SIGNALS_SIZE, Words, offset_of_echo, offset_of_ticket

BASE, SIGNALS = 1 << 40, 1 << 41
CODE, NAME = b"\x7fELF code \0 of a kernel", "lane_call"
ARGUMENTS = 8


class Driver:
    """The calls that are made, on a device of a compute capability."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_MPS_ENABLED="mps"
    )
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early")
    CUlaunchConfig = SimpleNamespace

    def __init__(self, major: int = 9, *, mps: int = 1) -> None:
        self.found = {"major": major, "mps": mps}
        self.loaded: list[bytes] = []
        self.launches: list[tuple[int, list[int], Any]] = []
        self.refuses = 0

    def CUlaunchAttribute(self) -> Any:  # noqa: N802 - the driver's names
        return SimpleNamespace(value=SimpleNamespace())

    def cuDeviceGetAttribute(self, which: str, _: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.found[which]

    def cuModuleLoadData(self, image: int) -> tuple[int, Any]:  # noqa: N802
        if self.refuses:
            return self.refuses, None
        self.loaded.append(ctypes.string_at(image, len(CODE)))
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, Any]:  # noqa: N802
        assert module == "module"
        return 0, name.decode()

    def cuFuncLoad(self, function: str) -> tuple[int]:  # noqa: N802
        assert function == NAME
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: str, arguments: int, extra: int) -> tuple[int]:  # noqa: N802
        assert (function, extra) == (NAME, 0)
        pointers = (ctypes.c_void_p * ARGUMENTS).from_address(arguments)
        values = [ctypes.c_uint64.from_address(pointer or 0).value for pointer in pointers]
        self.launches.append((config.hStream, values, config))
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    with_driver(made, monkeypatch)
    return made


def with_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def on_device(_: int) -> Iterator[None]:
        yield

    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", driver, raising=False)
    monkeypatch.setattr(_cuda_call, "on_device", on_device)
    monkeypatch.setattr(_cuda_call, "_loaded", {})


def test_a_call_is_one_launch_of_one_warp_with_the_lanes_words(driver: Driver, page: int) -> None:
    lane, words = FIRST_LANE + 3, Words(page)
    signals: Any = SimpleNamespace(address=SIGNALS)
    call = CallKernel(CODE, NAME, 0).prepare(words, BASE, signals, lane, 7)
    for stream in (11, 12):
        call(stream)
    assert [stream for stream, *_ in driver.launches] == [11, 12]
    request, done = BASE + 2 * lane * LINE, BASE + (2 * lane + 1) * LINE
    own = SIGNALS + 3 * 256
    for _, values, config in driver.launches:
        assert values == [request, 7, done, request + 8, done + 48, request + 16, own, own + 128]
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (1, 1, 1)
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (32, 1, 1)


@pytest.mark.parametrize(("major", "early"), [(8, False), (9, True), (10, True)])
def test_it_is_launched_early_where_the_code_waits(
    major: int, early: bool, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(major)
    with_driver(driver, monkeypatch)
    signals: Any = SimpleNamespace(address=SIGNALS)
    CallKernel(CODE, NAME, 0).prepare(Words(page), BASE, signals, FIRST_LANE, 1)(1)
    [(_, _, config)] = driver.launches
    assert hasattr(config, "attrs") is early
    if early:
        assert (config.numAttrs, config.attrs[0].id) == (1, "early")
        assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_code_is_loaded_once_a_device(driver: Driver) -> None:
    for ordinal in (0, 0, 1):
        CallKernel(CODE, NAME, ordinal)
    assert driver.loaded == [CODE, CODE]


def test_code_that_the_driver_refuses_is_told(driver: Driver) -> None:
    driver.refuses = 209
    with pytest.raises(topkd.RegionError, match="cuModuleLoadData failed: 209"):
        CallKernel(CODE, NAME, 0)


def test_without_mps_kernels_take_turns(driver: Driver) -> None:
    assert _cuda_call.take_turns(0) is None
    driver.found["mps"] = 0
    assert "MPS" in str(_cuda_call.take_turns(0))
    assert not _mps.active(driver, 0)


def test_every_lane_has_a_ticket_and_an_echo_of_its_own() -> None:
    places = [at(FIRST_LANE + lane) for lane in range(MOST_LANES) for at in (offset_of_ticket, offset_of_echo)]
    assert places == list(range(0, SIGNALS_SIZE, 128))
