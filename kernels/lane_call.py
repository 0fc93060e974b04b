"""`lane_call`: a call of a lane in its caller's stream, made and waited for by one thread.

Host side: the one variant, as a binary that another process loads. The kernel is in `lane_call_kernel`.
"""

from typing import NamedTuple

import torch

from ._cubin import kernel_name
from ._cute_compile import Made, arch_of, capability, device_index, load_or_compile
from ._loaded import Loaded


class CallCode(NamedTuple):
    """Code of a GPU: what a process without this package needs to launch it."""

    binary: bytes  # for the GPU
    name: str  # of the kernel in it


class LaneCall:
    """Code of calls of lanes. Owns the variant that was compiled."""

    name = "lane_call"
    oldest = (8, 0)

    def __init__(self) -> None:
        self._codes = Loaded(self._load)

    def precompile(self, arch: str) -> None:
        """Load or compile the variant for an architecture such as "sm_90a"; needs no GPU."""
        self._codes(arch)

    def code(self, device: torch.device) -> CallCode:
        """Return the code for a CUDA device; loads or compiles it first.

        Raises:
            KernelUnavailableError: it can be neither loaded nor compiled.
        """
        binary = self._codes(arch_of(capability(device_index(device)))).binary
        return CallCode(binary, kernel_name(binary))

    def _load(self, arch: str) -> Made:
        recent = int(arch.removeprefix("sm_").rstrip("a")) >= 90
        return load_or_compile("lane_call_kernel", "LaneCall", (recent,), arch)
