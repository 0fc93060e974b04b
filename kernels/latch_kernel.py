"""Device code of `latch`: marks spare memory if what comes next in the stream was given up.

Idea. The host can store to a word of its own memory whatever holds up the driver, but kernels cannot look at such a
word from many threads (`_cute_rows`). So one thread looks, once, in front of them. Launches carry ascending tickets;
those at or below the *gate* are given up.

Threads. One does it all.

Cost. One launch, one load from the host's memory.

Limits. sm_80 and up.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import _cute_ops as ops


class Latch:
    """The kernel; there is one."""

    WIDE_ARGUMENTS = 3
    NARROW_ARGUMENTS = 0

    def __init__(self) -> None:
        self.threads = 32
        self.shared_bytes = 0

    @cute.jit
    def __call__(self, *values):
        """Launches one warp; the arguments are the kernel's, then the stream."""
        *arguments, stream = values
        self.kernel(*arguments).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, gate: Int64, ticket: Int64, spare: Int64):
        """Sets the mark to 0 or 1; `gate` and `spare` are addresses."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == Int32(0):
            mark = Int64(0)
            if ops.load_int64_now(gate) >= ticket:
                mark = Int64(1)
            ops.store_int64(spare, mark)
