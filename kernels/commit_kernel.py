"""Device code of `commit`: copies finished results to where the caller wants them, unless the call was given up.

Idea. Work that waits in a stream cannot be taken back. What runs there ahead of its time must then be without effect:
the selection writes to scratch memory, and this kernel behind it, the only one that touches the caller's memory, first
looks at a *gate*, a 64-bit word that the host can store to while the stream waits. Calls carry ascending tickets; those
at or below the gate are given up, and nothing of them is written.

Threads. 256 a CTA, a grid-stride loop; a thread copies one unit of 2, 4 or 8 bytes at a time:

    unit i = row i // row_units, place i % row_units;   source contiguous, target rows `target_stride` bytes apart

Memory. The gate is read once a thread, past the caches (it is in host memory: about 1 us); each unit is read and
written once.

Cost. One launch; bytes = 2 x results. No barrier, no shared memory, no scratch.

Limits. sm_80 and up; addresses and strides are multiples of the unit.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import _cute_ops as ops


class Commit:
    """The kernel for one unit."""

    WIDE_ARGUMENTS = 7
    NARROW_ARGUMENTS = 1

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.threads = 256
        self.shared_bytes = 0

    @cute.jit
    def __call__(self, *values):
        """Launches as many CTAs as `ctas` says; the arguments are the kernel's, then the stream."""
        *arguments, stream = values
        self.kernel(*arguments).launch(grid=[arguments[-1], 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        source: Int64,
        target: Int64,
        target_stride: Int64,
        row_units: Int64,
        units: Int64,
        gate: Int64,
        ticket: Int64,
        ctas: Int32,
    ):
        """Copies; strides in bytes, `units` are of all rows together."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        unit = Int64(block) * self.threads + Int64(tid)
        if ops.load_int64_now(gate) >= ticket:
            unit = units  # given up
        while unit < units:
            row = unit // row_units
            address = target + row * target_stride + (unit - row * row_units) * self.unit
            self.copy(source + unit * self.unit, address)
            unit = unit + Int64(ctas) * self.threads

    @cute.jit
    def copy(self, source: Int64, target: Int64) -> None:
        """Copies one unit."""
        if const_expr(self.unit == 8):
            ops.store_int64(target, ops.load_int64(source))
        elif const_expr(self.unit == 4):
            ops.store_int32(target, ops.load_int32(source))
        else:
            ops.store_score(target, ops.load_score(source, ops.BF16), ops.BF16)
