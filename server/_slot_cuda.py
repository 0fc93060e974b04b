"""Slots of the CUDA backend: a stream each, which waits for the ready word by itself.

A call in the stream: wait(ready word >= ready) -> latch -> kernels -> write(done word, done). What waits in a stream
cannot be taken back, so the kernels write to spare memory if the latch (`topkd.kernels.Latch`) finds the slot's gate
raised to the call's ticket, its done value. To give a call up: raise the gate, then store the ready word in the
client's place; the stream moves on and writes nothing of the client's.

Kernels that do more than enqueue (the `torch` family) cannot stand behind a wait: they are launched when their ready
word has come, and write in place.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from topkd import kernels
from topkd._words import LINE, MOST_LANES, MOST_SLOTS, Words

from ._execute import Batch, Call
from ._record import Recorder
from ._slots import OrderedCall
from .errors import KernelFailedError

__all__ = ["CudaSlot", "MappedWords", "enqueues", "spare_size", "telling_failure"]

_MOST_OPERATIONS = 512
"""Operations that may wait in one stream: the driver blocks whoever enqueues more than about 1,000 (one H200, 2026)."""
_PORTABLE_MAPPED = 3
_EXTERNAL = 1
"""CU_EVENT_RECORD_EXTERNAL: a node of the graph that a stream captures, not a mark in the capture."""


class MappedWords:
    """A session's words as the device sees them, and the gates of its slots, which the client does not see.

    Attributes:
        words: the words, for the host.
        address: of the words, for the device.
        gates: address of the gates, for the device; one a line.
    """

    def __init__(self, driver: Any, words: Words) -> None:
        self._driver = driver
        self.words = words
        self.call(driver.cuMemHostRegister(words.address, words.size, _PORTABLE_MAPPED))
        self.address = int(self.call(driver.cuMemHostGetDevicePointer(words.address, 0)))
        self._gates = torch.zeros((MOST_SLOTS + MOST_LANES) * LINE // 8, dtype=torch.int64, pin_memory=True)
        self.gates = self._gates.data_ptr()

    def call(self, result: tuple[Any, ...]) -> Any:
        """Returns what a call of the driver gave.

        Raises:
            KernelFailedError: it failed.
        """
        status, *values = result
        if int(status):
            raise KernelFailedError(f"the CUDA driver answers {getattr(status, 'name', status)}")
        return values[0] if values else None

    def wait_ready(self, stream: int, slot: int, value: int) -> None:
        """Makes a stream wait until a ready word is at least a value."""
        flags = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self.call(self._driver.cuStreamWaitValue64(stream, self.address + 2 * slot * LINE, value, flags))

    def write_done(self, stream: int, slot: int, value: int) -> None:
        """Makes a stream write a done word, after everything before it is visible."""
        self.call(self._driver.cuStreamWriteValue64(stream, self.address + (2 * slot + 1) * LINE, value, 0))

    def make_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Makes a stream that nobody else has; torch's own come from a pool, and come again."""
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = int(self.call(self._driver.cuStreamCreateWithPriority(flags, priority)))
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle)  # type: ignore[no-untyped-call]
        return stream

    def destroy_stream(self, stream: torch.cuda.Stream) -> None:
        """Lets go of a stream of `make_stream`."""
        self.call(self._driver.cuStreamDestroy(stream.cuda_stream))

    def make_event(self) -> Any:
        """Makes an event that graphs can record, each time that they run."""
        return self.call(self._driver.cuEventCreate(0))

    def destroy_event(self, event: Any) -> None:
        """Lets go of an event of `make_event`."""
        self.call(self._driver.cuEventDestroy(event))

    def record(self, stream: int, event: Any) -> None:
        """Captures that the graph records an event."""
        self.call(self._driver.cuEventRecordWithFlags(event, stream, _EXTERNAL))

    def nanoseconds(self, before: Any, after: Any) -> int:
        """Returns the time between two events that a graph has recorded."""
        return int(self.call(self._driver.cuEventElapsedTime(before, after)) * 1e6)

    def set_mark(self, stream: int, spare: int, mark: int) -> None:
        """Makes a stream store the mark of spare memory (`topkd.kernels.spare_bytes`)."""
        self.call(self._driver.cuStreamWriteValue64(stream, spare, mark, 0))

    def push(self, stream: int, slot: int) -> None:
        """Makes a stream store the upper half of a ready word, so that it is above every value that is waited for."""
        self.call(self._driver.cuStreamWriteValue32(stream, self.address + 2 * slot * LINE + 4, 1 << 30, 0))

    def raise_gate(self, slot: int, ticket: int) -> None:
        """Makes latches up to a ticket give up what is behind them; no call of CUDA, so that nothing can hold it up."""
        ctypes.c_int64.from_address(self.gates + slot * LINE).value = ticket


@dataclass(slots=True)
class _Pending:
    """A call in the stream: its operations, the events around each kernel call, and the one behind it all."""

    call: OrderedCall
    operations: int
    events: list[tuple[Any, Any]]
    last: Any


