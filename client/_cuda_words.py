"""A session's words as CUDA streams of this process use them. Imports `cuda.bindings` when the first are mapped."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from topkd._cuda import checked, on_device
from topkd._cuda_call import CallKernel, Signals
from topkd._lane_book import come, marks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from topkd._guard import Guard
    from topkd._lane_book import LaneBook
    from topkd._words import Words

__all__ = ["DeviceWords"]

_PORTABLE_MAPPED: Final = 3
_LOOK_S: Final = 0.05
_HELD_S: Final = 0.5
_LONGEST_S: Final = 600.0
_kept: list[DeviceWords] = []
"""Words that a stream may still wait for: never let go."""


class DeviceWords:
    """The page, registered with the driver. Every call but `retire` returns at once."""

    def __init__(self, words: Words, guard: Guard, ordinal: int) -> None:
        """Registers the page, and has the watchdog watch it: before a stream can wait.

        Raises:
            RegionError: The driver refuses it, or the watchdog cannot be started.
        """
        from cuda.bindings import driver

        guard.start()
        self._guard = guard  # held as long as streams may wait
        self._driver = driver
        self._words = words  # keeps the mapping
        self._ordinal = ordinal
        self._signals: Signals | None = None
        self._greater = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        with on_device(ordinal) as runtime:
            runtime.cudaFree(0)  # makes the context
            checked("cuMemHostRegister", driver.cuMemHostRegister(words.address, words.size, _PORTABLE_MAPPED))
            self._base = int(checked("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(words.address, 0)))

    def identity(self, stream: int) -> int:
        """Returns a stream's number, which no other stream of the process ever has; its handle may come again."""
        return int(checked("cuStreamGetId", self._driver.cuStreamGetId(stream)))

    def write_ready(self, stream: int, slot: int, value: int) -> None:
        """Makes a stream store a ready word, after everything before it in the stream."""
        address = self._base + self._words.offset_of_ready(slot)
        checked("cuStreamWriteValue64", self._driver.cuStreamWriteValue64(stream, address, value, 0))

    def wait_done(self, stream: int, slot: int, value: int) -> None:
        """Makes a stream wait until a done word is at least a value."""
        address = self._base + self._words.offset_of_done(slot)
        checked("cuStreamWaitValue64", self._driver.cuStreamWaitValue64(stream, address, value, self._greater))

    def batch(self, slot: int, number: int) -> Callable[[int], None]:
        """Returns what enqueues a lane's call on a stream: done word to 0, request word, wait for the done word.

        One batch of memory operations, made once. A CUDA graph that captures it holds it as one node.
        """
        driver, kinds = self._driver, self._driver.CUstreamBatchMemOpType
        operations = [driver.CUstreamBatchMemOpParams() for _ in range(3)]
        places = (self._words.offset_of_done(slot), self._words.offset_of_ready(slot), self._words.offset_of_done(slot))
        for place, value, operation in zip(places, (0, number, 1), operations, strict=True):
            waits = operation is operations[2]
            operation.operation = (
                kinds.CU_STREAM_MEM_OP_WAIT_VALUE_64 if waits else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64
            )
            parameters = operation.waitValue if waits else operation.writeValue
            parameters.address = self._base + place
            parameters.value64 = value
            parameters.flags = int(self._greater) if waits else 0

        def enqueue(stream: int) -> None:
            checked("cuStreamBatchMemOp", driver.cuStreamBatchMemOp(stream, len(operations), operations, 0))

        return enqueue

    def signals(self) -> Signals:
        """Returns the session's device memory for tickets and echoes; raises RegionError if the driver refuses it."""
        if self._signals is None:
            self._signals = Signals(self._ordinal)
        return self._signals

    def launch(self, kernel: CallKernel, slot: int, number: int) -> Callable[[int], None]:
        """Returns what enqueues a lane's call on a stream as a kernel that makes it and waits for it."""
        return kernel.prepare(self._words, self._base, self.signals(), slot, number)

    def retire(self, streams: Sequence[Any], lanes: LaneBook | None) -> None:
        """Takes the page out of the driver in the background, once nothing uses it any more.

        That is when no lane can be called any more, not even by a graph, and what is then in their torch streams and in
        `streams` is over.
        """
        _kept.append(self)
        threading.Thread(target=self._retire, args=(streams, lanes), name="topkd-words", daemon=True).start()

    def _retire(self, streams: Sequence[Any], lanes: LaneBook | None) -> None:
        import torch

        while lanes is not None and lanes.held():
            time.sleep(_HELD_S)
        try:
            with torch.cuda.device(self._ordinal):
                events = marks([*streams, *(lanes.streams if lanes is not None else [])])
                deadline = time.monotonic() + _LONGEST_S
                while not come(events):
                    if time.monotonic() > deadline:
                        return
                    time.sleep(_LOOK_S)
        except RuntimeError:  # a stream that is being captured, or is gone: the page stays as it is
            return
        with on_device(self._ordinal):
            self._driver.cuMemHostUnregister(self._words.address)
        self._signals = None
        _kept.remove(self)
