"""What is to be said of NVIDIA's Multi-Process Service, in the server's log and by `topkd doctor` alike."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["ABSENT", "CONNECTIONS", "PRESENT", "active"]

ABSENT: Final = (
    "the driver time-slices the engines' GPU work and the server's: a call between an engine's kernels took 387 us "
    "instead of 101 on an H200"
)
"""What it costs that no MPS daemon runs."""

PRESENT: Final = (
    "a fatal GPU fault of one of its clients ends the others' work, and all of them, server and engines, must run as "
    "one user"
)
"""What it risks that one runs."""

CONNECTIONS: Final = 32
"""CUDA_DEVICE_MAX_CONNECTIONS of processes whose streams wait for each other: the most hardware queues."""


def active(driver: Any, ordinal: int) -> bool:
    """Says whether this process's work on a device goes through MPS.

    Args:
        driver: `cuda.bindings.driver`, initialised.
        ordinal: CUDA ordinal.
    """
    error, found = driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, ordinal)
    return not int(error) and bool(found)
