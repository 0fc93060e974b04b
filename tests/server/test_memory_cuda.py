"""Regions by CUDA IPC handles, on a runtime in Python: what is opened is closed, never beside armed lanes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from topkd.kernels import CallCode
from topkd.server._memory_cuda import CudaBackend
from topkd.server.errors import FieldError, IpcOpenFailedError, ServerError
from topkd.v1 import control_pb2, selection_pb2

UUID = "GPU-1"
SIZE = 2 << 20


class Runtime:
    """The calls that the backend makes, of a device that holds one allocation for each first byte of a handle."""

    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815 - the runtime's names
    cudaError_t = SimpleNamespace(cudaSuccess=0)  # noqa: N815

    def __init__(self) -> None:
        self.held = 0
        self.opened: dict[int, int] = {}
        self.known = True

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.held += 1
        yield
        self.held -= 1

    def cudaSetDevice(self, _: int) -> None:  # noqa: N802
        pass

    def cudaIpcMemHandle_t(self) -> Any:  # noqa: N802
        import ctypes

        self.buffer = ctypes.create_string_buffer(64)
        return SimpleNamespace(getPtr=lambda: ctypes.addressof(self.buffer))

    def cudaIpcOpenMemHandle(self, _handle: Any, _flags: int) -> tuple[int, int]:  # noqa: N802
        base = self.buffer.raw[0] << 32
        self.opened[base] = self.opened.get(base, 0) + 1
        return 0, base

    def cudaIpcCloseMemHandle(self, base: int) -> tuple[int]:  # noqa: N802
        assert self.held, "it waits for every stream"
        self.opened[base] -= 1
        return (0,)

    def cuMemGetAddressRange(self, base: int) -> tuple[Any, int, int]:  # noqa: N802
        return (0 if self.known else SimpleNamespace(name="UNKNOWN")), base, SIZE


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def backend(runtime: Runtime) -> Iterator[CudaBackend]:
    made: Any = CudaBackend.__new__(CudaBackend)  # without a device
    made._runtime = runtime
    made._driver = SimpleNamespace(
        cuMemGetAddressRange=runtime.cuMemGetAddressRange,
        CUdeviceptr=int,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
    )
    made.device = torch.device("cuda", 0)
    made._stream = SimpleNamespace(synchronize=lambda: None)
    made._lock = threading.Lock()
    made._allocations = {}
    made._reaper = ThreadPoolExecutor(1)
    made.info = control_pb2.Device(uuid=UUID)
    made._call = made._signals = None
    made._no_call_because = "no MPS"
    yield made
    assert not any(runtime.opened.values()), "whatever happened, nothing is left open"
    made._reaper.shutdown()


def memory(first: int = 1, offset: int = 0, size: int = SIZE) -> selection_pb2.CudaIpcMemory:
    return selection_pb2.CudaIpcMemory(handle=bytes([first]) + bytes(63), offset=offset, size=size, device_uuid=UUID)


def test_regions_of_one_allocation_share_a_mapping_until_the_last_is_closed(
    runtime: Runtime, backend: CudaBackend
) -> None:
    regions = [backend.open_cuda_ipc(memory(offset=at, size=512), runtime.hold) for at in (0, 512, 1024)]
    other = backend.open_cuda_ipc(memory(2), runtime.hold)
    assert [region.address for region in regions] == [(1 << 32) + at for at in (0, 512, 1024)]
    for left, region in ((2, regions[1]), (2, other), (1, regions[0]), (0, regions[2])):
        with runtime.hold():
            region.close()
        assert runtime.opened[1 << 32] == left


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (SIZE, 1), (SIZE + 512, 8)])
def test_what_ends_beyond_its_allocation_is_closed_with_the_lanes_held(
    runtime: Runtime, backend: CudaBackend, offset: int, size: int
) -> None:
    with pytest.raises(FieldError, match="end beyond the allocation"):
        backend.open_cuda_ipc(memory(offset=offset, size=size), runtime.hold)
    assert not any(runtime.opened.values())
    kept = backend.open_cuda_ipc(memory(), runtime.hold)
    with pytest.raises(FieldError, match="end beyond the allocation"):
        backend.open_cuda_ipc(memory(offset=offset, size=size), runtime.hold)
    assert runtime.opened[1 << 32] > 0, "the other region's mapping stays"
    with runtime.hold():
        kept.close()


def test_an_allocation_of_no_known_size_is_closed_with_the_lanes_held(runtime: Runtime, backend: CudaBackend) -> None:
    runtime.known = False
    with pytest.raises(IpcOpenFailedError, match="size is not known"):
        backend.open_cuda_ipc(memory(), runtime.hold)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (selection_pb2.CudaIpcMemory(handle=b"short", size=1, device_uuid=UUID), "handle"),
        (memory(size=0), "size"),
        (memory(size=SIZE + 1), "size"),
        (memory(offset=SIZE + 1), "offset"),
        (selection_pb2.CudaIpcMemory(handle=bytes(64), size=1, device_uuid="GPU-other"), "device_uuid"),
    ],
)
def test_what_is_wrong_is_named_as_the_request_has_it(runtime: Runtime, backend: Any, wrong: Any, field: str) -> None:
    backend._call = CallCode(b"code", "name")
    for open_memory, name in ((backend.open_cuda_ipc, "cuda_ipc"), (backend.open_signals, "signals")):
        with pytest.raises(ServerError) as found:
            open_memory(wrong, runtime.hold)
        assert found.value.field == f"{name}.{field}"


def test_the_memory_where_kernels_wait_is_opened_once_and_checked(runtime: Runtime, backend: Any) -> None:
    assert backend.open_signals(memory(), runtime.hold) == (0, b"", "", "no MPS")
    assert not runtime.opened
    backend._call = CallCode(b"code", "name")
    for wrong in (memory(size=64), memory(offset=8, size=8192)):
        with pytest.raises(FieldError, match="bytes at offset"):
            backend.open_signals(wrong, runtime.hold)
    assert not any(runtime.opened.values())
    for _ in range(3):
        found = backend.open_signals(memory(), runtime.hold)
        assert (found.address, found.code, found.kernel) == (1 << 32, b"code", "name")
        assert "MPS" in found.reason
    assert runtime.opened[1 << 32] == 1
    other = backend.open_signals(memory(2), runtime.hold)
    assert (other.address, other.code) == (0, b"")
    assert "other memory" in other.reason
    with runtime.hold():
        backend._signals[1].close()
