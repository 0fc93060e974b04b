"""What the status page shows, read from the metrics: each device's newest figures, and the last minutes of some."""

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

__all__ = ["EVERY_S", "Figures", "History", "KernelKey", "Point", "quantile"]

EVERY_S = 2.0
_KEPT = 150
"""Points kept: five minutes."""

Labels = frozenset[tuple[str, str]]
KernelKey = tuple[str, str, str]
"""Kernel, dtype, class of k."""


class Figures:
    """The samples of one device at one time."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Takes a sample."""
        self._values.setdefault(name, {})[frozenset(labels.items())] = value

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that have these labels; 0 where there is none."""
        wanted = frozenset(labels.items())
        return sum(value for found, value in self._values.get(name, {}).items() if wanted <= found)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Returns a metric's sums by the values of one label, in alphabetical order."""
        sums: dict[str, float] = {}
        for found, value in self.samples(name):
            if labels.items() <= found.items():
                sums[found.get(label, "")] = sums.get(found.get(label, ""), 0.0) + value
        return dict(sorted(sums.items()))

    def samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yields a metric's samples: labels and value."""
        for labels, value in self._values.get(name, {}).items():
            yield dict(labels), value


@dataclass(frozen=True, slots=True)
class Point:
    """Counters at one time; all cumulative.

    Attributes:
        time: seconds of a monotonic clock.
        kernels: counts in the buckets of each kernel's histogram of device time.
        requests: requests answered.
        rows: rows selected from.
        bytes: bytes of scores that selections named.
        handler: counts in the buckets of the time of SelectTopK in the handler.
    """

    time: float
    kernels: Mapping[KernelKey, Sequence[float]] = field(default_factory=dict)
    requests: float = 0.0
    rows: float = 0.0
    bytes: float = 0.0
    handler: Sequence[float] = field(default_factory=lambda: array("d"))


class History:
    """Reads a registry every `EVERY_S` seconds in a thread of its own.

    Attributes:
        bounds: upper bounds of the histograms' buckets in seconds, ascending, the last infinite.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._newest: dict[str, Figures] = {}
        self._points: dict[str, deque[Point]] = {}
        self._read_at = -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="topkd-status", daemon=True)
        self.bounds: tuple[float, ...] = (math.inf,)

    def start(self) -> None:
        """Starts reading."""
        self._thread.start()

    def close(self) -> None:
        """Stops reading."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with suppress(Exception):  # whatever a collector raises, the page says that its figures are old
                self.read()
            if self._stop.wait(EVERY_S):
                return

    def read(self) -> None:
        """Reads the registry now."""
        now = time.monotonic()
        devices: dict[str, Figures] = {}
        for name, labels, value in _samples(self._registry.collect()):
            devices.setdefault(labels.pop("device", ""), Figures()).add(name, labels, value)
        points = {name: self._point(figures, now) for name, figures in devices.items()}
        with self._lock:
            self._newest, self._read_at = devices, now
            for name in self._points.keys() - devices.keys():
                del self._points[name]
            for name, point in points.items():
                self._points.setdefault(name, deque(maxlen=_KEPT)).append(point)

    def newest(self) -> dict[str, tuple[Figures, Sequence[Point]]]:
        """Returns each device's figures and its points, oldest first; "" is the device of a server of one."""
        with self._lock:
            return {name: (self._newest[name], list(self._points[name])) for name in sorted(self._newest)}

    def age(self) -> float:
        """Returns the seconds since the last reading."""
        with self._lock:
            return time.monotonic() - self._read_at

    def _point(self, figures: Figures, now: float) -> Point:
        kernels: dict[KernelKey, list[tuple[float, float]]] = {}
        for labels, value in figures.samples("topkd_kernel_seconds_bucket"):
            key = labels.get("kernel", ""), labels.get("dtype", ""), labels.get("k", "")
            kernels.setdefault(key, []).append((float(labels["le"]), value))
        handler = [
            (float(labels["le"]), value)
            for labels, value in figures.samples("topkd_request_seconds_bucket")
            if labels.get("method") == "SelectTopK"
        ]
        if handler:
            self.bounds = tuple(sorted(bound for bound, _ in handler))
        return Point(
            now,
            {key: _counts(buckets) for key, buckets in kernels.items()},
            figures.total("topkd_requests_total"),
            figures.total("topkd_rows_total"),
            figures.total("topkd_input_bytes_total"),
            _counts(handler),
        )


def _samples(families: Iterable[Metric]) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in families:
        if family.name.startswith("topkd_"):
            for sample in family.samples:
                yield sample.name, dict(sample.labels), sample.value


def _counts(buckets: Iterable[tuple[float, float]]) -> Sequence[float]:
    return array("d", (count for _, count in sorted(buckets)))


def quantile(bounds: Sequence[float], earlier: Sequence[float], later: Sequence[float], part: float) -> float | None:
    """Estimates a quantile of what a histogram took between two times, as Prometheus does.

    Args:
        bounds: upper bounds of the buckets, the last infinite.
        earlier: cumulative counts in them at the first time; nothing: all 0.
        later: the same at the second time.
        part: 0.5 for the median.

    Returns:
        Seconds; infinity where it is beyond the last finite bound; None where nothing was taken.
    """
    before = earlier if len(earlier) == len(later) else [0.0] * len(later)
    counts = [after - at_first for after, at_first in zip(later, before, strict=True)]
    if not counts or counts[-1] <= 0 or len(counts) != len(bounds):
        return None
    rank = part * counts[-1]
    place = next(place for place, count in enumerate(counts) if count >= rank)
    if math.isinf(bounds[place]):
        return math.inf
    low, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    return low + (bounds[place] - low) * (rank - below) / max(counts[place] - below, 1e-300)
