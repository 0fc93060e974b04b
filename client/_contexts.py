"""What is to be said of a CUDA context that a device refuses, by the server's worker and by `topkd doctor` alike.

A device takes only so many contexts, however much of its memory is free, and the driver says "out of memory" for both.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

from topkd._gpus import nvml_device

__all__ = ["REMEDY", "Memory", "memory_of", "refusal"]

WORKER_BYTES: Final = 526 << 20
"""Device memory of a worker with its context (measured on one H200, 2026)."""

REMEDY: Final = "have fewer sessions (--limit sessions) or --spares, or run MPS"
"""What helps; each worker, each spare and each client has a context of its own."""


class Memory(NamedTuple):
    """A device's memory in bytes."""

    free: int
    total: int


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def memory_of(uuid: str) -> Memory | None:
    """Asks NVML for a device's memory, which needs no context; None where it does not say."""
    with nvml_device(uuid) as device:
        if device is None:
            return None
        nvml, handle = device
        found = _NvmlMemory()
        return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)) else Memory(found.free, found.total)


def refusal(memory: Memory | None) -> str:
    """Returns what "out of memory" means for a context on a device whose memory is known, or not."""
    if memory is None:
        return "for want of device memory, or because there are too many CUDA contexts"
    shown = f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free"
    if memory.free < WORKER_BYTES:
        return f"{shown}, and a worker takes {WORKER_BYTES / 2**30:.1f}"
    return f"though {shown}: the device takes no more CUDA contexts"
