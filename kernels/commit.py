"""`commit`: results move from scratch memory to the caller's, unless the call was given up meanwhile.

Host side: the three variants (units of 2, 4 and 8 bytes) and launching. The kernel, and why there is one, are in
`commit_kernel`.
"""

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from ._cute_compile import arch_of, capability, device_index, load_or_compile, processors

UNITS = (8, 4, 2)
"""Bytes that a thread copies at a time; the largest that divides all addresses and strides is taken."""
_THREADS = 256
_CTAS_AN_SM = 4


class Commit:
    """Copies that a gate can stop. Owns the variants that were compiled."""

    name = "commit"
    oldest = (8, 0)

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, int], Callable[..., None]] = {}
        self._lock = threading.Lock()

    def precompile(self, arch: str) -> None:
        """Load or compile all variants for an architecture such as "sm_90a"; needs no GPU."""
        for unit in UNITS:
            self._function((arch, unit))

    def warm(self, device: torch.device) -> None:
        """Load or compile all variants and launch each once, so that the device has them."""
        gate = torch.zeros(1, dtype=torch.int64, device=device)
        for dtype in (torch.int64, torch.int32, torch.int16):
            cells = torch.zeros(2, 1, 1, dtype=dtype, device=device)
            self(cells[0], cells[1], gate.data_ptr(), 1)

    def __call__(self, source: Tensor, target: Tensor, gate: int, ticket: int) -> None:
        """Enqueue a copy on the current stream and return without waiting.

        Args:
            source: (rows, columns), contiguous, on the current CUDA device.
            target: of the same shape and dtype, last stride 1, rows apart; overlaps nothing that is read.
            gate: address of 64 bits, aligned, that the device can read and somebody may store to meanwhile.
            ticket: 1 .. 2^63-1; nothing is written if the gate holds as much or more when the copy begins.

        Raises:
            KernelUnavailableError: the variant can be neither loaded nor compiled.
        """
        rows, columns = source.shape
        if not source.numel():
            return
        size = source.element_size()
        stride = (target.stride(0) if rows > 1 else columns) * size
        common = math.gcd(source.data_ptr(), target.data_ptr(), stride, columns * size)
        unit = next(unit for unit in UNITS if common % unit == 0)
        index = device_index(source.device)
        units = rows * columns * size // unit
        ctas = min(-(-units // _THREADS), _CTAS_AN_SM * processors(index))
        function = self._function((arch_of(capability(index)), unit))
        addresses = source.data_ptr(), target.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(index)
        function(*addresses, stride, columns * size // unit, units, gate, ticket, ctas, stream)

    def _function(self, variant: tuple[str, int]) -> Callable[..., None]:
        """Return the launcher of a variant, compiling it if it is cold."""
        with self._lock:
            function = self._compiled.get(variant)
            if function is None:
                arch, unit = variant
                function = load_or_compile("commit_kernel", "Commit", (unit,), arch).function
                self._compiled[variant] = function
        return function
