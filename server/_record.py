"""Figures of the hot path: noted in a queue, put into the metrics a few times a second.

A histogram's `observe` costs 2 to 3 us and a call needs six of them; a note costs 0.1 us.
"""

import threading
from collections import deque
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from topkd import kernels

from ._execute import Batch
from .metrics import ServerMetrics

__all__ = ["Recorder"]

_MOST_NOTES = 8192
_NS = 1e-9


class Recorder:
    """Takes notes from handlers; `flush` puts them into the metrics. Thread-safe."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._requests: deque[tuple[Histogram, Counter, int]] = deque()
        self._batches: deque[tuple[int, Batch, Sequence[int]]] = deque()
        self._lock = threading.Lock()
        self._compiled: int | None = None

    def start(self) -> None:
        """Counts compiles from now on."""
        self._compiled = _compiled()

    def request(self, seconds: Histogram, count: Counter, nanoseconds: int) -> None:
        """Notes an answered request."""
        self._requests.append((seconds, count, nanoseconds))
        if len(self._requests) > _MOST_NOTES:
            self.flush()

    def batch(self, waited: int, batch: Batch, times: Sequence[int]) -> None:
        """Notes a batch that ran: nanoseconds that it waited, and of each of its calls."""
        self._batches.append((waited, batch, times))

    def flush(self) -> None:
        """Puts everything noted into the metrics."""
        metrics = self._metrics
        with self._lock:
            if self._compiled is not None and (compiled := _compiled()) != self._compiled:
                metrics.compiles.inc(compiled - self._compiled)
                self._compiled = compiled
            for _ in range(len(self._requests)):
                seconds, count, nanoseconds = self._requests.popleft()
                seconds.observe(nanoseconds * _NS)
                count.inc()
            for _ in range(len(self._batches)):
                waited, batch, times = self._batches.popleft()
                metrics.queue_seconds.observe(waited * _NS)
                metrics.batch_items.observe(len(batch.paths))
                metrics.rows.inc(batch.rows)
                metrics.input_bytes.inc(batch.input_bytes)
                metrics.output_bytes.inc(batch.output_bytes)
                for call, nanoseconds in zip(batch.calls, times, strict=True):
                    call.histogram.observe(nanoseconds * _NS)


def _compiled() -> int:
    """Returns how many kernels this process compiled; those loaded from the cache are not among them."""
    return sum(count for (_, source), count in kernels.compiles().items() if source == "compiled")
