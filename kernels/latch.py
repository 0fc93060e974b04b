"""`latch`: marks spare memory if what comes next in the stream was given up.

Host side: the one variant and launching. The kernel, and why there is one, are in `latch_kernel`.
"""

from collections.abc import Callable

import torch

from ._cute_compile import arch_of, capability, device_index, load_or_compile
from ._loaded import Loaded


class Latch:
    """Latches in front of launches. Owns the variant that was compiled."""

    name = "latch"
    oldest = (8, 0)

    def __init__(self) -> None:
        self._launchers = Loaded(self._load)

    def precompile(self, arch: str) -> None:
        """Load or compile the variant for an architecture such as "sm_90a"; needs no GPU."""
        self._launchers(arch)

    def warm(self, device: torch.device) -> None:
        """Load or compile the variant and launch it once, so that the device has it."""
        words = torch.zeros(2, dtype=torch.int64, device=device)
        self(words.data_ptr(), 1, words.data_ptr() + 8, device)

    def __call__(self, gate: int, ticket: int, spare: int, device: torch.device) -> None:
        """Enqueue a look at a gate on the current stream of a device and return without waiting.

        Args:
            gate: address of 64 bits, aligned, that the device can read and somebody may store to at any time.
            ticket: 1 .. 2^63-1; what comes next is given up where the gate holds as much or more.
            spare: address of the spare memory (`spare_bytes`) of what comes next; its mark becomes 1 or 0.
            device: a CUDA device.

        Raises:
            KernelUnavailableError: the variant can be neither loaded nor compiled.
        """
        index = device_index(device)
        stream = torch._C._cuda_getCurrentRawStream(index)
        self._launchers(arch_of(capability(index)))(gate, ticket, spare, stream)

    def _load(self, arch: str) -> Callable[..., None]:
        return load_or_compile("latch_kernel", "Latch", (), arch).function
