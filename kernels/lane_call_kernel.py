"""Device code of `lane_call`: a call of a lane in its caller's stream, made and waited for by one thread.

Idea. The thread stores the request word, for which the worker's stream waits, and looks at the *echo* until it is this
call's *ticket*. Both are in memory of the GPU, so that a look costs no way to the host and back. The ticket is one more
than that of the call before; whoever answers (`answer_kernel`) reads it and stores it to the echo, so that the echo of
an earlier call, however late, is none of this one's.

What ends the wait otherwise. Every 128 looks, some 80 us, the thread looks at the lane's words in the host's memory:

1. The end word is not 0: the lane is broken (`topkd._watchdog`), and nobody is waited for.
2. The slow word is not 0: the lane is not armed any more, nobody echoes. The call is made anew as memory operations
   make it: 0 to the done word, the request, and looks at the done word.
3. The request word is 0 at two such looks: the call was answered before the ticket could be seen, or an earlier
   call's answer has cleared the request too late. It is stored again; a plan that runs twice writes the same.

Threads. One does it all.

Memory. Tickets are stored here only, the echo by the answers of the worker only. The host gets the ticket, too: the
done word becomes one more than what was echoed, so that a caller on the host knows when the last answer has stored all.
What was before in the stream has been written when the kernel goes on, and whoever comes behind it in the stream begins
with an empty L1 cache: no fence.

Cost. One launch, from sm_90 on before what is before it has ended (programmatic dependent launch); while it waits it
holds a warp's place on one SM, so that the worker's kernels must be able to run beside it (MPS).

Limits. sm_80 and up. One call of a lane at a time.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import _cute_ops as ops

LOOKS = 128


class LaneCall:
    """The kernel, for devices that can start it before what is before it has ended, or not."""

    WIDE_ARGUMENTS = 8
    NARROW_ARGUMENTS = 0

    def __init__(self, recent: bool) -> None:
        self.recent = recent
        self.threads = 32
        self.shared_bytes = 0

    @cute.jit
    def __call__(self, *values):
        """Launches one warp; the arguments are the kernel's, then the stream."""
        *arguments, stream = values
        self.kernel(*arguments).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.recent)

    @cute.kernel
    def kernel(
        self,
        request: Int64,
        number: Int64,
        done: Int64,
        end: Int64,
        slow: Int64,
        told: Int64,
        ticket: Int64,
        echo: Int64,
    ):
        """Calls plan `number` and waits; the others are addresses of words of 64 bits, `told` where the ticket goes."""
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(self.recent):
            cute.arch.griddepcontrol_wait()
        if tid == Int32(0):
            ops.store_int64_now(request, number)
            mine = ops.load_int64_now(ticket) + 1
            ops.store_int64_now(ticket, mine)
            ops.store_int64_now(told, mine)
            waits = ops.load_int64_now(echo) != mine
            looks = Int32(0)
            cleared = Int32(0)
            operations = Int32(0)
            while waits:
                looks += 1
                if looks >= Int32(LOOKS):
                    looks = Int32(0)
                    pending = ops.load_int64_now(request) & Int64(0xFFFFFFFF)
                    over = ops.load_int64_now(end)
                    unarmed = ops.load_int64_now(slow)
                    settled = ops.load_int64_now(done)
                    if over != Int64(0):
                        waits = False
                    if unarmed != Int64(0):
                        if operations != Int32(0) and settled != Int64(0):
                            waits = False
                        if operations == Int32(0):
                            operations = Int32(1)
                            ops.store_int64_now(done, Int64(0))
                            ops.store_int64_last(request, number)
                    else:
                        cleared += 1
                        if pending != Int64(0):
                            cleared = Int32(0)
                        if cleared >= Int32(2):
                            cleared = Int32(0)
                            ops.store_int64_now(request, number)
                if waits:
                    waits = ops.load_int64_now(echo) != mine
