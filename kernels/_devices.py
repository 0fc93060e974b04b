"""Kinds of devices: what the chooser's table is asked by, and what `explain` can be asked about without having one."""

import functools
from typing import NamedTuple

import torch

from ._cute_compile import capability, device_index


class DeviceKind(NamedTuple):
    """A kind of device."""

    name: str  # such as "h200"; "cpu"
    capability: tuple[int, int]  # compute capability; (0, 0) of a CPU


CPU = DeviceKind("cpu", (0, 0))

KNOWN = {
    "a100": (8, 0),
    "rtx-3060": (8, 6),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "gh200": (9, 0),
    "b200": (10, 0),
    "b300": (10, 3),
    "rtx-5090": (12, 0),
}
"""Compute capabilities of the kinds that can be named where none is present."""

SHARED_BYTES = {
    (8, 0): 166_912,
    (8, 7): 166_912,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (11, 0): 232_448,
}
"""Bytes of shared memory that a launch may ask for a CTA, by compute capability (CUDA C++ Programming Guide, technical
specifications, 2025); of others `LEAST_SHARED_BYTES`."""
LEAST_SHARED_BYTES = 101_376


def shared_bytes(found: tuple[int, int]) -> int:
    """Return how many bytes of shared memory a CTA has at most on a device of a compute capability."""
    return SHARED_BYTES.get(found, LEAST_SHARED_BYTES)


def kind_named(name: str) -> DeviceKind:
    """Return a kind by its name.

    Raises:
        ValueError: an unknown name.
    """
    if name == CPU.name:
        return CPU
    if name not in KNOWN:
        raise ValueError(f"device is {name!r}; known are {', '.join((CPU.name, *KNOWN))}")
    return DeviceKind(name, KNOWN[name])


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device that is present."""
    return CPU if device.type != "cuda" else _cuda_kind(device_index(device))


@functools.cache
def _cuda_kind(index: int) -> DeviceKind:
    return DeviceKind(kind_name(torch.cuda.get_device_name(index)), capability(index))


def kind_name(product: str) -> str:
    """Return the name of a kind from a product's: "NVIDIA H200 SXM" is "h200"."""
    words = product.lower().replace("nvidia", "").replace("geforce", "").split()
    text = "-".join(words)
    # The longest known name that it begins with: "h100-80gb-hbm3" is an "h100".
    known = [name for name in KNOWN if text == name or text.startswith(f"{name}-")]
    return max(known, key=len, default=text or "cuda")
