"""One device on the status page: what is to be said of it, computed from its figures."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ._status_readings import Figures, KernelKey, Point, quantile
from .metrics import K_CLASSES

__all__ = ["DeviceView", "KernelRow"]

_K_ORDER = {label: place for place, (_, label) in enumerate(K_CLASSES)}
_WINDOW_S = 60.0
"""What "now" means for rates and quantiles."""


@dataclass(frozen=True)
class KernelRow:
    """One kernel, dtype and class of k.

    Attributes:
        key: which.
        calls: ever.
        rate: calls a second in the window.
        p50: median device time in seconds: of the window or, where it took none, of all calls (`idle`).
        p99: 99th percentile, likewise.
        idle: no call in the window.
        recent: the median of each interval, for a small chart; None where there was no call.
    """

    key: KernelKey
    calls: float
    rate: float | None
    p50: float | None
    p99: float | None
    idle: bool
    recent: Sequence[float | None]


class DeviceView:
    """What the page says of one device.

    Args:
        name: the device's label; "" for a server of one.
        figures: newest samples.
        points: the last minutes, oldest first.
        bounds: of the histograms' buckets.
    """

    def __init__(self, name: str, figures: Figures, points: Sequence[Point], bounds: Sequence[float]) -> None:
        self.name = name
        self.figures = figures
        self._points = points
        self._bounds = bounds
        newest = points[-1]
        self._first = next((point for point in points if newest.time - point.time <= _WINDOW_S), newest)
        self._last = newest

    @property
    def info(self) -> dict[str, str]:
        """The device's labels; empty while no worker has told."""
        return next((labels for labels, _ in self.figures.samples("topkd_device_info")), {})

    @property
    def build(self) -> dict[str, str]:
        """The versions."""
        return next((labels for labels, _ in self.figures.samples("topkd_build_info")), {})

    @property
    def serving(self) -> bool:
        """Whether health says SERVING."""
        return self.figures.total("topkd_ready") > 0

    def rate(self, counter: str) -> float | None:
        """Returns how much a counter of the points ("requests", "rows", "bytes") grew a second in the window."""
        seconds = self._last.time - self._first.time
        return (getattr(self._last, counter) - getattr(self._first, counter)) / seconds if seconds > 0 else None

    def handler(self, part: float) -> float | None:
        """Returns a quantile of SelectTopK's time in the handler: of the window, else of all calls."""
        now = quantile(self._bounds, self._first.handler, self._last.handler, part)
        return now if now is not None else quantile(self._bounds, (), self._last.handler, part)

    def kernels(self) -> list[KernelRow]:
        """Returns the kernels that ever ran, by name, dtype and class of k: an order that stays."""
        rows = [self._row(key) for key, counts in self._last.kernels.items() if counts and counts[-1]]
        return sorted(rows, key=lambda row: (*row.key[:2], _K_ORDER.get(row.key[2], len(_K_ORDER)), row.key[2]))

    def _row(self, key: KernelKey) -> KernelRow:
        first, last = self._first.kernels.get(key, ()), self._last.kernels[key]
        seconds = self._last.time - self._first.time
        taken = last[-1] - (first[-1] if first else 0.0)
        p50, p99 = (quantile(self._bounds, first, last, part) for part in (0.5, 0.99))
        idle = p50 is None
        if idle:
            p50, p99 = (quantile(self._bounds, (), last, part) for part in (0.5, 0.99))
        recent = [self._between(one, other, 0.5, key) for one, other in pairwise(self._points)]
        return KernelRow(key, last[-1], taken / seconds if seconds > 0 else None, p50, p99, idle, recent)

    def _between(self, one: Point, other: Point, part: float, key: KernelKey) -> float | None:
        return quantile(self._bounds, one.kernels.get(key, ()), other.kernels.get(key, ()), part)

    def charts(self) -> dict[str, list[Any]]:
        """Returns the last minutes: seconds before now, requests a second, device time p50 and p99 in seconds."""
        ago: list[float] = []
        requests: list[float | None] = []
        quantiles: tuple[list[float | None], list[float | None]] = [], []
        for one, other in pairwise(self._points):
            ago.append(round(other.time - self._last.time, 1))
            requests.append(round((other.requests - one.requests) / (other.time - one.time), 3))
            earlier, later = _all_kernels(one), _all_kernels(other)
            for values, part in zip(quantiles, (0.5, 0.99), strict=True):
                value = quantile(self._bounds, earlier, later, part)
                values.append(None if value is None or math.isinf(value) else float(f"{value:.4g}"))
        return {"ago": ago, "requests": requests, "p50": quantiles[0], "p99": quantiles[1]}

    def attention(self) -> Iterator[str]:
        """Yields what an operator should look at."""
        total = self.figures.total
        if not self.serving:
            yield "No session can attach: health says NOT_SERVING."
        if compiled := total("topkd_compiles_total", phase="ready"):
            yield f"Kernels compiled while serving, for which calls waited: {compiled:.0f}."
        for kernel, calls in self.figures.by("topkd_fallbacks_total", "kernel").items():
            if calls:
                yield f"Calls that {kernel} served for want of a faster kernel: {calls:,.0f}."
        if crashes := total("topkd_worker_crashes_total"):
            yield f"Workers that ended without being told to: {crashes:.0f}."
        if total("topkd_queue_fill_ratio") > 0.8:
            yield f"A session's queue is {total('topkd_queue_fill_ratio'):.0%} full."
        if self.info.get("backend") == "cuda" and not total("topkd_mps_active"):
            yield "No MPS daemon: the driver time-slices the engines' work and the server's."


def _all_kernels(point: Point) -> list[float]:
    """Returns the counts of all kernels' buckets together."""
    return [sum(column) for column in zip(*point.kernels.values(), strict=True)]
