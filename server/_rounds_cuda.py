"""Rounds of an armed lane on a GPU: executable graphs on a stream of the lane's own.

A round: wait(request word >= 1) -> the plan's kernels -> answer. `topkd.kernels.Answer` stores 0 to the request word
and 1 or more to the done word, unless the lane's spare memory is marked, which sends the kernels there: then the
request stays, and the next round finds it. It echoes the ticket of a client's kernel, too. A few executable graphs of
some rounds each are launched one behind the other; one that is over is launched again behind the others. Launches of
one executable graph run one after another whatever their streams, so that no two lanes share one.

To give rounds up, a stream of its own, which nothing ever waits in, sets the mark and then the request word's upper
half, which satisfies the wait and leaves a request that is there, or comes, in the lower half. An answer that is under
way still clears the word, so this is done again until the stream is empty. The mark is cleared in the same stream, and
the upper half after it: rounds that go on without a request are always marked.
"""

import ctypes
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import torch

from topkd import kernels
from topkd._words import CALLS, LINE, offset_of_echo, offset_of_ticket

from ._execute import Batch, Call
from ._lanes_armed import CannotArmError
from ._slot_cuda import MappedWords, enqueues, spare_size, telling_failure
from .errors import KernelFailedError

__all__ = ["CudaRounds"]

GRAPHS = 6
MOST_ROUNDS = 20
"""Rounds of a graph. All together last 6 ms at 20,000 calls a second."""
MOST_OPERATIONS = 480
"""In the stream: the driver blocks whoever enqueues more than about 1,000 (one H200, 2026)."""


