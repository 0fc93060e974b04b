"""The server's metrics, and how the workers' figures become the server's.

Every process keeps its figures in a registry of its own, made by `ServerMetrics`. A worker sends what changed in it
over the control socket (`Snapshot.changes`); the front's `MergedCollector` adds the live workers', the ended workers'
and the front's own. Counters and histograms never go down; gauges of ended workers vanish. A gauge that is a ratio is
the highest of all, not their sum.

No label's value comes from a client: the number of series is bounded by the code, whatever clients send.
"""

import math
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from topkd.v1 import control_pb2

__all__ = ["K_CLASSES", "LATENCY_BUCKETS", "MergedCollector", "Sample", "ServerMetrics", "Snapshot", "k_class"]

LATENCY_BUCKETS = (*(round(base * 10.0**power, 9) for power in range(-6, 0) for base in (1, 1.8, 3.2, 5.6)), 1.0)
"""1 us to 1 s, four to a decade."""
_COUNT_BUCKETS = tuple(float(1 << power) for power in range(11))
END_CAUSES = ("detached", "client_gone", "worker_lost", "drained")
"""Of a session: its client said so; its client went without a word; its worker ended; the server ended."""
ORDERED_OUTCOMES = ("finished", "ready_timeout", "kernel_failed")
LANE_OUTCOMES = ("finished", "failed")
RELEASE_CAUSES = ("closed", "late", "session_ended")
"""Of a wait for a lane: the lane was closed; its client gave it up; its session ended in order."""
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
        # Latency. The labels' values are few by construction: families, dtypes and five classes of k.
        self.kernel_seconds = histogram(
            "kernel_seconds", "Time of one kernel call, measured on the device.", ("kernel", "dtype", "k")
        )
        self.queue_seconds = histogram("queue_seconds", "Time from a request's arrival to its turn.")
        self.device_wait_seconds = histogram(
            "device_wait_seconds", "Time of a batch's turn on the device beyond its kernels: launches, others' work."
        )
        self.attach_seconds = histogram("attach_seconds", "Time from an attach request to its answer.", ("transport",))
        # Requests: rate, errors, duration.
        self.request_seconds = histogram("request_seconds", "Time in the handler, the queue included.", ("method",))
        self.requests = counter("requests", "Requests answered.", ("method", "code"))
        self.batch_items = histogram("batch_items", "Entries of a batch.", (), _COUNT_BUCKETS)
        self.rows = counter("rows", "Rows selected from.")
        self.input_bytes = counter("input_bytes", "Bytes of scores that selections named.")
        self.output_bytes = counter("output_bytes", "Bytes of results written.")
        self.lane_calls = counter("lane_calls", "Calls of lanes that ran or failed.", ("mode", "outcome"))
        self.ordered = counter("ordered_calls", "Ordered calls that ended, by outcome.", ("outcome",))
        # Saturation.
        self.queued = gauge("queued_requests", "Requests that wait or run.")
        self.lane_released = counter(
            "lane_released", "Waits for lanes that were let go without a call's end, by cause.", ("cause",)
        )
        self.lane_rounds = counter("lane_rounds", "Rounds put into streams ahead of calls of armed lanes.")
        self.lane_dry = counter("lane_dry", "Times that an armed lane had no round left.")
        self.lane_disarmed = counter("lane_disarmed", "Times that a lane was disarmed for something that it held up.")
        self.lanes = gauge("lanes", "Lanes open, by how their calls are noticed.", ("mode",))
        self.streams = gauge("streams", "Streams of calls open.")
        self.queue_fill = gauge(
            "queue_fill_ratio", "Fullest queue of a session in the last 15 s, as a part of its bound max_queue."
        )
        self.regions = gauge("regions", "Regions registered.", ("memory",))
        self.region_bytes = gauge("region_bytes", "Bytes of the regions registered.", ("memory",))
        self.plans = gauge("plans", "Plans held.")
        self.sessions = gauge("sessions", "Sessions open.", ("transport",))
        self.max_sessions = gauge("max_sessions", "Sessions that may be open at once.")
        # Lifecycle.
        self.ready = gauge("ready", "1 while health says SERVING.")
        self.start_time = gauge("start_time_seconds", "When the server started, in seconds since 1970.")
        self.attaches = counter("attaches", "Attach requests by outcome.", ("transport", "outcome"))
        self.reattaches = counter("reattaches", "Sessions of clients that had lost one before.", ("transport",))
        self.sessions_ended = counter("sessions_ended", "Sessions ended, by cause.", ("transport", "cause"))
        self.workers = gauge("workers", "Worker processes, by state.", ("state",))
        self.worker_starts = counter("worker_starts", "Worker processes started.")
        self.worker_crashes = counter("worker_crashes", "Worker processes that ended without being told to.")
        self.worker_kills = counter("worker_kills", "Worker processes that had to be killed.")
        self.compiles = counter(
            "compiles", "Kernels compiled, at a worker's start or once it was ready.", ("kernel", "phase")
        )
        self.fallbacks = counter(
            "fallbacks", "Kernel calls that a slower kernel than the best for them served.", ("kernel", "reason")
        )
        # What runs where.
        self.build_info = gauge("build_info", "What runs: always 1.", ("version", "python", "grpc"))
        self.device_info = gauge(
            "device_info", "The device: always 1.", ("backend", "name", "uuid", "compute_capability")
        )
        self.device_memory = gauge("device_memory_bytes", "Memory of the device, used or not.")
        self.mps_active = gauge("mps_active", "1 where an MPS daemon runs for the server's user; 0 on the CPU.")
        self.process_cpu = counter("process_cpu_seconds", "Processor time of the server's processes.", ("process",))
        self.process_memory = gauge("process_resident_bytes", "Memory of the server's processes.", ("process",))
        self.process_fds = gauge("process_open_fds", "Descriptors open in the server's processes.", ("process",))

    def prepare_front(self, max_sessions: int, version: str) -> None:
        """Sets what the front knows at its start, and makes its series: one that is there shows its first increase."""
        self.max_sessions.set(max_sessions)
        self.start_time.set(time.time())
        self.build_info.labels(version, platform.python_version(), grpc.__version__).set(1)
        self.requests.labels("GetServerInfo", "OK")
        self.request_seconds.labels("GetServerInfo")
        for transport in ("unix", "tcp"):
            self.sessions.labels(transport)
            self.reattaches.labels(transport)
            self.attach_seconds.labels(transport)
            for outcome in ("attached", "refused"):
                self.attaches.labels(transport, outcome)
            for cause in END_CAUSES:
                self.sessions_ended.labels(transport, cause)

    def set_device(self, device: Mapping[str, Any]) -> None:
        """Says which device serves: the `device` of a worker's ready message."""
        backend = "cuda" if device["backend"] == control_pb2.BACKEND_CUDA else "cpu"
        self.device_info.labels(backend, device["name"], device["uuid"], device["compute_capability"]).set(1)
        self.device_memory.set(device["memory_bytes"])


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

    def __init__(self, own: CollectorRegistry, refresh: Callable[[], None] = lambda: None) -> None:
        """Makes one.

        Args:
            own: the front's registry.
            refresh: called before each reading, to bring figures up to date that nobody reports; any thread.
        """
        self._own = own
        self._refresh = refresh
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
        self._refresh()
        totals: dict[Key, float] = {}
        with self._lock:
            for source in (self._retired, *self._live.values()):
                for key, value in source.items():
                    totals[key] = _merge(key, totals.get(key, 0.0), value)
        for family in self._own.collect():
            merged = Metric(family.name, family.documentation, family.type)
            sums: dict[Key, float] = {}
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    sums[family.name, sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            for key, value in totals.items():
                if key[0] == family.name:
                    sums[key] = _merge(key, sums.get(key, 0.0), value)
            for (_, name, labels), value in sorted(sums.items(), key=_order):
                merged.add_sample(name, dict(labels), value)
            yield merged


def _merge(key: Key, one: float, other: float) -> float:
    """Merges two processes' figures of one series."""
    return max(one, other) if key[0].endswith("_ratio") else one + other


def _order(item: tuple[Key, float]) -> tuple[Any, ...]:
    """Sorts samples: children together, a histogram's buckets by their bound, then its count and sum."""
    (_, name, labels), _ = item
    bound = math.inf
    for label, value in labels:
        if label == "le":
            bound = float(value)
    rest = tuple(pair for pair in labels if pair[0] != "le")
    return rest, not name.endswith("_bucket"), bound, name
