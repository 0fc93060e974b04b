"""Device code of `answer`: tells whoever waits that a launch is over, unless the launch was given up.

Idea. A launch that waited in its stream for a *request word* is answered by two stores: 0 to the request word, so that
the next launch waits again, then 1 or more to the *done word*. If the launch was given up, its spare memory is marked
(`_cute_rows`), and nothing may be stored: the request is still there for a launch to come. An operation of the stream
stores always; this kernel, behind the launch in the stream, looks first. A caller whose own kernel waits
(`lane_call_kernel`) left a *ticket* in the GPU's memory and looks there for its *echo*, which is stored as soon as the
request is cleared; the done word becomes one more than the ticket.

Threads. One does it all.

Memory. The spare memory begins with the mark, and behind it the number of launches answered so far, 64 bits each. They
are read past the L1 cache, where an SM may have the mark as it was when the launch looked. The words are in memory that
the host or another process looks at.

Order. The outputs were written by kernels that end before this one goes on: from sm_90 on it is launched before that
(programmatic dependent launch), and waits. The ticket is read before the request word is cleared, so that it is none of
a later call. The request word and the counts are stored before the done word, for all who see that (a release at system
scope); the echo stands for no more than that the outputs are complete.

Cost. One launch, six stores.

Limits. sm_80 and up.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import _cute_ops as ops
from .answer_ops import load_int64_first


class Answer:
    """The kernel, for devices that can start it before what is before it has ended, or not."""

    WIDE_ARGUMENTS = 7
    NARROW_ARGUMENTS = 0

    def __init__(self, recent: bool) -> None:
        self.recent = recent
        self.threads = 32
        self.shared_bytes = 0

    @cute.jit
    def __call__(self, *values):
        """Launches one warp; the arguments are the kernel's, then the stream."""
        *addresses, stream = values
        self.kernel(*addresses).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.recent)

    @cute.kernel
    def kernel(self, spare: Int64, request: Int64, done: Int64, calls: Int64, told: Int64, ticket: Int64, echo: Int64):
        """Answers; all are addresses, `calls` and `told` where the number of answers goes."""
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(self.recent):
            cute.arch.griddepcontrol_wait()
        if tid == Int32(0):
            mark = ops.load_int64_now(spare)
            count = ops.load_int64_now(spare + 8) + 1
            asked = load_int64_first(ticket)
            if mark == Int64(0):
                ops.store_int64_now(request, Int64(0))
                ops.store_int64_now(echo, asked)
                ops.store_int64(spare + 8, count)
                ops.store_int64_now(told, count)
                ops.store_int64_now(calls, count)
                ops.store_int64_last(done, asked + 1)