class CudaRounds:
    """The rounds of one lane; see `topkd.server._lanes_armed.Rounds`."""

    def __init__(
        self, mapped: MappedWords, line: int, batch: Batch, answer: kernels.Answer, *, signals: int = 0
    ) -> None:
        """Captures the graphs; no stream of the process may be blocked.

        Args:
            mapped: the session's words.
            line: the slot whose lines are the lane's words.
            batch: what a round runs.
            answer: warm.
            signals: the client's device memory for tickets and echoes; 0: it has none, and the ticket is always 0.

        Raises:
            CannotArmError: the batch's kernels do more than enqueue, or the driver refuses.
        """
        other = next((call.kernel for call in batch.calls if not enqueues(call)), None)
        if other is not None:
            raise CannotArmError(f"the kernel {other!r} does more than enqueue")
        self._mapped = mapped
        self._line = line
        self.batch = batch
        self._answer = answer
        self._signals = signals
        self._timing = [(mapped.make_event(), mapped.make_event()) for _ in batch.calls]
        self._is_timed = False
        self._times: list[int] = []
        self._stream: Any = mapped.make_stream()
        self._control: Any = mapped.make_stream(-1)
        self._giving_up = threading.Lock()
        self._over = False
        self._told = mapped.gates + line * LINE + 8
        ctypes.c_int64.from_address(self._told).value = 0
        try:
            self._prepare()
        except BaseException:
            with suppress(KernelFailedError):
                self._destroy_streams()
            raise
        self._ends: deque[tuple[Any, Any]] = deque()  # graphs in the stream, and an event behind each
        self._idle_events = [torch.cuda.Event() for _ in self._graphs]  # type: ignore[no-untyped-call]

    def _prepare(self) -> None:
        """Captures the graphs, and runs them once without effect."""
        with torch.cuda.stream(self._stream):
            self._spare = torch.zeros(spare_size(self.batch), dtype=torch.uint8, device="cuda")
            self._stream.synchronize()  # the mark is another stream's
            for call in self.batch.calls:
                for request in call.selections:
                    kernels.warm_select(request)
            try:
                self._graphs = self._capture()
                self._run_empty()
            except (RuntimeError, KernelFailedError) as error:
                raise CannotArmError(f"the rounds cannot be captured: {error}") from error

    def _run_empty(self) -> None:
        """Runs every graph once, given up, so that nothing is left that a first launch does."""
        self.give_up()
        for graph in self._graphs:
            graph.replay()
        self._stream.synchronize()

    def _capture(self) -> list[Any]:
        spare = self._spare.data_ptr()
        operations = 2 + 2 * sum(len(call.requests) for call in self.batch.calls)
        rounds = max(1, min(MOST_ROUNDS, MOST_OPERATIONS // (GRAPHS * operations)))
        self.most = GRAPHS * rounds
        request = self._mapped.address + 2 * self._line * LINE
        counts = (request + LINE + 8 * CALLS, self._told)
        words = (request, request + LINE, *counts, *self._signals_of_line())
        graphs: list[Any] = []
        for _ in range(GRAPHS):
            graph = torch.cuda.CUDAGraph()
            pool = graphs[0].pool() if graphs else None
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                for place in range(rounds):
                    self._mapped.wait_ready(self._stream.cuda_stream, self._line, 1)
                    timing = self._timing if not graphs and not place else [None] * len(self._timing)
                    for call, events in zip(self.batch.calls, timing, strict=True):
                        self._run(call, events)
                    self._answer(spare, words, self._spare.device)
            finally:
                graph.capture_end()
            graphs.append(graph)
        return graphs

    def _signals_of_line(self) -> tuple[int, int]:
        """Returns addresses of the ticket and the echo."""
        if self._signals:
            return self._signals + offset_of_ticket(self._line), self._signals + offset_of_echo(self._line)
        self._none = torch.zeros(2, dtype=torch.int64, device="cuda")
        return self._none.data_ptr(), self._none.data_ptr() + 8

    def _run(self, call: Call, events: tuple[Any, Any] | None) -> None:
        """Captures a kernel call, between events if it is to be timed."""
        stream = self._stream.cuda_stream
        if events is not None:
            self._mapped.record(stream, events[0])
        kernels.run_select_batch(call.selections, overlap_checked=True, spare=self._spare.data_ptr())
        if events is not None:
            self._mapped.record(stream, events[1])

    def arm(self) -> int:
        """Puts all graphs into the stream."""
        self._reap()
        with self._giving_up:
            self._mapped.set_mark(self._control.cuda_stream, self._spare.data_ptr(), 0)
            self._control.synchronize()
            self._mapped.words.clear_upper(self._line)
        for graph in self._graphs:
            self._launch(graph)
        return self.most

    def _launch(self, graph: Any) -> None:
        if graph is self._graphs[0]:
            self._is_timed = True
        event = self._idle_events.pop()
        with telling_failure(), torch.cuda.stream(self._stream):
            graph.replay()
            event.record(self._stream)
        self._ends.append((graph, event))

    def _reap(self) -> list[Any]:
        """Takes out the graphs that are over, in order."""
        over: list[Any] = []
        with telling_failure():
            while self._ends and self._ends[0][1].query():
                graph, event = self._ends.popleft()
                self._idle_events.append(event)
                over.append(graph)
                if graph is self._graphs[0] and self._is_timed:
                    with suppress(KernelFailedError):  # a figure is not worth a lane
                        self._times = [self._mapped.nanoseconds(*events) for events in self._timing]
        return over

    def refill(self) -> int:
        """Launches again what is over."""
        over = self._reap()
        for graph in over:
            self._launch(graph)
        return len(over) * self.most // len(self._graphs)

    def times(self) -> list[int]:
        """Returns what the timed round took, if it is over and was not given up since the last call."""
        times, self._times = self._times, []
        return times

    def answered(self) -> int:
        """Returns how many calls were answered; a kernel counts them."""
        return int(ctypes.c_int64.from_address(self._told).value)

    def give_up(self) -> None:
        """Sets the mark, then satisfies the wait. Does not wait for the device; nothing happens once it is closed."""
        with self._giving_up:
            with telling_failure():
                if self._over or not self._control.query():
                    return
            self._is_timed = False
            self._mapped.set_mark(self._control.cuda_stream, self._spare.data_ptr(), 1)
            self._mapped.push(self._control.cuda_stream, self._line)

    def idle(self) -> bool:
        """Says whether the stream is empty."""
        self._reap()
        return not self._ends

    def close(self) -> None:
        """Frees the graphs."""
        with self._giving_up:  # another thread may be giving up just now
            self._over = True
            self._control.synchronize()
            self._graphs.clear()
            self._mapped.words.clear_upper(self._line)
            self._destroy_streams()

    def _destroy_streams(self) -> None:
        for stream in (self._stream, self._control):
            self._mapped.destroy_stream(stream)
        for events in self._timing:
            for event in events:
                self._mapped.destroy_event(event)