class CudaSlot:
    """One slot: a stream and what is in it."""

    rung = False

    def __init__(
        self, number: int, words: Words, mapped: MappedWords, latch: kernels.Latch | None, recorder: Recorder
    ) -> None:
        self._number = number
        self._words = words
        self._mapped = mapped
        self._latch = latch
        self._recorder = recorder
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._spare: torch.Tensor | None = None
        self._pending: deque[_Pending] = deque()
        self._idle_events: list[Any] = []
        self._reading = threading.Lock()

    def enqueue(self, call: OrderedCall) -> bool:
        """Puts a call behind its ready word, if all of it only enqueues."""
        batch, latch = call.batch, self._latch
        if batch is None or latch is None or not all(enqueues(one) for one in batch.calls):
            return False
        if sum(one.operations for one in list(self._pending)) + _operations(batch) > _MOST_OPERATIONS:
            return False
        spare = self._spare_for(batch)
        self._mapped.wait_ready(self._stream.cuda_stream, self._number, call.ready)
        with torch.cuda.stream(self._stream):
            latch(self._mapped.gates + self._number * LINE, call.done, spare.data_ptr(), spare.device)

        def run(one: Call) -> None:
            kernels.run_select_batch(one.selections, overlap_checked=True, spare=spare.data_ptr())

        self._put(call, batch, run)
        return True

    def _spare_for(self, batch: Batch) -> torch.Tensor:
        """Returns spare memory for a row of any of a batch's outputs."""
        size = spare_size(batch)
        if self._spare is None or len(self._spare) < size:
            with torch.cuda.stream(self._stream):  # what was there goes back in this stream's order
                self._spare = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self._spare

    def run(self, call: OrderedCall) -> None:
        """Puts a call whose ready word has come into the stream."""
        if call.batch is None:
            self.skip(call.done)
        else:
            self._put(call, call.batch, lambda one: kernels.run_select_batch(one.selections, overlap_checked=True))

    def _put(self, call: OrderedCall, batch: Batch, run: Callable[[Call], object]) -> None:
        """Enqueues kernels with events around them, and the done word; after a failure what was enqueued is known."""
        pending = _Pending(call, _operations(batch), [], self._event())
        try:
            with torch.cuda.stream(self._stream):
                for one in batch.calls:
                    before, after = self._event(), self._event()
                    before.record(self._stream)
                    run(one)
                    after.record(self._stream)
                    pending.events.append((before, after))
            self.skip(call.done)
        finally:
            pending.last.record(self._stream)
            self._pending.append(pending)

    def _event(self) -> Any:
        return self._idle_events.pop() if self._idle_events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def skip(self, done: int) -> None:
        """Writes a done word after everything in the stream."""
        self._mapped.write_done(self._stream.cuda_stream, self._number, done)

    def give_up(self, call: OrderedCall) -> None:
        """Raises the gate, then stores the ready word in the client's place. Calls nothing of CUDA.

        Should the client's stream store a higher value just now, this overwrites it, and the next call of the slot, if
        one is there, gets its time-out too: late, never wrong.
        """
        self._mapped.raise_gate(self._number, call.done)
        if self._words.ready(self._number) < call.ready:
            self._words.set_ready(self._number, call.ready)

    def unfinished(self) -> list[OrderedCall]:
        """Returns the calls whose end the device has not told yet; notes the figures of the others."""
        with telling_failure(), self._reading:
            while self._pending and self._pending[0].last.query():
                self._note(self._pending.popleft())
        return [pending.call for pending in list(self._pending)]

    def _note(self, pending: _Pending) -> None:
        call, events = pending.call, pending.events
        if call.batch is not None and not call.given_up and len(events) == len(call.batch.calls):
            times: Sequence[int] = [int(before.elapsed_time(after) * 1e6) for before, after in events]
            self._recorder.batch(call.waited, call.batch, times, None)
        self._idle_events += [pending.last, *(event for pair in events for event in pair)]


def enqueues(call: Call) -> bool:
    """Says whether a call of kernels does no more than enqueue, so that it can stand behind a wait."""
    return call.kernel != "merge" and all(kernels.only_enqueues(request) for request in call.selections)


def spare_size(batch: Batch) -> int:
    """Returns the bytes of spare memory for a row of any of a batch's outputs."""
    return kernels.spare_bytes(max(request.columns for call in batch.calls for request in call.selections))


@contextmanager
def telling_failure() -> Iterator[None]:
    """Raises KernelFailedError where torch raises because the device has failed."""
    try:
        yield
    except RuntimeError as error:
        raise KernelFailedError(f"the device has failed: {error}") from error


def _operations(batch: Batch) -> int:
    """Returns the operations of a batch in a stream: its kernels, tables, events, wait, latch and done word."""
    return sum(2 + 2 * len(call.requests) for call in batch.calls) + 4
