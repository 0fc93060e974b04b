"""GPUs by libcuda and NVML alone, for those who make no context and may lack cuda-bindings."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["nvml_device", "uuid_of", "uuid_text"]


def uuid_text(raw: bytes) -> str:
    """Returns a UUID of 16 bytes as nvidia-smi writes it, "GPU-..."."""
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid_of(cuda: ctypes.CDLL, device: ctypes.c_int) -> str:
    """Returns the UUID of a device of libcuda's."""
    raw = ctypes.create_string_buffer(16)
    cuda.cuDeviceGetUuid(raw, device)
    return uuid_text(raw.raw)


@contextmanager
def nvml_device(uuid: str) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p] | None]:
    """Yields NVML and its handle of a device; None where NVML is not there or does not know it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2():
        yield None
        return
    try:
        handle = ctypes.c_void_p()
        unknown = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        yield None if unknown else (nvml, handle)
    finally:
        nvml.nvmlShutdown()
