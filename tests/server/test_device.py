"""What is said of a GPU that gives no context."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from topkd import _contexts
from topkd._contexts import Memory
from topkd.server import _device, _memory_cuda

FREE = Memory(123 << 30, 140 << 30)
TOO_MANY = "CUDA error: out of memory, though 123.0 of 140.0 GiB are free: the device takes no more CUDA contexts; "


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (FREE, TOO_MANY + _contexts.REMEDY),
        (Memory(100 << 20, 140 << 30), "CUDA error: out of memory, 0.1 of 140.0 GiB are free, and a worker takes 0.5"),
        (None, "CUDA error: out of memory, for want of device memory, or because there are too many CUDA contexts"),
    ],
)
def test_out_of_memory_is_told_from_too_many_contexts(
    memory: Memory | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def __init__(self) -> None:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(_memory_cuda, "CudaBackend", Refused)
    monkeypatch.setattr(_device, "asked_cuda", lambda: ["GPU-1"])
    monkeypatch.setattr(_contexts, "memory_of", lambda uuid: memory)
    with pytest.raises(_device.DeviceError) as caught:
        _device._open_cuda("cuda")
    assert f"device 'cuda' cannot be used: {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(_memory_cuda, "CudaBackend", Broken)
    with pytest.raises(_device.DeviceError, match=r"cannot be used: No module named 'cuda'$"):
        _device._open_cuda("cuda")


def test_nvml_says_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def handle(uuid: bytes, found: Any) -> int:
        found._obj.value = 7
        return 0 if uuid == b"GPU-1" else 6  # NVML_ERROR_NOT_FOUND

    def memory(device: Any, found: Any) -> int:
        assert device.value == 7
        found._obj.total, found._obj.free, found._obj.used = 10, 4, 6
        return 0

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlShutdown=lambda: ended.append(True),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert _contexts.memory_of("GPU-1") == Memory(free=4, total=10)
    assert _contexts.memory_of("GPU-2") is None
    assert ended == [True, True]
