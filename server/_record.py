"""Figures of the hot path: noted in a queue, put into the metrics a few times a second.

A histogram's `observe` costs 2 to 3 us and a call needs six of them; a note costs 0.1 us.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from topkd import kernels

from ._execute import FALLBACK_REASONS, Batch
from .metrics import LANE_OUTCOMES, ORDERED_OUTCOMES, RELEASE_CAUSES, ServerMetrics

__all__ = ["Recorder"]

_MOST_NOTES = 8192
_NS = 1e-9
_NOTES_IN_A_ROW = 16
"""Notes of a flush after which others get the interpreter, 0.2 ms; a call would wait 5 ms for it else."""


class Recorder:
    """Takes notes from handlers; `flush` puts them into the metrics. Thread-safe."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._requests: deque[tuple[Histogram, Counter, int]] = deque()
        self._batches: deque[tuple[int, Batch, Sequence[int], int | None]] = deque()
        self._lock = threading.Lock()
        self._compiled: dict[str, int] = {}
        self._phase = "start"
        for outcome in ORDERED_OUTCOMES:
            metrics.ordered.labels(outcome)
        metrics.lanes.labels("polled")
        for outcome in LANE_OUTCOMES:
            metrics.lane_calls.labels("polled", outcome)
        for cause in RELEASE_CAUSES:
            metrics.lane_released.labels(cause)
        for family in kernels.kernels():  # a series that is there from the start shows its first increase
            for phase in ("start", "ready"):
                metrics.compiles.labels(family, phase)
            for reason in FALLBACK_REASONS:
                metrics.fallbacks.labels(family, reason)

    def start(self) -> None:
        """Says that the worker is ready: what is compiled from now on came too late."""
        with self._lock:
            self._count_compiles()
            self._phase = "ready"

    def request(self, seconds: Histogram, count: Counter, nanoseconds: int) -> None:
        """Notes an answered request."""
        self._requests.append((seconds, count, nanoseconds))
        if len(self._requests) > _MOST_NOTES:
            self.flush()

    def batch(self, queued: int, batch: Batch, times: Sequence[int], waited: int | None) -> None:
        """Notes a batch that ran: nanoseconds that it queued, of each of its calls, and of its turn beyond them.

        `waited` is None of a batch that nobody waited for.
        """
        self._batches.append((queued, batch, times, waited))

    def flush(self) -> None:
        """Puts everything noted into the metrics."""
        with self._lock:
            self._count_compiles()
            for place in range(len(self._requests)):
                seconds, count, nanoseconds = self._requests.popleft()
                seconds.observe(nanoseconds * _NS)
                count.inc()
                _give_way(place)
            for place in range(len(self._batches)):
                self._count_batch(*self._batches.popleft())
                _give_way(place)

    def _count_batch(self, queued: int, batch: Batch, times: Sequence[int], waited: int | None) -> None:
        metrics = self._metrics
        metrics.queue_seconds.observe(queued * _NS)
        if waited is not None:
            metrics.device_wait_seconds.observe(waited * _NS)
        metrics.batch_items.observe(len(batch.paths))
        metrics.rows.inc(batch.rows)
        metrics.input_bytes.inc(batch.input_bytes)
        metrics.output_bytes.inc(batch.output_bytes)
        for call, nanoseconds in zip(batch.calls, times, strict=True):
            call.histogram.observe(nanoseconds * _NS)
            if call.fallback is not None:
                call.fallback.inc()

    def _count_compiles(self) -> None:
        """Counts what this process compiled since the last time; what came from the cache is not among it."""
        for (family, source), count in kernels.compiles().items():
            new = count - self._compiled.get(family, 0)
            if source == "compiled" and new:
                self._metrics.compiles.labels(family, self._phase).inc(new)
                self._compiled[family] = count


def _give_way(place: int) -> None:
    if place % _NOTES_IN_A_ROW == 0:
        time.sleep(0)
