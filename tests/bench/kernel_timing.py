"""How long calls take on the device: medians of CUDA-graph replays, with a cold and with a warm L2 cache.

Cold: each call of a graph reads other memory, until more than `COLD_BYTES` lie between two uses of the same; where the
calls together touch less, a read of `COLD_BYTES` elsewhere precedes each replay, outside of what is timed. Warm: all
calls read the same memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

COLD_BYTES = 128 << 20
"""More than twice the L2 cache of any device so far."""

CALLS = 64
"""Most calls of one graph."""

GRAPH_US = 400.0
"""A graph that is shorter than this holds more than one call of each input: its own launch must not count."""

REPLAYS = (5, 41)
"""Fewest and most replays that a median is taken of."""

Call = Callable[[], object]


class Timer(Protocol):
    """What measures calls; the tests have one of their own."""

    def cold(self, calls: Sequence[Call], touched: int, seconds: float) -> float:
        """Return us a call where the calls touch `touched` bytes together; takes about `seconds`."""

    def warm(self, call: Call, seconds: float, expected: float) -> float:
        """Return us of a call that is made again and again; `expected` is about what it takes."""


def copies(input_bytes: int) -> int:
    """Return how many inputs a cold measurement takes turns with."""
    return max(1, min(CALLS, -(-COLD_BYTES // max(1, input_bytes))))


class GraphTimer:
    """Times calls that can be captured in a CUDA graph."""

    def __init__(self) -> None:
        self._elsewhere = torch.ones(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sum = torch.empty((), dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream()

    def cold(self, calls: Sequence[Call], touched: int, seconds: float) -> float:
        """Return us a call; see `Timer`."""
        return self._time(calls, touched < COLD_BYTES, seconds)

    def warm(self, call: Call, seconds: float, expected: float) -> float:
        """Return us of a call; see `Timer`."""
        return self._time([call] * max(1, min(CALLS, round(GRAPH_US / expected))), False, seconds)

    def _time(self, calls: Sequence[Call], flush: bool, seconds: float) -> float:
        graph = self._capture(calls)
        with torch.cuda.stream(self._stream):
            first = self._replay(graph, 2, flush)[1]  # the first uploads the graph
            most = seconds * 1e6 / (first + (80.0 if flush else 5.0))
            taken = self._replay(graph, max(REPLAYS[0], min(REPLAYS[1], int(most))), flush)
        graph.reset()
        return statistics.median(taken) / len(calls)

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would collect garbage each time
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int, flush: bool) -> list[float]:
        """Return us of each of `count` replays; the host is ahead of the device all the while."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            if flush:
                torch.sum(self._elsewhere, dim=0, dtype=torch.int32, out=self._sum)
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]


class EagerTimer(GraphTimer):
    """Times calls that cannot be captured, as they are made: the host's time counts where the device waits for it."""

    def _time(self, calls: Sequence[Call], flush: bool, seconds: float) -> float:
        taken: list[float] = []
        ends = time.monotonic() + seconds
        while len(taken) < REPLAYS[0] or (len(taken) < REPLAYS[1] and time.monotonic() < ends):
            for call in calls[:CALLS]:
                if flush:
                    torch.sum(self._elsewhere, dim=0, dtype=torch.int32, out=self._sum)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) * 1e3)
        return statistics.median(taken)
