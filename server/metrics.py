"""The server's metrics, and how the workers' figures become the server's.

Every process keeps its figures in a registry of its own, made by `ServerMetrics`. A worker sends what changed in it
over the control socket (`Snapshot.changes`); the front's `MergedCollector` adds the live workers', the ended workers'
and the front's own. Counters and histograms never go down; gauges of ended workers vanish.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

__all__ = ["K_CLASSES", "LATENCY_BUCKETS", "MergedCollector", "Sample", "ServerMetrics", "Snapshot", "k_class"]

LATENCY_BUCKETS = (*(round(base * 10.0**power, 9) for power in range(-6, 0) for base in (1, 1.8, 3.2, 5.6)), 1.0)
"""1 us to 1 s, four to a decade."""
_COUNT_BUCKETS = tuple(float(1 << power) for power in range(11))
K_CLASSES = ((64, "<=64"), (512, "<=512"), (2048, "<=2048"), (4096, "<=4096"))

Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Family, sample name, labels."""

Sample = list[Any]
"""[family, sample name, {label: value}, value]: a sample as it travels."""


def k_class(k: int) -> str:
    """Returns the label of a k: one of five."""
    return next((label for bound, label in K_CLASSES if k <= bound), ">4096")


class ServerMetrics:
    """Every metric of the server, in one registry.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(
            name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
        ) -> Histogram:
            return Histogram(f"topkd_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"topkd_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"topkd_{name}", text, labels, registry=registry)

        self.registry = registry
        self.kernel_seconds = histogram(
            "kernel_seconds", "Time of one kernel call, measured on the device.", ("kernel", "dtype", "k")
        )
        self.queue_seconds = histogram("queue_seconds", "Time from a request's arrival to its turn.")
        self.request_seconds = histogram("request_seconds", "Time in the handler.", ("method",))
        self.requests = counter("requests", "Requests answered.", ("method", "code"))
        self.batch_items = histogram("batch_items", "Entries of a batch.", (), _COUNT_BUCKETS)
        self.rows = counter("rows", "Rows selected from.")
        self.input_bytes = counter("input_bytes", "Bytes of scores that selections named.")
        self.output_bytes = counter("output_bytes", "Bytes of results written.")
        self.compiles = counter("compiles", "Kernels compiled after the server was ready; should stay 0.")
        self.regions = gauge("regions", "Regions registered.", ("memory",))
        self.region_bytes = gauge("region_bytes", "Bytes of the regions registered.", ("memory",))
        self.plans = gauge("plans", "Plans held.")
        self.queued = gauge("queued_requests", "Requests that wait or run.")
        self.sessions = gauge("sessions", "Sessions open.", ("transport",))
        self.attaches = counter("attaches", "Attach requests by outcome.", ("transport", "outcome"))
        self.sessions_ended = counter("sessions_ended", "Sessions ended, by cause.", ("cause",))
        self.workers = gauge("workers", "Worker processes, by state.", ("state",))
        self.worker_starts = counter("worker_starts", "Worker processes started.")
        self.worker_kills = counter("worker_kills", "Worker processes that had to be killed.")


def _read(registry: CollectorRegistry) -> Iterator[tuple[Key, float]]:
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield (family.name, sample.name, tuple(sorted(sample.labels.items()))), sample.value


class Snapshot:
    """What a registry held when it was last read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._last: dict[Key, float] = {}

    def changes(self) -> list[Sample]:
        """Returns the samples that changed since the last call, with their cumulative values."""
        changed: list[Sample] = []
        for key, value in _read(self._registry):
            if self._last.get(key) != value:
                self._last[key] = value
                changed.append([key[0], key[1], dict(key[2]), value])
        return changed


class MergedCollector(Collector):
    """The sum of the front's own registry, the live workers and those that ended.

    Thread-safe: the metrics server reads it from threads of its own.
    """

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._live: dict[object, dict[Key, float]] = {}
        self._retired: dict[Key, float] = {}
        self._gauges = {family.name for family in own.collect() if family.type == "gauge"}
        self._known = {family.name for family in own.collect()}

    def update(self, source: object, samples: Iterable[Sample]) -> None:
        """Takes cumulative samples of one worker; families that are not the server's are ignored."""
        with self._lock:
            held = self._live.setdefault(source, {})
            for family, name, labels, value in samples:
                if family in self._known:
                    held[family, name, tuple(sorted(labels.items()))] = float(value)

    def retire(self, source: object) -> None:
        """Ends a source: what counts stays, gauges vanish."""
        with self._lock:
            for key, value in self._live.pop(source, {}).items():
                if key[0] not in self._gauges:
                    self._retired[key] = self._retired.get(key, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        """Yields every family with its sums."""
        totals: dict[Key, float] = {}
        with self._lock:
            for source in (self._retired, *self._live.values()):
                for key, value in source.items():
                    totals[key] = totals.get(key, 0.0) + value
        for family in self._own.collect():
            merged = Metric(family.name, family.documentation, family.type)
            sums: dict[Key, float] = {}
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    sums[family.name, sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            for key, value in totals.items():
                if key[0] == family.name:
                    sums[key] = sums.get(key, 0.0) + value
            for (_, name, labels), value in sorted(sums.items(), key=_order):
                merged.add_sample(name, dict(labels), value)
            yield merged


def _order(item: tuple[Key, float]) -> tuple[Any, ...]:
    """Sorts samples: children together, a histogram's buckets by their bound, then its count and sum."""
    (_, name, labels), _ = item
    bound = math.inf
    for label, value in labels:
        if label == "le":
            bound = float(value)
    rest = tuple(pair for pair in labels if pair[0] != "le")
    return rest, not name.endswith("_bucket"), bound, name
