"""One page of metrics for all fronts of a fleet: theirs, with the device as a label, and the fleet's own."""

import http.client
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = ["FLEET_METRICS", "FleetCollector", "FrontFigures"]

FrontFigures = tuple[str, bool, int, int]
"""(name, whether it serves, restarts, port of its metrics or 0)."""

FLEET_METRICS = ("topkd_device_up", "topkd_device_restarts_total")
_TIMEOUT_S = 3.0


class FleetCollector(Collector):
    """Asks every front when it is asked itself. A front that does not answer is left out, and `topkd_device_up` tells.

    Args:
        fronts: returns the figures of every front; called from the threads of the metrics server.
    """

    def __init__(self, fronts: Callable[[], Sequence[FrontFigures]]) -> None:
        self._fronts = fronts

    def collect(self) -> Iterator[Metric]:
        """Yields every family once, with the samples of all fronts."""
        fronts = list(self._fronts())
        up = GaugeMetricFamily("topkd_device_up", "Whether a device's front says SERVING.", labels=["device"])
        restarts = CounterMetricFamily("topkd_device_restarts", "Fronts started anew.", labels=["device"])
        for name, serving, count, _ in fronts:
            up.add_metric([name], float(serving))
            restarts.add_metric([name], count)
        yield up
        yield restarts
        with ThreadPoolExecutor(max_workers=max(len(fronts), 1)) as pool:
            pages = list(pool.map(lambda front: _page(front[3]), fronts))
        yield from _merge([front[0] for front in fronts], pages)


def _page(port: int) -> str:
    """Returns a front's page, nothing if it does not answer."""
    if not port:
        return ""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == 200 else ""
    except OSError:
        return ""
    finally:
        connection.close()


def _merge(names: Sequence[str], pages: Sequence[str]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for name, page in zip(names, pages, strict=True):
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "device": name}, sample.value)
    yield from families.values()
